"""GET and POST /api/v1/model, and POST /api/v1/token-count."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.textgen.body import CountBody, ModelBody
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.model_list import answering_models, first_name
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import describes
from engine.errors import InvalidRequest

_NO_MODEL = "None"
"""text-generation-webui's name of no model."""

_ADMIN = "use /admin/load and /admin/unload, with a key of scope admin"


class Named(msgspec.Struct, frozen=True):
    """The model's name, or what the body asks for."""

    result: Any


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that answers, and its adapters."""

    model_name: str
    lora_names: list[str]


class Count(msgspec.Struct, frozen=True):
    """The number of tokens of a text."""

    tokens: int


class Counts(msgspec.Struct, frozen=True):
    """The counts, one for the text."""

    results: list[Count]


class InfoEndpoints:
    """GET and POST /api/v1/model, POST /api/v1/token-count."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.get("/api/v1/model", self._model),
            web.post("/api/v1/model", self._act),
            web.post("/api/v1/token-count", self._count),
        ]

    @describes("Name of the model", answer=Named)
    async def _model(self, request: web.Request) -> web.Response:
        return json_response(Named(self._name()))

    @describes("List models and adapters (loading is refused)", body=ModelBody, answer=Named)
    async def _act(self, request: web.Request) -> web.Response:
        body = await read(request, ModelBody, absent=b"{}")
        models = answering_models(self._context.engine)
        match body.action:
            case "":
                return json_response(Named(self._name()))
            case "info":
                loras = [adapter.name for adapter in models[0].adapters] if models else []
                return json_response(Named(ModelInfo(self._name(), loras)))
            case "list":
                return json_response(Named([model.name for model in models]))
            case "list_lora":
                return json_response(Named([adapter.name for model in models for adapter in model.adapters]))
            case "load" | "unload" | "add_lora" | "settings" | "list_settings":
                raise InvalidRequest(f"action {body.action} is not supported here: {_ADMIN}", param="action")
            case _:
                raise InvalidRequest("action should be info, list or list_lora", param="action")

    @describes("Count the tokens of a text", body=CountBody, answer=Counts)
    async def _count(self, request: web.Request) -> web.Response:
        body = await read(request, CountBody)
        model = await self._context.served_model(request, SamplingFields.from_document({}))
        return json_response(Counts([Count(len(await model.count(body.prompt)))]))

    def _name(self) -> str:
        return first_name(self._context.engine) or _NO_MODEL
