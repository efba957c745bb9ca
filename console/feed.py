"""Feed: a chat's deltas on their way to a screen, which is never made to draw each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from console.links.conversation import ChatDelta


class Feed:
    """Deltas from one loop to a screen's, where it is made: what piles up while that is busy is merged into one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: ChatDelta | None = None
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, delta: ChatDelta) -> None:
        """Hand over a delta; safe from any thread."""
        self._loop.call_soon_threadsafe(self._merge, delta)

    def close(self) -> None:
        """No more deltas come; safe from any thread."""
        self._loop.call_soon_threadsafe(self._end)

    def _merge(self, delta: ChatDelta) -> None:
        if self._pending is not None:
            delta = msgspec.structs.replace(delta, text=self._pending.text + delta.text)
        self._pending = delta
        self._ready.set()

    def _end(self) -> None:
        self._closed = True
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            delta, self._pending = self._pending, None
            if delta is not None:
                yield delta
            elif self._closed:
                return
            if self._closed:
                self._ready.set()


async def told(begin: Callable[[Feed], Future[Any]]) -> AsyncIterator[ChatDelta]:
    """What the work that `begin` begins puts into its feed, until it ends; raises what it raises. Closing the iterator
    cancels it."""
    feed = Feed(asyncio.get_running_loop())
    work = begin(feed)
    work.add_done_callback(lambda _: feed.close())
    try:
        async for delta in feed:
            yield delta
        await asyncio.wrap_future(work)
    finally:
        work.cancel()
