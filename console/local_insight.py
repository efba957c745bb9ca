"""LocalInsight: what may be asked about insight of an engine in this process."""

from __future__ import annotations

import asyncio

from console.runtime import LoopThread, Runtime


class LocalInsight:
    """Implements console.links.insight.InsightLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    async def reset(self) -> None:
        """Count the session anew from now on."""
        await asyncio.wrap_future(self._loop.submit(self._runtime.engine.reset_session()))

    async def measure(self) -> None:
        """Find out what this machine's processor can at most."""
        await asyncio.wrap_future(self._loop.submit(self._runtime.engine.measure_limits()))
