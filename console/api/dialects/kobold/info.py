"""What the server and its model are, and how many tokens a text has."""

from __future__ import annotations

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.kobold.body import CountBody
from console.api.dialects.kobold.generate import VERSIONS
from console.api.http.errors import json_response
from console.api.http.traffic import call_of
from console.api.requests.body import read
from console.api.requests.model_list import first_name
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import describes

_UNITED_VERSION = "1.2.5"
_CPP_VERSION = "1.76"
"""The versions whose API this is: clients look at them for what they may ask."""

_NO_MODEL = "ReadOnly"
"""What KoboldAI says where none is loaded."""


class Text(msgspec.Struct, frozen=True):
    """A name or a version."""

    result: str


class Number(msgspec.Struct, frozen=True):
    """A number of tokens."""

    value: int


class Names(msgspec.Struct, frozen=True):
    """Names of files."""

    values: list[str]


class Counted(msgspec.Struct, frozen=True):
    """The tokens of a text."""

    value: int
    ids: list[int]


class Version(msgspec.Struct, frozen=True):
    """What there is. protected: whether a key is asked for."""

    version: str
    protected: bool
    result: str = "KoboldCpp"
    llm: bool = True
    txt2img: bool = False
    vision: bool = False
    transcribe: bool = False
    multiplayer: bool = False
    websearch: bool = False
    tts: bool = False


class InfoEndpoints:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        told = {
            "model": self._model,
            "info/version": self._united,
            "config/max_context_length": self._context_length,
            "config/max_length": self._answer_length,
            "config/soft_prompts_list": self._soft_prompts,
        }
        return [
            *(web.get(f"/api/{version}/{path}", handler) for version in VERSIONS for path, handler in told.items()),
            web.get("/api/extra/version", self._version),
            web.get("/api/extra/true_max_context_length", self._context_length),
            web.post("/api/extra/tokencount", self._count),
        ]

    @describes("The model's name", answer=Text)
    async def _model(self, request: web.Request) -> web.Response:
        return json_response(Text(first_name(self._context.engine) or _NO_MODEL))

    @describes("The version of KoboldAI whose API this is", answer=Text)
    async def _united(self, request: web.Request) -> web.Response:
        return json_response(Text(_UNITED_VERSION))

    @describes("The version of KoboldCpp whose API this is, and what it can do", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(_CPP_VERSION, protected=bool(call_of(request).key)))

    @describes("How many tokens prompt and answer may have together", answer=Number)
    async def _context_length(self, request: web.Request) -> web.Response:
        return json_response(Number(await self._most(request)))

    @describes("How many tokens an answer may have", answer=Number)
    async def _answer_length(self, request: web.Request) -> web.Response:
        most = await self._most(request) - 1
        allowed = self._context.settings.max_output_tokens
        return json_response(Number(most if allowed is None else min(most, allowed)))

    @describes("There are no soft prompts", answer=Names)
    async def _soft_prompts(self, request: web.Request) -> web.Response:
        return json_response(Names([]))

    @describes("The tokens of a text", body=CountBody, answer=Counted)
    async def _count(self, request: web.Request) -> web.Response:
        body = await read(request, CountBody)
        model = await self._context.served(request, SamplingFields.of({}))
        ids = await model.count(body.prompt, add_special_tokens=body.special)
        return json_response(Counted(len(ids), ids))

    async def _most(self, request: web.Request) -> int:
        """Of the first model; one that sleeps is woken."""
        loaded = (
            self._context.engine.status.model or (await self._context.served(request, SamplingFields.of({}))).loaded
        )
        return loaded.max_model_len
