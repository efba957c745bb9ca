"""The body of a request, and the JSON in it. Long bodies are processed off the event loop."""

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
from console.api.http.scopes import READ_METHODS
from console.api.http.serial_thread import SerialThread
from console.api.http.traffic import call_of
from console.api.settings import ApiSettings
from engine.errors import InvalidRequest, RequestTimeout

T = TypeVar("T")

LONG_BODY = 32_768
"""Bytes: shorter bodies are parsed and checked in max 3 ms."""

MAX_CLIENT_BODIES = 32
"""Bodies of the maximum length that one client may have in memory, compressed and decompressed, until their requests
are queued."""

BODY_THREAD = web.AppKey("body_thread", SerialThread)
BODY_BYTES = web.AppKey("body_bytes", Counter[str])
"""Bytes of bodies in memory, by client."""

_BODY = web.RequestKey("received", bytes)
_DOCUMENT = web.RequestKey("document", dict[str, Any])
_IS_LONG = web.RequestKey("is_long", bool)
_MODEL = web.RequestKey("model_of_path", str)
_RESERVED = web.RequestKey("held", int)


def reserve_bytes(request: web.Request, size: int) -> None:
    """Count bytes of the request's body. Raises RateLimited where its client has too many in memory."""
    reserved, client, max_bytes = request.app[BODY_BYTES], client_of(request), max_client_bytes(request)
    if reserved[client] + size > max_bytes:
        raise RateLimited(
            f"This client's request bodies together exceed {max_bytes} bytes; send fewer at a time",
            retry_after_s=1.0,
        )
    reserved[client] += size
    request[_RESERVED] = request.get(_RESERVED, 0) + size


def max_client_bytes(request: web.Request) -> int:
    """Return the bytes that the bodies of one client may take."""
    return MAX_CLIENT_BODIES * request.client_max_size


def release_bytes(request: web.Request) -> None:
    """Stop counting the request's body: it became prompts, or was dropped."""
    reserved, client = request.app[BODY_BYTES], client_of(request)
    reserved[client] -= request.pop(_RESERVED, 0)
    if not reserved[client]:
        del reserved[client]


async def offload(request: web.Request, work: Callable[[], T]) -> T:
    """Run `work` in the thread for bodies, and return its result."""
    return await request.app[BODY_THREAD].run(work, client_of(request))


async def run_offloaded(request: web.Request, work: Callable[[], T]) -> T:
    """Run `work` on the contents of the request's body: directly if that is short, else offloaded."""
    return await offload(request, work) if request.get(_IS_LONG, False) else work()


def body_bytes(request: web.Request) -> bytes:
    """Return the request's body, decompressed; empty where it has none."""
    body: bytes = request.get(_BODY, b"")
    return body


def store_body(request: web.Request, body: bytes) -> None:
    """Set the request's body."""
    request[_BODY] = body
    request[_IS_LONG] = len(body) > LONG_BODY


async def document_of(request: web.Request, default: bytes = b"") -> dict[str, Any]:
    """Return the JSON object in the request's body, parsed once. default: used for an empty body.

    Raises InvalidRequest.
    """
    if _DOCUMENT not in request:
        request[_DOCUMENT] = await run_offloaded(request, partial(json_object, body_bytes(request) or default))
    return request[_DOCUMENT]


def name_model(request: web.Request, name: str) -> None:
    """Have the request name this model, whatever its body does: its path has the name."""
    request[_MODEL] = name


def model_of_path(request: web.Request) -> str | None:
    """Return the model that the request's path names, None where it names none."""
    return request.get(_MODEL)


def drop_body(request: web.Request) -> None:
    """Drop the body and the parsed document, which is several times larger: an answer may take minutes, and an idle
    connection keeps its last request."""
    request.pop(_BODY, None)
    request.pop(_DOCUMENT, None)


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequest."""
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {json_type_name(document)}")
    return document


def json_type_name(value: object) -> str:
    """Return the JSON name of the value's type."""
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


# Bodies are received in full before a handler runs: in time, not too long, and within the bounds of JSON.

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's wbits by Content-Encoding."""

_PACKED_SLICE = 65_536
"""Compressed bytes per step of decompression; empty blocks take a microsecond each."""

_CONTINUE = "100-continue"


