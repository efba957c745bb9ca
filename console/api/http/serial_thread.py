"""SerialThread: runs long tasks off the event loop, one at a time and fairly between clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class SerialThread:
    """A thread, started on first use. Each piece of work starts once the asyncio task that awaited the previous one has
    resumed: both hold the interpreter lock, so the event loop runs between any two. Clients take turns: of each client
    one piece is queued at a time, however many it has."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = asyncio.Lock()
        self._of_client: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, work: Callable[[], T], client: str = "") -> T:
        """Run `work` for `client` and return its result. Once started it runs to its end, even if the awaiting task is
        cancelled."""
        own = self._of_client.setdefault(client, asyncio.Lock())
        async with own, self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
