"""Asyncio loops on other threads, and the caller's own with the same face."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An asyncio loop on a thread of its own: where the engine, or a connection to one, lives while a screen has the
    main thread."""

    def __init__(self, name: str = "engine") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there; safe from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, callback: Any, *arguments: Any) -> None:
        """Call a function there; safe from any thread, ignored when the loop is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def stop(self) -> None:
        """End the loop and wait for its thread."""
        self.call_soon(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


class CurrentLoop(LoopThread):
    """The loop that is running, for who is on it already; it stops with whoever runs it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Not ours to stop."""
