"""An event loop whose clock jumps to the next timer: hours pass at once, and one seed gives one run.

Nothing runs in threads, so what happens depends on the seed alone. `after_each` is called after every turn of the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: the time to wait has passed."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let `timeout` seconds pass. A loop that waits for nothing at all would hang for ever."""
        assert timeout is not None, "everything waits and no timer is set: a hang"
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """random: drawn from for everything that a real machine would leave to chance."""

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self.turns = 0
        self.after_each: list[Callable[[], None]] = []
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call `func` on the loop, some turns or some time later."""
        future: asyncio.Future[Any] = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.random.choice((0.0, 0.0, 0.01, 0.5)), call)
        return future

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.turns += 1
        for check in self.after_each:
            check()


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], random: Random, *, limit_s: float = 1e5) -> T:
    """Run `main` to its end on a loop of its own; no task may be left over, nor an error that reached nobody."""
    loop = VirtualLoop(random)
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    asyncio.set_event_loop(loop)
    try:

        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await main(loop)

        result = loop.run_until_complete(limited())
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"left over: {left}"
        assert not unheard, unheard
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.after_each.clear()
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()
