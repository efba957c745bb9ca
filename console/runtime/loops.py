"""Asyncio loops on other threads, and the caller's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EngineLoop:
    """The asyncio loop of an engine, or of a connection to one, as other threads see it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there; safe from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, callback: Any, *arguments: Any) -> None:
        """Call a function there; safe from any thread, ignored when the loop is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


class LoopThread(EngineLoop):
    """A loop on a thread of its own, while a screen has the main thread."""

    def __init__(self, name: str = "engine") -> None:
        super().__init__(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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


class CurrentLoop(EngineLoop):
    """The loop that is running, for code that is on it already."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
