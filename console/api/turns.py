"""Requests begin one at a time: however many came at once, the loop comes round, and who only asks after the
server's health is answered then."""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.scopes import OPEN_PATHS

AT_ONCE = 1
"""How many begin in one round of the loop: reading, checking and tokenising one takes some milliseconds."""


class Turns:
    """Who may begin in this round of the loop; the others follow in the rounds to come, in the order they came in."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._begun = 0
        self._counts = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Come back in a round in which there is room; at once where that is this one."""
        loop = asyncio.get_running_loop()
        if not self._counts:
            self._counts = True
            loop.call_soon(self._next_round, loop)
        if self._begun < self._at_once and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client left meanwhile
                turn.set_result(None)
                self._begun += 1
        self._counts = self._begun > 0
        if self._counts:
            loop.call_soon(self._next_round, loop)


def taking_turns(turns: Turns) -> Middleware:
    """Has every request wait for its turn but those that load balancers send, which must be answered in any weather."""

    @web.middleware
    async def take_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            await turns.take()
        return await handler(request)

    return take_turn
