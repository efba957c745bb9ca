"""What a request came to: the call that counts it, and the error that it ended in, wherever it is told."""

from __future__ import annotations

from aiohttp import web

from console.api.errors import error_response
from console.api.scopes import LOOKING
from console.api.traffic import Call, Ending
from engine.errors import EngineError

_CALL = web.RequestKey("call", Call)

_LEFT = Ending(499, "client_left", "The client left before the answer was complete")


def call_of(request: web.Request) -> Call:
    """What counts the request."""
    return request[_CALL]


def begin(request: web.Request, call: Call) -> Call:
    """From now on `call` counts the request."""
    request[_CALL] = call
    return call


def failed(request: web.Request, error: EngineError) -> web.Response:
    """The answer to a request that failed, which is counted."""
    note(request, error)
    return error_response(error, call_of(request).tells)


def told(request: web.Request, error: EngineError) -> object:
    """The JSON of an error in the shape of the request's dialect."""
    return call_of(request).tells(error)


def note(request: web.Request, error: EngineError) -> None:
    """Count a failure, also of a stream that began well."""
    call_of(request).failure = Ending(error.http_status, error.code, error.message)


def note_left(request: web.Request) -> None:
    """Count a client that left before its answer was complete; one that only watched may leave at any time."""
    call = call_of(request)
    if call.failure is None and request.method not in LOOKING:
        call.failure = _LEFT
