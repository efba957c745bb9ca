"""The settings of an engine in this process, for its screens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from console.links.settings import SettingRow
from console.runtime import LoopThread, Runtime


class LocalSettings:
    """Implements SettingsLink: what is saved is used on the engine's loop."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._running = runtime.saved
        self._loop = loop

    def rows(self) -> Sequence[SettingRow]:
        """Every setting."""
        return self._running.rows()

    def path(self) -> str:
        """The config.toml that is written."""
        return self._running.path()

    async def save(self, name: str, value: str | None) -> SettingRow:
        """Write one setting."""
        return await asyncio.wrap_future(self._loop.submit(self._running.save(name, value)))
