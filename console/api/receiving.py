"""Bodies are received before anybody is bothered with them: in time, not too long, and within the bounds of JSON."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from functools import partial

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from console.api.errors import BodyTooLarge, BodyTooSlow, UnknownEncoding, UnknownExpectation
from console.api.failing import call_of
from console.api.json_bounds import JsonBounds
from console.api.received import LONG_BODY, forget_received, hold_bytes, keep_received, offload, release_bytes
from console.api.scopes import LOOKING
from console.api.settings import ApiSettings
from engine.errors import InvalidRequest, RequestTimeout

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What zlib calls the encodings of bodies."""

_PACKED_SLICE = 65_536
"""Bytes that are unpacked before what came of them is looked at: blocks of nothing take a microsecond each."""

_LEAVE = "100-continue"


def receiving(settings: ApiSettings, bounds: Callable[[], JsonBounds]) -> Middleware:
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
            forget_received(request)
            release_bytes(request)

    return receive


def receivable(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
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
        hold_bytes(request, len(body))
    keep_received(request, body)


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
        hold_bytes(request, len(piece))
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


def ending(settings: ApiSettings) -> Middleware:
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
