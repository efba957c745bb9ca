"""Versions, the model's name and limits, and the tokens of a text."""

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
"""The versions whose API this is; clients derive from them which endpoints there are."""

_NO_MODEL = "ReadOnly"
"""KoboldAI's name of no model."""


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
    """Version and features. protected: True if a key is required."""

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
    """GET .../model, .../info and .../config, /api/extra/version and /api/extra/tokencount."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        by_path = {
            "model": self._model,
            "info/version": self._united,
            "config/max_context_length": self._context_length,
            "config/max_length": self._answer_length,
            "config/soft_prompts_list": self._soft_prompts,
        }
        return [
            *(web.get(f"/api/{version}/{path}", handler) for version in VERSIONS for path, handler in by_path.items()),
            web.get("/api/extra/version", self._version),
            web.get("/api/extra/true_max_context_length", self._context_length),
            web.post("/api/extra/tokencount", self._count),
        ]

    @describes("Name of the model", answer=Text)
    async def _model(self, request: web.Request) -> web.Response:
        return json_response(Text(first_name(self._context.engine) or _NO_MODEL))

    @describes("KoboldAI API version", answer=Text)
    async def _united(self, request: web.Request) -> web.Response:
        return json_response(Text(_UNITED_VERSION))

    @describes("KoboldCpp API version and features", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(_CPP_VERSION, protected=bool(call_of(request).key)))

    @describes("Max tokens of prompt and answer together", answer=Number)
    async def _context_length(self, request: web.Request) -> web.Response:
        return json_response(Number(await self._context_tokens(request)))

    @describes("Max tokens of an answer", answer=Number)
    async def _answer_length(self, request: web.Request) -> web.Response:
        room = await self._context_tokens(request) - 1
        limit = self._context.settings.max_output_tokens
        return json_response(Number(room if limit is None else min(room, limit)))

    @describes("Soft prompts (none)", answer=Names)
    async def _soft_prompts(self, request: web.Request) -> web.Response:
        return json_response(Names([]))

    @describes("Tokenize text", body=CountBody, answer=Counted)
    async def _count(self, request: web.Request) -> web.Response:
        body = await read(request, CountBody)
        model = await self._context.served_model(request, SamplingFields.from_document({}))
        ids = await model.count(body.prompt, add_special_tokens=body.special)
        return json_response(Counted(len(ids), ids))

    async def _context_tokens(self, request: web.Request) -> int:
        """Return those of the first model; an idle one is loaded."""
        loaded = (
            self._context.engine.status.model
            or (await self._context.served_model(request, SamplingFields.from_document({}))).loaded
        )
        return loaded.max_model_len
