"""A rig without an engine: a simulated device that keeps its own time."""

from __future__ import annotations

import asyncio

from console.autotune.record import Sample
from console.autotune.space import Setting
from engine.errors import InsufficientMemory, WorkerFailed
from tests.fakes.simulated_tuning import Device, Noise


class SimulatedRig:
    """used: the settings it was put to.  now_s: what all of that took.  fails_at: the window that nothing answers in.

    held: while it is set, windows wait for `go`.
    """

    def __init__(self, device: Device, seed: int = 1, fails_at: int = 0) -> None:
        self.device = device
        self.used: list[Setting] = []
        self.now_s = 0.0
        self.at = device.start
        self.loaded = False
        self.fails_at = fails_at
        self.windows = 0
        self.held = False
        self.go = asyncio.Event()
        self._noise = Noise(seed)

    def clock(self) -> float:
        return self.now_s

    async def use(self, setting: Setting) -> None:
        if not self.device.fits(setting):
            raise InsufficientMemory("it does not fit: 2.1 GiB are lacking")
        self.now_s += self.device.space.turn_s(self.at, setting)
        self.at = setting
        self.used.append(setting)

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        self.loaded = True
        self.windows += 1
        await asyncio.sleep(0)
        if self.held:
            await self.go.wait()
        if self.windows == self.fails_at:
            raise WorkerFailed("no request was answered within the window")
        self.now_s += seconds + settle_s
        return self._noise.window(self.device, self.at, seconds)

    async def rest(self) -> None:
        self.loaded = False
