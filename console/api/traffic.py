"""Traffic: how many requests the server works on, and whether it still takes any."""

from __future__ import annotations

import asyncio


class Traffic:
    """Requests under way and so far. closing: the server stops, and takes no more work."""

    def __init__(self) -> None:
        self.total = 0
        self.closing = False
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request is under way, `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def enter(self) -> None:
        """A request begins."""
        self.total += 1
        self._under_way += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request has ended."""
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()
