"""The body of a request as it was received, and the JSON in it. Work on a long one is done beside the event loop."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from pydantic_core import from_json

from console.api.http.auth import client_of
from console.api.http.errors import BodyTooLarge, BodyTooSlow, UnknownEncoding, UnknownExpectation
from console.api.http.json_bounds import JsonBounds
from console.api.http.limits import RateLimited
from console.api.http.scopes import LOOKING
from console.api.http.serial_thread import SerialThread
from console.api.http.traffic import call_of
from console.api.settings import ApiSettings
from engine.errors import InvalidRequest, RequestTimeout

T = TypeVar("T")

LONG_BODY = 32_768
"""Bytes: what a shorter body holds is read and checked in 3 ms at worst."""

MAX_CLIENT_BODIES = 32
"""Of the greatest length: so much of bodies, packed and unpacked, may one client have in memory until the work that
they ask for is queued."""

BODY_THREAD = web.AppKey("body_thread", SerialThread)
BODY_BYTES = web.AppKey("body_bytes", Counter[str])
"""Bytes of bodies in memory by client."""

_RECEIVED = web.RequestKey("received", bytes)
_DOCUMENT = web.RequestKey("document", dict[str, Any])
_IS_LONG = web.RequestKey("is_long", bool)
_HELD = web.RequestKey("held", int)


def reserve_bytes(request: web.Request, size: int) -> None:
    """Count bytes of the request's body. Raises RateLimited where those of its client are too many."""
    held, client, most = request.app[BODY_BYTES], client_of(request), max_client_bytes(request)
    if held[client] + size > most:
        raise RateLimited(
            f"The bodies of this client's requests take more than {most} bytes; send fewer at once",
            retry_after_s=1.0,
        )
    held[client] += size
    request[_HELD] = request.get(_HELD, 0) + size


def max_client_bytes(request: web.Request) -> int:
    """Bytes that the bodies of one client may take."""
    return MAX_CLIENT_BODIES * request.client_max_size


def release_bytes(request: web.Request) -> None:
    """Count them no more: the body became prompts, or is gone."""
    held, client = request.app[BODY_BYTES], client_of(request)
    held[client] -= request.pop(_HELD, 0)
    if not held[client]:
        del held[client]


async def offload(request: web.Request, work: Callable[[], T]) -> T:
    """The result of `work`, done in the thread for bodies."""
    return await request.app[BODY_THREAD].run(work, client_of(request))


async def run_offloaded(request: web.Request, work: Callable[[], T]) -> T:
    """The result of `work` on what the request's body holds: at once where that was short, else offloaded."""
    return await offload(request, work) if request.get(_IS_LONG, False) else work()


def body_bytes(request: web.Request) -> bytes:
    """The request's body, unpacked; empty where it has none."""
    body: bytes = request.get(_RECEIVED, b"")
    return body


def store_body(request: web.Request, body: bytes) -> None:
    """From now on `body` is the request's."""
    request[_RECEIVED] = body
    request[_IS_LONG] = len(body) > LONG_BODY


async def document_of(request: web.Request, absent: bytes = b"") -> dict[str, Any]:
    """The JSON object that the request's body is, parsed once. absent: what no body at all stands for.

    Raises InvalidRequest.
    """
    if _DOCUMENT not in request:
        request[_DOCUMENT] = await run_offloaded(request, partial(json_object, body_bytes(request) or absent))
    return request[_DOCUMENT]


def drop_body(request: web.Request) -> None:
    """Keep neither the body nor what was parsed, which takes several times as much: an answer may last for minutes, and
    a connection without a request keeps the last."""
    request.pop(_RECEIVED, None)
    request.pop(_DOCUMENT, None)


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; raises InvalidRequest."""
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {json_type_name(document)}")
    return document


def json_type_name(value: object) -> str:
    """What JSON calls the value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


