"""Checks before authentication: pages of other origins, DNS rebinding, too many requests.

A page in a browser has the rights of its machine: it reaches loopback there, and where its own name resolves to that
(DNS rebinding) may even read the answer. It cannot hide its name: Host or Origin has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.http.client_address import client_address
from console.api.http.connections import (
    EXPECTED_WAIT,
    NOT_STRICT,
    QUEUE_POSITION,
    QUEUE_WAIT,
    REQUEST_ID,
    TOOL_FORMAT,
    UNLOADS,
)
from console.api.http.errors import Forbidden, Misdirected
from console.api.http.limits import AddressLimiter
from console.api.http.scopes import OPEN_PATHS, is_read_only
from console.settings.addresses import is_loopback

ANY_HOST = "*"
_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = f"Authorization, Content-Type, X-API-Key, {REQUEST_ID}"
_EXPOSED = ", ".join(
    (REQUEST_ID, "Retry-After", QUEUE_POSITION, EXPECTED_WAIT, QUEUE_WAIT, UNLOADS, TOOL_FORMAT, NOT_STRICT)
)
_PREFLIGHT_S = 600


def guard_middleware(
    addresses: AddressLimiter, origins: Collection[str], hosts: Collection[str], on_loopback: Callable[[], bool]
) -> Middleware:
    """Checks who is asked, from where and how often, and answers what browsers ask first.

    origins: those whose pages may ask ("*": all).  hosts: names that this server goes by besides those of loopback.
    on_loopback: whether it listens there alone.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        for name in requested_hosts(request) if on_loopback() else ():
            if not is_own_host(name, hosts):
                host = f"Host {name[:100]}" if name else "An empty Host header"
                raise Misdirected(f"{host} is not allowed: use localhost, or add it with --allowed-hosts")
        origin = request.headers.get("Origin")
        if origin is not None and not _is_open(origin, request, origins) and _could_change(request):
            raise Forbidden("Requests from other origins are refused; --cors-origins allows them")
        if request.path not in OPEN_PATHS:
            addresses.count(client_address(request))
        if origin is not None and _is_preflight(request):
            return web.Response(status=204)
        return await handler(request)

    return guard


def cors_headers(
    origins: Collection[str], own_headers: Iterable[str]
) -> Callable[[web.Request, web.StreamResponse], None]:
    """Return the step that says in an answer which pages may read it, which adds nothing where no page may.

    own_headers: headers of dialects that those pages may send. Credentials are never allowed: no cookie identifies a
    client here.
    """
    allowed_headers = ", ".join([_HEADERS, *own_headers])

    def share(request: web.Request, response: web.StreamResponse) -> None:
        if not origins:
            return
        response.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin is None or not _is_listed(origin, origins):
            return
        response.headers["Access-Control-Allow-Origin"] = ANY_HOST if ANY_HOST in origins else origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        if _is_preflight(request):
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Allow-Headers"] = allowed_headers
            response.headers["Access-Control-Max-Age"] = str(_PREFLIGHT_S)

    return share


def requested_hosts(request: web.Request) -> list[str]:
    """The server's names in a request: in its Host header, and in its address where that is a whole one (RFC 9112,
    3.2.2). A request without any is no browser's."""
    named = request.headers.getall("Host", [])
    scheme, mark, rest = request.raw_path.partition("://")
    return [*named, rest.partition("/")[0]] if mark and "/" not in scheme else named


def is_own_host(named: str, hosts: Collection[str]) -> bool:
    """Return whether a name, with or without a port, is one of this server on loopback."""
    try:
        parts = urlsplit(f"//{named}")
        _ = parts.port  # raises ValueError where it is no port
        name = (parts.hostname or "").rstrip(".")
    except ValueError:
        name = ""
    return is_loopback(name) or name.endswith(".localhost") or ANY_HOST in hosts or name in hosts


def _is_open(origin: str, request: web.Request, origins: Collection[str]) -> bool:
    """Return whether pages of that origin may send requests: the server's own pages, and those of the setting."""
    host = origin.lower().partition("://")[2]  # with its port; "" for an origin without any, such as "null"
    return _is_listed(origin, origins) or (host != "" and host == request.headers.get("Host", "").lower())


def _is_listed(origin: str, origins: Collection[str]) -> bool:
    return ANY_HOST in origins or origin.lower() in origins


def _could_change(request: web.Request) -> bool:
    """Return whether a request may change something: a websocket, or the request that a preflight announces."""
    return not is_read_only(request.method, request.headers) or _is_preflight(request)


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
