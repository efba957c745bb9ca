"""LocalTuning: tuning of the engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from console.links.tuning import TuneOrder, TuningReport
from console.runtime import LoopThread, Runtime


class LocalTuning:
    """Implements console.links.tuning.TuningLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def report(self) -> TuningReport:
        """How the last one goes or went."""
        return self._runtime.tuning.report()

    async def start(self, order: TuneOrder) -> None:
        """Begin."""
        await self._call(self._runtime.tuning.start(order))

    async def cancel(self) -> None:
        """End it, and put everything back."""
        await self._call(self._runtime.tuning.cancel())

    async def use_best(self) -> None:
        """Go to the best setting, and keep it."""
        await self._call(self._runtime.tuning.use_best())

    async def _call(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(self._loop.submit(work))
