"""What is told of every HTTP request once it is over: to the access log, to traces and to metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.failing import call_of
from console.api.traffic import Call
from engine.config import SamplingParams
from engine.records import Stay
from engine.snapshot import RequestRow

LEFT_STATUS = 499
"""Of a request whose client left before there was an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the engine did for one answer. id: the answer's.  model: what the answer calls it.

    choices: answers that were asked for to each prompt.  rows: one for each of the engine's requests, all ended.
    stays: the times on workers of each.
    """

    id: str
    model: str
    params: SamplingParams
    choices: int
    rows: tuple[RequestRow, ...]
    stays: tuple[tuple[Stay, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request went. at: unix time it came.  total_s: until it was answered, or cut off.

    status: what was answered, LEFT_STATUS for nothing.  body_bytes: of the answer, None where that is not known.
    """

    at: float
    total_s: float
    status: int
    body_bytes: int | None
    works: tuple[Work, ...]


class Watcher(Protocol):
    """Who is told of requests."""

    def saw(self, request: web.Request, call: Call, outcome: Outcome) -> None:
        """A request is over. Called on the engine's loop, so whatever takes time is done elsewhere."""


_WORKS = web.RequestKey("works", list[Work])


def add_work(request: web.Request, work: Work) -> None:
    """Something was done for the request."""
    request[_WORKS] = [*request.get(_WORKS, ()), work]


def observing(watchers: Iterable[Watcher]) -> Middleware:
    """Tells the watchers of every request, whatever becomes of it. The outermost middleware but for none."""

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        at, began = time.time(), time.monotonic()
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
            return response
        finally:
            call = call_of(request)
            outcome = Outcome(
                at=at,
                total_s=time.monotonic() - began,
                status=LEFT_STATUS if response is None else response.status,
                body_bytes=_body_bytes(response, call),
                works=tuple(request.get(_WORKS, ())),
            )
            for watcher in watchers:
                watcher.saw(request, call, outcome)

    return observe


def handler_of(request: web.Request) -> str:
    """The route that a request took, as `/v1/models/{model}`; "" for none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _body_bytes(response: web.StreamResponse | None, call: Call) -> int | None:
    """What the answer's body has; of a stream, what was sent before it ended."""
    if isinstance(response, web.Response):
        body = response.body
        return len(body) if isinstance(body, bytes | bytearray) else 0 if body is None else None
    return None if isinstance(response, web.WebSocketResponse) else call.sent_bytes
