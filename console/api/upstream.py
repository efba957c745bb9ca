"""llama-swap's /upstream/MODEL/PATH: a request to PATH for that model."""

from __future__ import annotations

from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

from console.api.http.errors import NotFound
from console.api.http.request_body import name_model
from console.api.http.scopes import READ_METHODS
from console.api.requests.schemas import describes, endpoint_specs

_PREFIX = "/upstream"

_MAX_NAME_PARTS = 8
"""Parts of a model's name, between slashes; each is one look for an endpoint."""

_UNNAMED = frozenset(
    {
        "/health",
        "/api/tags",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
    }
)
"""Endpoints that take no model, and that clients of one model use."""


@web.middleware
async def upstream_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request under the prefix as one to the endpoint itself. All other middlewares, and so keys, limits, logs
    and the shape of errors, come after this one."""
    if not request.path.startswith(f"{_PREFIX}/") or (inner := await _inner(request)) is None:
        return await handler(request)
    try:
        return await handler(inner)
    finally:
        request.update(inner)  # aiohttp begins the answer with the request that it has


class Upstream:
    """Everything at and under /upstream."""

    def routes(self) -> list[web.RouteDef]:
        """Return its places and handler."""
        path = f"{_PREFIX}{{path:(?:/.*)?}}"
        return [
            web.get(path, self._pass_on, allow_head=False),
            web.post(path, self._pass_on),
            web.delete(path, self._pass_on),
        ]

    @describes("Answer as the endpoint at the end of the path, for the model before it (llama-swap)", group="server")
    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == _PREFIX or request.path.startswith(f"{_PREFIX}/"):
            raise NotFound(
                f"Not found: {request.path}: send requests to /upstream/MODEL and the path of an endpoint that takes a "
                "model, such as /upstream/MODEL/v1/chat/completions; GET /v1/models lists the models",
                path=request.path,
            )
        return await request.match_info.handler(request)


async def _inner(request: web.Request) -> web.Request | None:
    """Return the request to the endpoint that the path ends with, None where there is none. A model's name may have
    slashes: it ends where an endpoint's path begins."""
    parts = request.rel_url.raw_path.removeprefix(f"{_PREFIX}/").split("/")
    for count in range(1, min(len(parts), _MAX_NAME_PARTS + 1) if parts[0] else 0):
        name = unquote("/".join(parts[:count]))
        url = request.rel_url.with_path("/" + "/".join(parts[count:]), encoded=True, keep_query=True)
        inner = request.clone(rel_url=url.update_query(model=name) if request.method in READ_METHODS else url)
        match = await request.app.router.resolve(inner)
        if isinstance(match, UrlMappingMatchInfo) and await _takes_model(inner, match):
            match.add_app(request.app)
            match.freeze()
            inner._match_info = match
            name_model(inner, name)
            return inner
    return None


async def _takes_model(request: web.Request, match: UrlMappingMatchInfo) -> bool:
    """Return whether an endpoint's requests are for a model: each of its bodies, or its query, may name one. Where an
    endpoint does not support the method, those decide that it does."""
    if isinstance(match.http_exception, web.HTTPMethodNotAllowed):
        others = [request.clone(method=method) for method in match.http_exception.allowed_methods]
        found = [await request.app.router.resolve(other) for other in others]
        return any(_names_model(each) for each in found)
    return match.http_exception is None and _names_model(match)


def _names_model(match: UrlMappingMatchInfo) -> bool:
    if match.route.resource is not None and match.route.resource.canonical in _UNNAMED:
        return True
    fields = [spec.query if spec.body is None else spec.body.model_fields for spec in endpoint_specs(match.handler)]
    return bool(fields) and all("model" in each for each in fields)
