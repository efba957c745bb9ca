"""LocalBenches: benches of the engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from console.bench.result import BenchResult
from console.links.benches import BenchEntry, BenchForm, BenchOrder, BenchReport
from console.runtime import LoopThread, Runtime

T = TypeVar("T")


class LocalBenches:
    """Implements console.links.benches.BenchesLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def report(self) -> BenchReport:
        """How the last one goes or went."""
        return self._runtime.benches.report()

    async def forms(self) -> Sequence[BenchForm]:
        """The benches there are."""
        return await self._call(self._runtime.benches.forms())

    async def start(self, order: BenchOrder) -> None:
        """Begin."""
        await self._call(self._runtime.benches.start(order))

    async def cancel(self) -> None:
        """End it, and keep what there is."""
        await self._call(self._runtime.benches.cancel())

    async def history(self) -> Sequence[BenchEntry]:
        """What is remembered."""
        return await self._call(self._runtime.benches.history())

    async def result(self, number: int) -> BenchResult:
        """One of them."""
        return await self._call(self._runtime.benches.result(number))

    async def forget(self, number: int) -> None:
        """Forget one."""
        await self._call(self._runtime.benches.forget(number))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))
