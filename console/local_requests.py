"""LocalRequests: the requests of an engine in this process. Rows come from any thread, the rest from its own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from console.runtime import LoopThread, Runtime
from engine.records import RequestDetail
from engine.snapshot import RequestRow


class LocalRequests:
    """Implements console.links.requests.RequestsLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Requests that ended after the first `after` ones, and what to give as `after` the next time."""
        return self._runtime.engine.finished_requests(after)

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """All about one request."""

        async def look() -> RequestDetail:
            return self._runtime.engine.request_detail(request_id, order)

        return await asyncio.wrap_future(self._loop.submit(look()))

    async def cancel_queued(self, model: str = "") -> int:
        """Cancel every request that waits."""

        async def cancel() -> int:
            return self._runtime.engine.cancel_queued(model)

        return await asyncio.wrap_future(self._loop.submit(cancel()))
