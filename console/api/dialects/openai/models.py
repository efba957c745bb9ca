"""GET /v1/models and /v1/models/{id}: the models that answer or can be loaded, and their adapters."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.openai.common import now
from console.api.http.errors import json_response
from console.api.requests.model_list import ListedModel
from console.api.requests.schemas import describes
from engine.snapshot import ModelState


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI lists it, or, as vLLM does, an adapter: its parent is its model, its root its folder's name.

    max_model_len: tokens of prompt and answer together; None while unknown.
    state: an "idle" or "unloaded" model is loaded by the next request, which waits for it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ericllm"
    root: str
    parent: str | None = None
    max_model_len: int | None
    state: ModelState


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models and adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Models:
    """GET /v1/models and /v1/models/{name}."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._created = now()

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.get("/v1/models", self._list), web.get("/v1/models/{name:.+}", self._get)]

    @describes("List models and adapters", answer=ModelList)
    async def _list(self, request: web.Request) -> web.Response:
        listed = await self._context.models_for(request).listed()
        return json_response(ModelList(data=[self._card(model) for model in listed.values()]))

    @describes("A model or adapter", answer=ModelCard)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(self._card(await self._context.models_for(request).find(request.match_info["name"])))

    def _card(self, model: ListedModel) -> ModelCard:
        return ModelCard(
            id=model.name,
            created=self._created,
            root=model.root,
            parent=model.parent,
            max_model_len=model.max_model_len,
            state=model.state,
        )
