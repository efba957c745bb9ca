"""A rig without an engine: a simulated device that keeps its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from console.tuning.autotune.record import Sample
from console.tuning.autotune.space import Setting
from engine.errors import InsufficientMemory, InvalidRequest, WorkerFailed
from tests.fakes.simulated_tuning import Device, Noise


class SimulatedRig:
    """used: the settings it was put to.  now_s: what all of that took.

    fails: what is raised in a window, by its number from 1.  refuses, silent: settings that cannot be gone to, and that
    answer nothing.  answers_within_s: no window that is shorter sees an answer.
    paused: while it is set, windows wait for `go`.
    """

    def __init__(
        self,
        device: Device,
        seed: int = 1,
        *,
        fails: Mapping[int, Exception] | None = None,
        refuses: Callable[[Setting], bool] = lambda _: False,
        silent: Callable[[Setting], bool] = lambda _: False,
        answers_within_s: float = 0.0,
    ) -> None:
        self.device = device
        self.used: list[Setting] = []
        self.measured: list[Setting] = []
        self.now_s = 0.0
        self.at = device.start
        self.loaded = False
        self.paused = False
        self.go = asyncio.Event()
        self.refuses = refuses
        self._fails = fails or {}
        self._silent = silent
        self._answers_within_s = answers_within_s
        self._noise = Noise(seed)

    @property
    def windows(self) -> int:
        """How many began."""
        return len(self.measured)

    def clock(self) -> float:
        return self.now_s

    async def use(self, setting: Setting) -> None:
        if not self.device.fits(setting):
            raise InsufficientMemory("it does not fit: 2.1 GiB are lacking")
        if self.refuses(setting):
            raise InvalidRequest("heads of 80 elements need 16 bits", param="cache_bits")
        self.now_s += self.device.space.turn_s(self.at, setting)
        self.at = setting
        self.used.append(setting)

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        self.loaded = True
        self.measured.append(self.at)
        await asyncio.sleep(0)
        if self.paused:
            await self.go.wait()
        self.now_s += seconds + settle_s
        if self.windows in self._fails:
            raise self._fails[self.windows]
        if self._silent(self.at) or seconds < self._answers_within_s:
            raise WorkerFailed("no answer within the measurement time")
        return self._noise.window(self.device, self.at, seconds)

    async def rest(self) -> None:
        self.loaded = False
