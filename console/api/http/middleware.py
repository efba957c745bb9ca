"""Middlewares for every request: its id, its count, its dialect, and errors in that dialect's shape."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.dialects.registry import DialectRegistry
from console.api.http.client_address import client_address
from console.api.http.connections import REQUEST_ID, SERVER
from console.api.http.errors import BadHttp, DialectOff, InternalError, MethodNotAllowed, NotFound
from console.api.http.observability import CLIENT_CLOSED_STATUS
from console.api.http.request_body import too_large
from console.api.http.scopes import ADMIN, OPEN_PATHS, READ_METHODS, is_read_only
from console.api.http.traffic import CALL, Traffic, call_of, error_reply, find_call, record_client_closed
from engine.errors import EngineError

log = logging.getLogger("api")
access_log = logging.getLogger("api.access")
"""A line for each request, "METHOD path status in seconds": a source of its own that the Logs screen can hide."""

_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
_POLLED = f"{ADMIN}call/"
_BELOW_DEBUG = logging.DEBUG - 1
"""An attached console polls: a log line for each of its polls would cause the next one."""

_MAX_PATH_CHARACTERS = 200
"""Of a path in the log, thousands of whose lines are in memory."""

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def counting_middleware(traffic: Traffic, dialects: DialectRegistry) -> Middleware:
    """Return the middleware that counts requests and logs one line for each."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        began = clock()
        agent = request.headers.get("User-Agent", "")
        call = request[CALL] = traffic.enter(client_address(request), agent, request.method, request.path)
        call.arrived = began
        call.format_error = dialects.error_formatter(request)
        given_id = request.headers.get(REQUEST_ID, "")  # the client's, where it is harmless
        call.request_id = given_id if _SANE_ID.fullmatch(given_id) else secrets.token_hex(16)
        status: int | None = None
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            if status is None:
                record_client_closed(request)
            traffic.leave(call)
            access_log.log(
                _log_level(request),
                "%s %s %d in %.3f s",
                request.method,
                request.raw_path.partition("?")[0][:_MAX_PATH_CHARACTERS],
                status or CLIENT_CLOSED_STATUS,
                clock() - began,
            )

    return count


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the shape of the request's dialect. The details of an unexpected error are logged alone."""
    try:
        return await handler(request)
    except EngineError as error:
        return await _failed(request, error)
    except web.HTTPException as error:
        error.__traceback__ = None  # aiohttp keeps that of an unknown path with its request, which the frames here have
        return await _failed(request, _from_http(request, error))
    except web.RequestPayloadError as error:
        return await _failed(request, BadHttp(f"The body could not be read: {error}"))
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.raw_path.partition("?")[0])
        return await _failed(request, InternalError("Internal error; the server log has the cause"))


async def _failed(request: web.Request, failure: EngineError) -> web.StreamResponse:
    """Return the answer of a request that failed. The frame that caught the failure holds no other reference to it: its
    traceback has that frame, and the body would stay in memory until the next look for cycles."""
    call = find_call(request)
    if call is not None and call.end_stream is not None:
        return await call.end_stream(failure)
    return error_reply(request, failure)


def dialect_middleware(traffic: Traffic, dialects: DialectRegistry) -> Middleware:
    """Return the middleware that determines the dialect of a request; one that is switched off is a 404.

    While the server stops, work is refused in the shape of its dialect; requests that only read are answered.
    """

    @web.middleware
    async def resolve_dialect(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (dialect := await dialects.of(request)) is not None:
            call = call_of(request)
            call.dialect, call.format_error = dialect.name, dialect.format_error
            call.operation = dialects.operation(request, dialect)
            if not dialects.is_on(dialect):
                raise DialectOff(
                    f"{request.path} is off: the {dialect.title} dialect is disabled on this server",
                    path=request.path,
                    dialect=dialect.name,
                )
        if traffic.closing and not is_read_only(request.method, request.headers):
            response = error_reply(request, traffic.closing_error())
            response.force_close()
            return response
        return await handler(request)

    return resolve_dialect


def response_headers(
    dialects: DialectRegistry,
    share: Callable[[web.Request, web.StreamResponse], None],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the step that gives an answer, as it begins, the id of its request and what `share` adds."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        if (call := find_call(request)) is not None:
            call.began = True
            for name in (REQUEST_ID, *dialects.request_id_headers(request)):
                response.headers[name] = call.request_id
            response.headers.update(call.tool_headers)
            response.headers["Server"] = SERVER
        share(request, response)

    return add_headers


def _log_level(request: web.Request) -> int:
    """Return the level of a request's line in the log."""
    if request.method in READ_METHODS and request.path.startswith(_POLLED):
        return _BELOW_DEBUG
    return logging.DEBUG if request.path in _QUIET_PATHS else logging.INFO


def _from_http(request: web.Request, error: web.HTTPException) -> EngineError:
    match error:
        case web.HTTPNotFound():
            return NotFound(f"Not found: {request.path}", path=request.path)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowed(f"{request.path} supports {allowed}, not {request.method}", allowed=allowed)
        case web.HTTPRequestEntityTooLarge():
            return too_large(request.client_max_size)
        case _:
            return BadHttp(error.reason)
