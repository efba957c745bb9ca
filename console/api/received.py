"""The body of a request as it was received, and the JSON in it. Work on a long one is done beside the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic_core import from_json

from console.api.authorizing import client_of
from console.api.limits import RateLimited
from console.api.serial_thread import SerialThread
from engine.errors import InvalidRequest

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


def hold_bytes(request: web.Request, size: int) -> None:
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


async def of_body(request: web.Request, work: Callable[[], T]) -> T:
    """The result of `work` on what the request's body holds: at once where that was short, else offloaded."""
    return await offload(request, work) if request.get(_IS_LONG, False) else work()


def received(request: web.Request) -> bytes:
    """The request's body, unpacked; empty where it has none."""
    body: bytes = request.get(_RECEIVED, b"")
    return body


def keep_received(request: web.Request, body: bytes) -> None:
    """From now on `body` is the request's."""
    request[_RECEIVED] = body
    request[_IS_LONG] = len(body) > LONG_BODY


async def document_of(request: web.Request, absent: bytes = b"") -> dict[str, Any]:
    """The JSON object that the request's body is, parsed once. absent: what no body at all stands for.

    Raises InvalidRequest.
    """
    if _DOCUMENT not in request:
        request[_DOCUMENT] = await of_body(request, partial(json_object, received(request) or absent))
    return request[_DOCUMENT]


def forget_received(request: web.Request) -> None:
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
        raise InvalidRequest(f"The body must be a JSON object, not {kind_of(document)}")
    return document


def kind_of(value: object) -> str:
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
