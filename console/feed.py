"""Feed: a chat's deltas on their way to a screen, which is never made to draw each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any

import msgspec

from console.links.conversation import ChatDelta


class Feed:
    """Deltas from one loop to a screen's, where it is made: what piles up while that is busy is merged into one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._texts: list[str] = []
        self._last: ChatDelta | None = None
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, delta: ChatDelta) -> None:
        """Hand over a delta; safe from any thread."""
        with self._lock:
            is_first = self._last is None
            self._texts.append(delta.text)
            self._last = delta
        if is_first:  # the screen's loop has one callback to run, however many come
            self._loop.call_soon_threadsafe(self._ready.set)

    def close(self) -> None:
        """No more deltas come; safe from any thread."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._closed = True
        self._ready.set()

    def _take(self) -> ChatDelta | None:
        """What came since the last time, as one."""
        with self._lock:
            last, texts = self._last, self._texts
            self._last, self._texts = None, []
        return None if last is None else msgspec.structs.replace(last, text="".join(texts))

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            if (delta := self._take()) is not None:
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
