"""What happens to every request: an id, a count, a key check, and errors in the shape of its dialect."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.addresses import is_loopback
from console.api.dialects import Dialects
from console.api.errors import (
    BadHttp,
    BodyTooLarge,
    DialectOff,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotAuthorized,
    NotFound,
)
from console.api.failing import begin, call_of, failed, note_left
from console.api.keys import Key, Keys
from console.api.scopes import ADMIN, LOOKING, OPEN_PATHS, allows, in_words, scope_needed
from console.api.traffic import Traffic
from engine.errors import EngineClosed, EngineError

log = logging.getLogger("api")

LEFT_STATUS = 499
"""What is logged of a request whose client left before there was an answer."""

_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
_POLLED = f"{ADMIN}call/"
_UNHEARD = logging.DEBUG - 1
"""A console elsewhere polls: a line for each time that it reads the log would have it read again."""

_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def counting(traffic: Traffic, dialects: Dialects) -> Middleware:
    """Counts, logs one line per request, and turns work away while the server stops; who only looks is answered."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        began = clock()
        agent = request.headers.get("User-Agent", "")
        call = begin(request, traffic.enter(request.remote or "", agent, request.method, request.path))
        call.tells = dialects.tells(request)
        status: int | None = None
        try:
            if traffic.closing and request.method not in LOOKING:
                response: web.StreamResponse = failed(request, EngineClosed("The server is stopping"))
                response.force_close()
            else:
                response = await handler(request)
            status = response.status
            return response
        finally:
            if status is None:
                note_left(request)
            traffic.leave(call)
            log.log(
                _loudness(request),
                "%s %s %d in %.3f s",
                request.method,
                request.raw_path,
                status or LEFT_STATUS,
                clock() - began,
            )

    return count


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in the shape of the request's dialect. What nobody foresaw is logged and told in a plain sentence."""
    try:
        return await handler(request)
    except EngineError as error:
        return failed(request, error)
    except web.HTTPException as error:
        return failed(request, _from_http(request, error))
    except web.RequestPayloadError as error:
        return failed(request, BadHttp(f"The body could not be read: {error}"))
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s broke", request.method, request.raw_path)
        return failed(request, InternalError("The server failed to answer; its log says why"))


def authorizing(traffic: Traffic, keys: Keys) -> Middleware:
    """Asks for a key that may do what is asked, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, where there are
    keys. Where there are none, admin endpoints answer on this machine alone."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        key: Key | None = None
        if request.path not in OPEN_PATHS:
            if keys.required:
                key = _allowed(request, keys)
            elif request.path.startswith(ADMIN) and not _is_local(request):
                raise Forbidden("Without an API key, admin requests are taken from this machine alone: set --api-key")
        call = call_of(request)
        traffic.admit(call, "" if key is None else key.name)
        if key is None:
            return await handler(request)
        keys.note(key, requests=1)
        try:
            return await handler(request)
        finally:
            keys.note(key, prompt_tokens=call.prompt_tokens, output_tokens=call.output_tokens)

    return authorize


def _allowed(request: web.Request, keys: Keys) -> Key:
    """The request's key; raises NotAuthorized where it has none that is valid, Forbidden where that may not do so."""
    given = _given_key(request)
    if given is None:
        raise NotAuthorized("This server needs a key: send it as Authorization: Bearer KEY")
    key = keys.find(given)
    if key is None:
        raise NotAuthorized("That key is not valid here")
    needed = scope_needed(request.method, request.path)
    if not allows(key.scopes, needed):
        asked = f"{request.method} {request.path}"
        raise Forbidden(f"The key {key.name} may only {in_words(key.scopes)}; {asked} needs the scope {needed}")
    return key


def speaking(dialects: Dialects) -> Middleware:
    """Tells which dialect a request is in; one that is switched off is as good as not there."""

    @web.middleware
    async def speak(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (dialect := await dialects.of(request)) is not None:
            call = call_of(request)
            call.dialect, call.tells = dialect.name, dialect.tells
            if not dialects.is_on(dialect):
                raise DialectOff(
                    f"{request.path} is switched off: this server does not answer the {dialect.title} dialect now",
                    path=request.path,
                    dialect=dialect.name,
                )
        return await handler(request)

    return speak


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Put an id on the answer: the client's own where it is harmless, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    response.headers["X-Request-Id"] = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _loudness(request: web.Request) -> int:
    """The level of the line that a request gets in the log."""
    if request.method in LOOKING and request.path.startswith(_POLLED):
        return _UNHEARD
    return logging.DEBUG if request.path in _QUIET_PATHS else logging.INFO


def _given_key(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("X-API-Key")


def _is_local(request: web.Request) -> bool:
    """Whether a program on this machine asks for itself: not a proxy for somebody else, and not a browser for a page
    from elsewhere (pages send Origin; one whose name was pointed at this address sends that name as Host)."""
    handed_on = any(name in request.headers for name in ("Origin", *_PROXIED))
    return not handed_on and is_loopback(request.remote or "") and is_loopback(_named_host(request))


def _named_host(request: web.Request) -> str:
    """The host that the client believes it asks; "" where that is none."""
    try:
        return request.url.host or ""
    except ValueError:
        return ""


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
