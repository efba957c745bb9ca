"""Finding: a model that is looked for, and downloaded or made where it must be, in a thread that ends when asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from engine.backends.base import LoadProgress

T = TypeVar("T")
Find = Callable[[Callable[[LoadProgress], None], Callable[[], bool]], T]
"""Finds something; takes whom to tell how far it is, and what says whether to give up."""


class Finding:
    """Watched from two threads. progress: how far it is, None before anything is known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cancelled = threading.Event()
        self.progress: LoadProgress | None = None

    async def by(self, find: Find[T]) -> T:
        """What `find` finds. Where this is cancelled, it is told to give up and has ended when the cancelling goes on,
        so that who cleans up after it is not overtaken."""
        thread = asyncio.ensure_future(asyncio.to_thread(find, self._report, self.cancelled.is_set))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self.cancelled.set()
            await asyncio.gather(thread, return_exceptions=True)
            raise

    def _report(self, progress: LoadProgress) -> None:
        self.progress = progress