def body_middleware(settings: ApiSettings, bounds: Callable[[], JsonBounds]) -> Middleware:
    """Read the body of a request before its handler runs. It is not read where nothing uses it: of read-only requests,
    and of those without an endpoint.

    bounds: returns the current bounds of JSON.
    """

    @web.middleware
    async def receive(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if (
                request.can_read_body
                and request.method not in READ_METHODS
                and request.match_info.http_exception is None
            ):
                await _receive(request, settings, bounds())
            return await handler(request)
        finally:
            drop_body(request)
            release_bytes(request)

    return receive


def with_expect_handler(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """Return routes that answer `Expect: 100-continue` (RFC 9110, 10.1.1) only once the body is to be read."""
    return [
        web.route(route.method, route.path, route.handler, **{**route.kwargs, "expect_handler": _check_expectation})
        for route in routes
    ]


async def _check_expectation(request: web.Request) -> None:
    expected = request.headers["Expect"]
    if request.version >= HttpVersion11 and expected.lower() != _CONTINUE:
        raise UnknownExpectation(f"Expect is {expected[:100]}; only {_CONTINUE} is supported")


async def _receive(request: web.Request, settings: ApiSettings, bounds: JsonBounds) -> None:
    """Read the body of a request, decompress it and check its bounds. Only the request refers to it then: an answer may
    take minutes."""
    encoding = _encoding_of(request)
    raw = await _body(request, settings)
    check = partial(_check, raw, encoding, settings.max_body_bytes, bounds)
    body = await offload(request, check) if encoding or len(raw) > LONG_BODY else check()
    if encoding:
        reserve_bytes(request, len(body))
    store_body(request, body)


async def _body(request: web.Request, settings: ApiSettings) -> bytes:
    """Return the body as it was sent; most arrive with their headers and need no timeout. Raises BodyTooLarge, before
    reading where the length is declared, and BodyTooSlow."""
    if (request.content_length or 0) > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    if request.content.is_eof():
        return await _read(request, settings.max_body_bytes)
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == _CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        within_s = settings.body_timeout_s
        raise BodyTooSlow(f"The body did not arrive within {within_s:g} s", limit_s=within_s) from None


async def _read(request: web.Request, max_bytes: int) -> bytes:
    """Read the body. aiohttp's own `read` would keep it as long as the connection is open."""
    pieces: list[bytes] = []
    size = 0
    while piece := await request.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise too_large(max_bytes)
        reserve_bytes(request, len(piece))
    return b"".join(pieces)


def _encoding_of(request: web.Request) -> str:
    """Return the Content-Encoding, "" for none. Raises UnknownEncoding."""
    header = request.headers.get("Content-Encoding", "").strip()
    encoding = header.lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOWS:
        supported = ", ".join(_WINDOWS)
        raise UnknownEncoding(
            f"Content-Encoding {header[:100]} is not supported: send {supported} or none", encodings=supported
        )
    return encoding


def _check(raw: bytes, encoding: str, max_bytes: int, bounds: JsonBounds) -> bytes:
    """Decompress and check the body; raises as `decompressed` and JsonBounds.check do."""
    body = decompressed(raw, encoding, max_bytes) if encoding else raw
    bounds.check(body)
    return body


def decompressed(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a gzip or deflate body. Raises InvalidRequest where it is truncated or broken, BodyTooLarge beyond
    `max_bytes`."""
    # deflate should have zlib's header, which some clients omit (RFC 9110, 8.4.1.2)
    is_bare = encoding == "deflate" and raw[:1] != b"" and raw[0] & 0xF != zlib.DEFLATED
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _WINDOWS[encoding])
    body = bytearray()
    for at in range(0, len(raw), _PACKED_SLICE):
        try:
            body += decompressor.decompress(raw[at : at + _PACKED_SLICE], max_bytes + 1 - len(body))
        except zlib.error:
            raise InvalidRequest(f"The body is not valid {encoding}") from None
        if len(body) > max_bytes:
            raise too_large(max_bytes)
        if len(body) < at // 2:
            raise InvalidRequest(f"The {encoding} body is longer than its decompressed content")
    if decompressor.unused_data:
        raise InvalidRequest(f"The body is not valid {encoding}: there is data after its end")
    if not decompressor.eof:
        raise InvalidRequest(f"The {encoding} body is truncated")
    return bytes(body)


def too_large(limit: int) -> BodyTooLarge:
    """Return the error for a body that is longer than `limit` bytes."""
    return BodyTooLarge(f"The body is longer than the limit of {limit} bytes", limit_bytes=limit)


def response_timeout_middleware(settings: ApiSettings) -> Middleware:
    """Enforce the total timeout of requests: the engine ends answers in time, this disconnects clients that read
    slowly."""

    @web.middleware
    async def enforce_timeout(request: web.Request, handler: Handler) -> web.StreamResponse:
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
            raise RequestTimeout(f"The request took longer than the limit of {total_s:g} s") from None

    return enforce_timeout