# Bodies are received before anybody is bothered with them: in time, not too long, and within the bounds of JSON.

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What zlib calls the encodings of bodies."""

_PACKED_SLICE = 65_536
"""Bytes that are unpacked before what came of them is looked at: blocks of nothing take a microsecond each."""

_LEAVE = "100-continue"


def body_middleware(settings: ApiSettings, bounds: Callable[[], JsonBounds]) -> Middleware:
    """Reads the body of a request, which its handler then has at once. Where nobody would look at it, it is not read:
    of requests that only look, and of those for which there is no endpoint, whoever sends them.

    bounds: what a body may hold now.
    """

    @web.middleware
    async def receive(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.can_read_body and request.method not in LOOKING and request.match_info.http_exception is None:
                await _take(request, settings, bounds())
            return await handler(request)
        finally:
            drop_body(request)
            release_bytes(request)

    return receive


def with_expect_handler(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """Routes whose clients get leave to send a body (RFC 9110, 10.1.1) only once it is to be read."""
    return [
        web.route(route.method, route.path, route.handler, **{**route.kwargs, "expect_handler": _check_expectation})
        for route in routes
    ]


async def _check_expectation(request: web.Request) -> None:
    expected = request.headers["Expect"]
    if request.version >= HttpVersion11 and expected.lower() != _LEAVE:
        raise UnknownExpectation(f"Expect is {expected[:100]}; only {_LEAVE} is understood")


async def _take(request: web.Request, settings: ApiSettings, bounds: JsonBounds) -> None:
    """Read the body of a request, unpack it and look whether it is within bounds. Nothing but the request has it then:
    an answer may last for minutes."""
    encoding = _encoding_of(request)
    raw = await _body(request, settings)
    check = partial(_checked, raw, encoding, settings.max_body_bytes, bounds)
    body = await offload(request, check) if encoding or len(raw) > LONG_BODY else check()
    if encoding:
        reserve_bytes(request, len(body))
    store_body(request, body)


async def _body(request: web.Request, settings: ApiSettings) -> bytes:
    """The body as it was sent; most are there with their heads, and need no time-out. Raises BodyTooLarge, before any
    of it is read where its length is declared, and BodyTooSlow."""
    if (request.content_length or 0) > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    if request.content.is_eof():
        return await _read(request, settings.max_body_bytes)
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == _LEAVE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        within_s = settings.body_timeout_s
        raise BodyTooSlow(f"The body did not come within {within_s:g} s", limit_s=within_s) from None


async def _read(request: web.Request, most: int) -> bytes:
    """What aiohttp's own `read` gives, which would keep it as long as the connection is open."""
    pieces: list[bytes] = []
    size = 0
    while piece := await request.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise too_large(most)
        reserve_bytes(request, len(piece))
    return b"".join(pieces)


def _encoding_of(request: web.Request) -> str:
    """How the body is packed, "" where it is not. Raises UnknownEncoding."""
    named = request.headers.get("Content-Encoding", "").strip()
    encoding = named.lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOWS:
        known = ", ".join(_WINDOWS)
        raise UnknownEncoding(
            f"Content-Encoding {named[:100]} is not supported: send {known} or neither", encodings=known
        )
    return encoding


def _checked(raw: bytes, encoding: str, most: int, bounds: JsonBounds) -> bytes:
    """The body, unpacked; raises as `unpacked` and JsonBounds.check do."""
    body = unpacked(raw, encoding, most) if encoding else raw
    bounds.check(body)
    return body


def unpacked(raw: bytes, encoding: str, most: int) -> bytes:
    """A body that is packed as gzip or deflate. Raises InvalidRequest where it is cut short or broken, BodyTooLarge
    where it unpacks to more than `most` bytes."""
    # deflate should have zlib's header, and some send it without (RFC 9110, 8.4.1.2)
    is_bare = encoding == "deflate" and raw[:1] != b"" and raw[0] & 0xF != zlib.DEFLATED
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _WINDOWS[encoding])
    body = bytearray()
    for at in range(0, len(raw), _PACKED_SLICE):
        try:
            body += unpacker.decompress(raw[at : at + _PACKED_SLICE], most + 1 - len(body))
        except zlib.error:
            raise InvalidRequest(f"The body is not valid {encoding}") from None
        if len(body) > most:
            raise too_large(most)
        if len(body) < at // 2:
            raise InvalidRequest(f"The {encoding} body is longer than what it unpacks to")
    if unpacker.unused_data:
        raise InvalidRequest(f"The body is not valid {encoding}: it goes on after its end")
    if not unpacker.eof:
        raise InvalidRequest(f"The {encoding} body is cut short")
    return bytes(body)


def too_large(limit: int) -> BodyTooLarge:
    """The refusal of a body that is longer than `limit` bytes."""
    return BodyTooLarge(f"The body is longer than the {limit} bytes that are allowed", limit_bytes=limit)


def response_timeout_middleware(settings: ApiSettings) -> Middleware:
    """Ends what lasts longer than any request may: the engine ends answers in time, this who takes them too slowly."""

    @web.middleware
    async def end(request: web.Request, handler: Handler) -> web.StreamResponse:
        total_s = settings.total_timeout_s
        if total_s is None or not call_of(request).dialect:
            return await handler(request)
        try:
            async with asyncio.timeout(total_s) as limit:
                return await handler(request)
        except TimeoutError:
            if not limit.expired():
                raise
            if call_of(request).began and request.transport is not None:
                request.transport.abort()
            raise RequestTimeout(f"The request took longer than the {total_s:g} s that it may") from None

    return end
