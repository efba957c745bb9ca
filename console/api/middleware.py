"""What happens to every request: an id, a count, a key check, and errors in one shape."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.errors import (
    BadHttp,
    BodyTooLarge,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotAuthorized,
    NotFound,
    error_response,
)
from console.api.settings import ApiSettings
from console.api.traffic import Traffic
from engine.errors import EngineClosed, EngineError

log = logging.getLogger("api")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What load balancers ask, which hold no key."""

ADMIN = "/admin/"
"""What operators alone may ask."""

_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def counting(traffic: Traffic) -> Middleware:
    """Counts, logs one line per request, and turns work away while the server stops; who only looks is answered."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        began = clock()
        status = 499
        traffic.enter()
        try:
            if traffic.closing and request.method not in _LOOKING:
                response: web.StreamResponse = error_response(EngineClosed("The server is stopping"))
                response.force_close()
            else:
                response = await handler(request)
            status = response.status
            return response
        finally:
            traffic.leave()
            level = logging.DEBUG if request.path in _QUIET_PATHS else logging.INFO
            log.log(level, "%s %s %d in %.3f s", request.method, request.raw_path, status, clock() - began)

    return count


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape. What nobody foresaw goes to the log and is told in a plain sentence."""
    try:
        return await handler(request)
    except EngineError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(_from_http(request, error))
    except web.RequestPayloadError as error:
        return error_response(BadHttp(f"The body could not be read: {error}"))
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s broke", request.method, request.raw_path)
        return error_response(InternalError("The server failed to answer; its log says why"))


def authorizing(settings: ApiSettings) -> Middleware:
    """Asks for the key, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, where there is one. Where there is none,
    admin endpoints answer on this machine alone."""
    expected = None if settings.api_key is None else _digest(settings.api_key)

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_PATHS:
            given = _given_key(request)
            if given is None:
                raise NotAuthorized("This server needs a key: send it as Authorization: Bearer KEY")
            if not hmac.compare_digest(_digest(given), expected):
                raise NotAuthorized("That key is not valid here")
        elif expected is None and request.path.startswith(ADMIN) and not _is_local(request):
            raise Forbidden("Without an API key, admin requests are taken from this machine alone: set --api-key")
        return await handler(request)

    return authorize


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Put an id on the answer: the client's own where it is harmless, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    response.headers["X-Request-Id"] = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _given_key(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("X-API-Key")


def _is_local(request: web.Request) -> bool:
    """Whether a program on this machine asks for itself: not a proxy for somebody else, and not a browser for a page
    from elsewhere (pages send Origin; one whose name was pointed at this address sends that name as Host)."""
    handed_on = any(name in request.headers for name in ("Origin", *_PROXIED))
    return not handed_on and _is_loopback(request.remote or "") and _is_loopback(_named_host(request))


def _named_host(request: web.Request) -> str:
    """The host that the client believes it asks; "" where that is none."""
    try:
        return request.url.host or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _digest(key: str) -> bytes:
    """Keys are compared by digest: in constant time whatever their lengths."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _from_http(request: web.Request, error: web.HTTPException) -> EngineError:
    match error:
        case web.HTTPNotFound():
            return NotFound(f"There is nothing at {request.path}", path=request.path)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}", allowed=allowed)
        case web.HTTPRequestEntityTooLarge():
            limit = request.client_max_size
            return BodyTooLarge(f"The body is longer than the {limit} bytes that are allowed", limit_bytes=limit)
        case _:
            return BadHttp(error.reason)
