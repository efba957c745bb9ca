"""DeviceSampler: device readings without ever holding up the loop or piling up behind a slow driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from engine.devices import DeviceProbe, MachineProbe
from engine.snapshot import DeviceLimits, DeviceReading

_log = logging.getLogger("engine")


class DeviceSampler:
    """Reads a probe on a thread of its own, one reading at a time. `latest` is the last one, () before the first.

    cpu_limits: the measured peak of the processor, which no probe can read.
    """

    def __init__(self, probe: DeviceProbe | None = None, new_probe: Callable[[], DeviceProbe] = MachineProbe) -> None:
        self.latest: tuple[DeviceReading, ...] = ()
        self.cpu_limits: DeviceLimits | None = None
        self._probe = probe
        self._new_probe = new_probe
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="devices")
        self._reading: asyncio.Task[None] | None = None

    def poll(self, pids: Collection[int]) -> None:
        """Begin a reading, unless one is still under way."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read(frozenset(pids)))

    async def read(self, pids: Collection[int]) -> Sequence[DeviceReading]:
        """A reading that was begun from now on: one under way may not see what was freed or taken since it began."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))
        self.poll(pids)
        assert self._reading is not None
        await asyncio.shield(self._reading)
        return self.latest

    async def close(self) -> None:
        """Let a reading under way end."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))
        self._thread.shutdown(wait=False)

    async def _read(self, pids: Collection[int]) -> None:
        try:
            loop = asyncio.get_running_loop()
            readings = await loop.run_in_executor(self._thread, self._read_now, pids)
            self.latest = tuple(map(self._with_limits, readings))
        except Exception:
            _log.exception("reading devices failed")

    def _read_now(self, pids: Collection[int]) -> tuple[DeviceReading, ...]:
        if self._probe is None:
            self._probe = self._new_probe()
        return tuple(self._probe.read(pids))

    def _with_limits(self, reading: DeviceReading) -> DeviceReading:
        if reading.id != "cpu" or self.cpu_limits is None:
            return reading
        return msgspec.structs.replace(reading, limits=self.cpu_limits)
