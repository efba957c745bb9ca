"""`link.api` over the API server of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from console.links.api import NO_LIMITS, ApiReport, KeyLimits, NewKey, Scope
from console.loops import LoopThread
from console.runtime import Runtime

T = TypeVar("T")


class LocalApi:
    """Implements console.links.api.ApiLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._server = runtime.api
        self._loop = loop

    def report(self) -> ApiReport:
        """Who asks, how much and what went wrong."""
        return self._server.report()

    async def listen(self, host: str, port: int) -> None:
        """Listen at another address."""
        await self._call(self._server.listen(host, port))

    async def make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """Make a key."""
        return await self._call(self._server.make_key(name, scopes, limits))

    async def revoke_key(self, name: str) -> None:
        """Refuse a key from now on."""
        await self._call(self._server.revoke_key(name))

    async def switch_dialect(self, name: str, on: bool) -> None:
        """Answer a dialect or not."""
        await self._call(self._server.switch_dialect(name, on))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))
