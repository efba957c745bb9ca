"""GET /v1/models and /v1/models/{id}: the models that answer, and their adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.openai.common import now
from console.api.http.errors import json_response
from console.api.requests.schemas import describes
from engine.errors import ModelNotFound
from engine.snapshot import ModelReading, ModelState

ANSWERING: tuple[ModelState, ...] = ("ready", "idle")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI lists it, or, as vLLM does, an adapter: its parent is its model, its root its folder's name.

    max_model_len: tokens of prompt and answer together; None while that is not known.
    state: "idle" is one that sleeps: the next request wakes it, and waits for that.
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
    """All that a request may name."""

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

    @describes("The models and adapters that a request may name", answer=ModelList)
    async def _list(self, request: web.Request) -> web.Response:
        return json_response(ModelList(data=list(self.cards().values())))

    @describes("One of them", answer=ModelCard)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(self.card(request.match_info["name"]))

    def card(self, name: str) -> ModelCard:
        """That of one model or adapter; raises ModelNotFound."""
        cards = self.cards()
        if name not in cards:
            available = ", ".join(cards)
            raise ModelNotFound(
                f"There is no model {name!r} here; available: {available or 'none'}",
                param="model",
                model=name,
                available=available,
            )
        return cards[name]

    def cards(self) -> dict[str, ModelCard]:
        """By name: one that is ready goes before one of the same name that sleeps."""
        answering = [model for model in self._context.engine.published.models if model.status.state in ANSWERING]
        answering.sort(key=lambda model: ANSWERING.index(model.status.state))
        cards: dict[str, ModelCard] = {}
        for model in answering:
            for card in _cards_of(model, self._created):
                cards.setdefault(card.id, card)
        return cards


def _cards_of(model: ModelReading, created: int) -> Iterator[ModelCard]:
    """The model's own card, and one for each adapter of it."""
    loaded, spec = model.status.model, model.status.spec
    limit = loaded.max_model_len if loaded is not None else spec.max_model_len if spec is not None else None
    own = ModelCard(id=model.name, created=created, root=model.name, max_model_len=limit, state=model.status.state)
    yield own
    for adapter in model.adapters:
        yield msgspec.structs.replace(own, id=adapter.name, root=adapter.path.name, parent=model.name)
