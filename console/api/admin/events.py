"""GET /admin/events: the engine as its console shows it, as server-sent events: all of it first, then what changed."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from console.api.admin.calls import AdminOperations
from console.api.context import ApiContext
from console.api.http.errors import NotAuthorized
from console.api.http.traffic import Call, call_of
from console.api.requests.schemas import describes
from console.api.requests.stream import ChunkStream
from console.link.frames import Frame, FrameWriter
from engine.errors import InvalidRequest

DEFAULT_HZ = 2.0
SLOWEST_HZ, FASTEST_HZ = 0.1, 10.0


class Events:
    """The endpoint."""

    def __init__(self, context: ApiContext, operations: AdminOperations) -> None:
        self._context = context
        self._operations = operations

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.get("/admin/events", self._get)]

    @describes(
        "Stream of snapshots of the engine",
        query={"hz": "events per second (default 2)"},
        event=dict[str, Any],
        group="admin",
    )
    async def _get(self, request: web.Request) -> web.StreamResponse:
        pause_s = 1 / _rate(request.query.get("hz", str(DEFAULT_HZ)))
        async with ChunkStream(request, self._context.settings) as chunks:
            await self._follow(chunks, pause_s, call_of(request))
        return chunks.response

    async def _follow(self, chunks: ChunkStream, pause_s: float, call: Call) -> None:
        """Send events until the server stops, which ends them with an error, or its key is revoked."""
        link, writer, traffic = self._operations.link, FrameWriter(), self._context.traffic
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if clock() >= due:
                due = max(due + pause_s, clock())
                event = writer.event(Frame(snapshot=link.snapshot(), api=link.api_status()))
                if event is not None:
                    await chunks.send(event)
            if traffic.closing:
                raise traffic.closing_error()
            if not call.is_allowed():
                raise NotAuthorized("The API key is no longer valid")
            await asyncio.sleep(min(max(0.0, due - clock()), _LOOK_S))


_LOOK_S = 0.25
"""How long a stop may wait for who watches."""


def _rate(text: str) -> float:
    """Events per second; raises InvalidRequest."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not SLOWEST_HZ <= rate <= FASTEST_HZ:
        raise InvalidRequest(f"hz is {text}; it must be between {SLOWEST_HZ:g} and {FASTEST_HZ:g}", param="hz")
    return rate
