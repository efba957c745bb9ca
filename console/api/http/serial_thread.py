"""SerialThread: long work beside the event loop that never keeps the loop waiting for more than one piece of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class SerialThread:
    """A thread that begins with the first piece of work. Each piece begins once the task that waited for the one before
    goes on: what both do holds the interpreter, and so the loop comes round between any two. Clients take turns: of
    each one piece waits beside those of others, however many it has."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = asyncio.Lock()
        self._of_client: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, work: Callable[[], T], client: str = "") -> T:
        """The result of `work`, which is done for `client`. What has begun goes on to its end where the task that waits
        for it is cancelled."""
        own = self._of_client.setdefault(client, asyncio.Lock())
        async with own, self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
