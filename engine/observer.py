"""Observer: once a second, brings insight up to date: the session, the energy of the devices and the work on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.devices.cpu_limits import LimitsFile, measure_cpu
from engine.energy import EnergyFile, EnergyMeter, Power, day_of, power_of, summed
from engine.errors import EngineBusy
from engine.insight import SessionCounter, Slo
from engine.insight_values import Energy, Insight
from engine.replica import Replica
from engine.sampler import DeviceSampler
from engine.work import WorkerNow, WorkMeter

SAVE_S = 60.0
_log = logging.getLogger("engine")


class Observer:
    """What it says is `latest`. It keeps energy and limits in the state folder of `config`, where that has one.

    Its calls belong to the engine's loop; files are read and written off it.
    """

    def __init__(self, config: EngineConfig, sampler: DeviceSampler) -> None:
        self.session = SessionCounter(_slo(config))
        self.latest = Insight()
        self._sampler = sampler
        self._work = WorkMeter()
        self._config = config
        self._joules = _Joules(config.state_dir)
        self._limits = LimitsFile(config.state_dir) if config.state_dir is not None else None
        self._measuring = False
        self._busy_s = 0.0

    async def start(self, now: float, at: float) -> None:
        """Begin the session, with what earlier runs left."""
        self.reset(now, at)
        await self._joules.open()
        if self._limits is not None:
            self._sampler.cpu_limits = await asyncio.to_thread(self._limits.read)

    def reset(self, now: float, at: float) -> None:
        """Count the session anew from now on; the energy of the day goes on."""
        self.session.reset(now, at)
        self._joules.reset()
        self._refresh(now, at, self.latest)

    def use(self, changes: Mapping[str, float | str | None]) -> None:
        """Go by other settings from now on: an SLO, the price of energy. Raises InvalidRequest out of range."""
        self._config = msgspec.structs.replace(self._config, **changes).validate()
        self.session.hold_to(_slo(self._config))

    def tick(self, now: float, at: float, replicas: Sequence[Replica]) -> None:
        """Bring `latest` up to date; at: unix time."""
        power = power_of(self._sampler.latest, {share.device for replica in replicas for share in replica.shares})
        busy_s, self._busy_s = self.session.busy_s - self._busy_s, self.session.busy_s
        self._joules.read(at, power, busy_s)
        workers = [
            WorkerNow(replica.id, replica.model, replica.stats, replica.rate.per_second(now))
            for replica in replicas
            if replica.model is not None
        ]
        seen = msgspec.structs.replace(
            self.latest,
            configured_context_tokens=max((worker.model.max_model_len for worker in workers), default=0),
            work=self._work.read(now, workers, self._sampler.latest),
        )
        self._refresh(now, at, seen, power)

    async def measure(self, running: int) -> None:
        """Measure the processor and keep what it can. running: requests that run now.

        Raises EngineBusy where some do or it is being measured, EngineError where it cannot be measured.
        """
        if running:
            raise EngineBusy("The processor can only be measured while no request is running", running=running)
        if self._measuring:
            raise EngineBusy("The processor is being measured already")
        self._measuring = True
        try:
            limits = await asyncio.to_thread(measure_cpu)
            if self._limits is not None:
                await asyncio.to_thread(self._limits.write, limits)
            self._sampler.cpu_limits = limits
        finally:
            self._measuring = False

    async def close(self) -> None:
        """Keep what is not kept yet."""
        await self._joules.save()

    def _refresh(self, now: float, at: float, seen: Insight, power: Power | None = None) -> None:
        joules = self._joules
        self.latest = msgspec.structs.replace(
            self.session.freeze(now),
            configured_context_tokens=seen.configured_context_tokens,
            work=seen.work,
            energy=Energy(
                power_w=power.watts if power is not None else seen.energy.power_w,
                unmetered=power.unmetered if power is not None else seen.energy.unmetered,
                session_joules=joules.session,
                busy_joules=joules.busy,
                today_joules=joules.of_day(at),
                rate_per_kwh=self._config.energy_rate,
                currency=self._config.energy_currency,
            ),
        )


def _slo(config: EngineConfig) -> Slo:
    return Slo(config.slo_ttft_s, config.slo_itl_s)


class _Joules:
    """Energy of the session and of the day; what is not in the file yet goes there once a minute."""

    def __init__(self, folder: Path | None) -> None:
        self.session = self.busy = 0.0
        self._file = EnergyFile(folder) if folder is not None else None
        self._meter = EnergyMeter()
        self._kept: dict[str, float] = {}
        self._unsaved: dict[str, float] = {}
        self._saved_at: float | None = None
        self._read_at: float | None = None
        self._saving: asyncio.Task[None] | None = None
        self._complained = False

    async def open(self) -> None:
        """Read what earlier runs kept."""
        if self._file is not None:
            self._kept = await asyncio.to_thread(self._file.read)

    def reset(self) -> None:
        """Forget the session's."""
        self.session = self.busy = 0.0

    def of_day(self, at: float) -> float:
        """Joules of the day that unix time `at` is in."""
        day = day_of(at)
        return self._kept.get(day, 0.0) + self._unsaved.get(day, 0.0)

    def read(self, at: float, power: Power, busy_s: float) -> None:
        """The devices draw `power` now; busy_s: how much of the time since the last reading a worker computed."""
        passed_s = at - self._read_at if self._read_at is not None else 0.0
        self._read_at = at
        more = self._meter.read(at, power.watts)
        self._unsaved = summed(self._unsaved, more)
        self.session += sum(more.values())
        self.busy += sum(more.values()) * min(1.0, busy_s / passed_s) if more else 0.0
        if self._file is not None and self._due(at):
            self._saving = asyncio.get_running_loop().create_task(self._save(self._file))

    async def save(self) -> None:
        """Keep what is not kept yet, after a write under way."""
        if self._saving is not None:
            await asyncio.wait((self._saving,))
        if self._file is not None:
            await self._save(self._file)

    def _due(self, at: float) -> bool:
        """Whether it is time to write: a minute after the last time, or after the clock was set back."""
        if self._saved_at is None:
            self._saved_at = at
        due = abs(at - self._saved_at) >= SAVE_S and (self._saving is None or self._saving.done())
        if due:
            self._saved_at = at
        return due

    async def _save(self, file: EnergyFile) -> None:
        if not self._unsaved:
            return
        before, written = self._kept, self._unsaved
        self._kept, self._unsaved = summed(before, written), {}
        try:
            self._kept = await asyncio.to_thread(file.add, written)
        except OSError as error:
            self._kept, self._unsaved = before, summed(written, self._unsaved)
            if not self._complained:
                _log.warning("the energy of today cannot be kept: %s", error)
            self._complained = True
