"""What a request came to: the call that counts it, and the error that it ended in, wherever it is told."""

from __future__ import annotations

import copy
import re
from http import HTTPStatus

from aiohttp import web

from console.api.errors import LONGEST_MESSAGE, error_response
from console.api.naming import AS_SENT
from console.api.scopes import ADMIN, LOOKING
from console.api.traffic import Call, Ending, readable
from engine.errors import EngineError, ModelLoadFailed

_PATH = re.compile(r"(?<![\w:/])(?:~|/[^\s/'\"<>,;:()]+)(?:/[^\s/'\"<>,;:()]+)+")

_CALL = web.RequestKey("call", Call)

_LEFT = Ending(499, "client_left", "The client left before the answer was complete")


def call_of(request: web.Request) -> Call:
    """What counts the request."""
    return request[_CALL]


def begun(request: web.Request) -> Call | None:
    """What counts the request, None where it was answered before that began."""
    return request.get(_CALL)


def begin(request: web.Request, call: Call) -> Call:
    """From now on `call` counts the request."""
    request[_CALL] = call
    return call


def failed(request: web.Request, error: EngineError) -> web.Response:
    """The answer to a request that failed, which is counted. The connection ends where the rest of a body would have to
    be read first, which its client may never send."""
    note(request, error)
    call = call_of(request)
    response = error_response(as_told(request, error), call.tells)
    if request.can_read_body and not request.content.is_eof():
        response.force_close()
    return response


def told(request: web.Request, error: EngineError) -> object:
    """The JSON of an error in the shape of the request's dialect."""
    return call_of(request).tells(as_told(request, error))


def note(request: web.Request, error: EngineError) -> None:
    """Count a failure, also of a stream that began well."""
    call_of(request).failure = Ending(error.http_status, error.code, error.message)


def note_left(request: web.Request) -> None:
    """Count a client that left before its answer was complete; one that only watched may leave at any time."""
    call = call_of(request)
    if call.failure is None and request.method not in LOOKING:
        call.failure = _LEFT


def as_told(request: web.Request, error: EngineError) -> EngineError:
    """An error as its client is told: with the id of its request in the details, for shapes that have room for it, and
    without the paths of this machine, which are for operators to know; `param` is the field that was sent, whatever the
    engine calls it. It is text whatever it quotes of the request."""
    call = call_of(request)
    put = copy.copy(error)
    put.details = {**error.details, "request_id": call.request_id}
    if put.details.get("param") == "prompt" and AS_SENT not in put.details:
        put.details["param"] = call.prompt_field
    ours = error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, ModelLoadFailed)
    if ours and not call.path.startswith(ADMIN):
        put.message = _PATH.sub(lambda found: found[0].rpartition("/")[2], error.message)
    put.message = readable(put.message, LONGEST_MESSAGE)
    return put
