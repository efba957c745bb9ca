"""GET /v1/models and /v1/models/{id}, for requests with the anthropic-version header."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.http.errors import json_response
from console.api.requests.model_list import ListedModel
from console.api.requests.schemas import describes
from engine.errors import InvalidRequest

MAX_PAGE = 1000
_QUERY = {
    "limit": f"models per page, 1 to {MAX_PAGE} (default {MAX_PAGE})",
    "after_id": "start after this model",
    "before_id": "end before this model",
}


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    """A model, or an adapter of one. created_at: start of the server.

    max_input_tokens, max_tokens: of a prompt and of an answer, which share the context; null while unknown.
    """

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models. has_more: True before the last page."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicModels:
    """GET /v1/models and /v1/models/{name}."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.get("/v1/models", self._list), web.get("/v1/models/{name:.+}", self._get)]

    @describes("List models and adapters in the format of Anthropic", answer=AnthropicModelList, query=_QUERY)
    async def _list(self, request: web.Request) -> web.Response:
        models = await self._context.models_for(request).listed()
        names = list(models)
        start = _index(request, "after_id", names, -1) + 1
        stop = _index(request, "before_id", names, len(names))
        limit = _limit(request)
        page = names[start:stop][-limit:] if "before_id" in request.query else names[start:stop][:limit]
        return json_response(
            AnthropicModelList(
                data=[self._model(models[name]) for name in page],
                has_more=len(page) < len(names[start:stop]),
                first_id=page[0] if page else None,
                last_id=page[-1] if page else None,
            )
        )

    @describes("A model in the format of Anthropic", answer=AnthropicModel)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(self._model(await self._context.models_for(request).find(request.match_info["name"])))

    def _model(self, model: ListedModel) -> AnthropicModel:
        most = None if model.max_model_len is None else model.max_model_len - 1
        return AnthropicModel(
            id=model.name, display_name=model.name, created_at=self._created, max_input_tokens=most, max_tokens=most
        )


def _index(request: web.Request, field: str, names: list[str], default: int) -> int:
    """Return the index of the model that a field of the query names; raises InvalidRequest."""
    name = request.query.get(field)
    if name is None:
        return default
    if name not in names:
        raise InvalidRequest(f"{field} is {name!r}, which is not a model of this server", param=field)
    return names.index(name)


def _limit(request: web.Request) -> int:
    """Return the size of a page; raises InvalidRequest."""
    text = request.query.get("limit", str(MAX_PAGE))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PAGE):
        raise InvalidRequest(f"limit is {text!r}; it must be 1 to {MAX_PAGE}", param="limit")
    return int(text)
