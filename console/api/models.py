"""GET /v1/models and /v1/models/{id}: the model that is loaded."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.errors import json_response
from console.api.openai import now
from console.api.served import ServedModel, served_model
from engine.errors import ModelNotFound, NoModelLoaded


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI lists it. max_model_len: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ericllm"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that answer: one or none."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Models:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._created = now()

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [web.get("/v1/models", self._list), web.get("/v1/models/{name:.+}", self._get)]

    async def _list(self, request: web.Request) -> web.Response:
        try:
            cards = [self._card(served_model(self._context.engine, None))]
        except NoModelLoaded:
            cards = []
        return json_response(ModelList(data=cards))

    async def _get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            return json_response(self._card(served_model(self._context.engine, name)))
        except NoModelLoaded:
            raise ModelNotFound(f"There is no model {name!r} here; none is loaded", param="model") from None

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(id=model.name, created=self._created, max_model_len=model.loaded.max_model_len)
