"""InsightCollector: once a second, brings the session, the energy of the devices and the work on them up to date."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.backends.base import BackendStats, LoadedModel
from engine.config import EngineConfig
from engine.devices.cpu_limits import LimitsFile, measure_cpu
from engine.devices.sampler import DeviceSampler
from engine.devices.worker_memory import shares_of
from engine.errors import EngineBusy
from engine.metrics.meter import Meter
from engine.metrics.slo import Slo
from engine.snapshot import DeviceLimits, DeviceReading, DeviceWork, Energy, Insight
from engine.system.files import replace_file
from engine.workers.replica import Replica

# Energy: watts integrated to joules, and what each day came to, kept in a file so that a restart forgets nothing.

MAX_GAP_S = 10.0
MAX_DAYS = 400
_ENERGY_FILE = "energy.json"
_log = logging.getLogger("engine")


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Power of some devices together: watts is None where none reports it; unmetered: how many do not."""

    watts: float | None = None
    unmetered: int = 0


def power_of(readings: Iterable[DeviceReading], devices: Iterable[str]) -> Power:
    """Return the power of the devices of these ids now."""
    wanted = set(devices)
    by_device = {reading.id: reading.power_w for reading in readings if reading.id in wanted}
    watts = [each for each in by_device.values() if each is not None]
    return Power(watts=sum(watts) if watts else None, unmetered=len(wanted) - len(watts))


class EnergyMeter:
    """Integrates power over time, by the trapezoid rule, day by day of this machine's clock."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def read(self, at: float, watts: float | None) -> dict[str, float]:
        """Joules since the last reading by day ("2026-05-29"); at: unix time.

        Nothing where power was not known at both ends, nor over a gap in which the machine may have slept.
        """
        last, self._last = self._last, None if watts is None else (at, watts)
        if last is None or watts is None:
            return {}
        before, watts_before = last
        if not 0 < at - before <= MAX_GAP_S:
            return {}
        mean = (watts_before + watts) / 2
        midnight = _midnight_after(before)
        if at <= midnight:
            return {day_of(before): mean * (at - before)}
        return {day_of(before): mean * (midnight - before), day_of(at): mean * (at - midnight)}


def add_by_day(days: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Joules by day, both together."""
    return {day: days.get(day, 0.0) + more.get(day, 0.0) for day in {**days, **more}}


def day_of(at: float) -> str:
    """The day of unix time `at` where this machine is."""
    return datetime.fromtimestamp(at).date().isoformat()


def _midnight_after(at: float) -> float:
    tomorrow: date = datetime.fromtimestamp(at).date() + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day).timestamp()


class EnergyFile:
    """Joules by day in a folder; several engines may add to one. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _ENERGY_FILE

    def read(self) -> dict[str, float]:
        """All days that are kept; none where there is no file, or none that can be read."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and starts empty: %s", self._file, error)
            return {}

    def add(self, joules: Mapping[str, float]) -> dict[str, float]:
        """Add to days, and give what they come to; raises OSError where it cannot be written."""
        days = dict(sorted(add_by_day(self.read(), joules).items())[-MAX_DAYS:])
        replace_file(self._file, msgspec.json.encode(days))
        return days


# What models ask of their devices: floating-point operations and bytes read, per second. Pure.
#
# Operations: 2 per active parameter and token, as a multiplication and an addition (Kaplan et al. 2020, section 2.1);
# attention over the context comes on top and is left out. Bytes: in every step the weights are read once, and the keys
# and values of what its requests have computed.

WINDOW_S = 4.0


class WorkerCounters(NamedTuple):
    """A worker that holds a model. output_tokens_per_s: over the last seconds."""

    id: str
    model: LoadedModel
    stats: BackendStats
    output_tokens_per_s: float


class _Sample(NamedTuple):
    """Counters of a worker at a moment. computed: prompt tokens, and guesses that did not hold: output tokens are
    counted apart."""

    at: float
    steps: int
    computed: int


class WorkerRate(NamedTuple):
    """Work of a worker per second."""

    steps: float = 0.0
    tokens: float = 0.0


class WorkMeter:
    """Follows the counters of workers; to be read with all of them about once a second."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def read(
        self, now: float, workers: Sequence[WorkerCounters], devices: Sequence[DeviceReading]
    ) -> tuple[DeviceWork, ...]:
        """Return the work of each device that has a worker, in the order of `devices`."""
        for worker_id in self._samples.keys() - {worker.id for worker in workers}:
            del self._samples[worker_id]
        paces = {worker.id: self._pace(now, worker) for worker in workers}
        return tuple(work for device in devices if (work := work_of(device, workers, paces)) is not None)

    def _pace(self, now: float, worker: WorkerCounters) -> WorkerRate:
        stats = worker.stats
        sample = _Sample(
            now, stats.steps, stats.prompt_tokens_computed + max(0, stats.draft_tokens - stats.draft_accepted)
        )
        samples = self._samples.setdefault(worker.id, deque())
        if samples and (samples[-1].steps > sample.steps or samples[-1].computed > sample.computed):
            samples.clear()  # it was started again
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= now - WINDOW_S:
            samples.popleft()
        first, passed_s = samples[0], now - samples[0].at
        if passed_s <= 0 or sample.steps == first.steps:
            return WorkerRate()
        computed = (sample.computed - first.computed) / passed_s
        return WorkerRate(steps=(sample.steps - first.steps) / passed_s, tokens=computed + worker.output_tokens_per_s)


def work_of(
    device: DeviceReading, workers: Iterable[WorkerCounters], paces: Mapping[str, WorkerRate]
) -> DeviceWork | None:
    """Return the work of the workers on a device; None where there is none. Its share of a model that several devices
    hold is that of the weights."""
    here = [(worker, part) for worker in workers if (part := _device_share(worker.model, device.id)) > 0]
    if not here:
        return None
    flops = sum(flops_per_s(worker.model, paces[worker.id]) * part for worker, part in here)
    read = sum(bytes_per_s(worker.model, worker.stats, paces[worker.id]) * part for worker, part in here)
    limits = device.limits or DeviceLimits()
    wide = any(worker.model.dtype == "float32" for worker, _ in here)
    return DeviceWork(
        device=device.id,
        flops_per_s=flops,
        flops_limit_per_s=limits.flops_32bit_per_s if wide else limits.flops_16bit_per_s,
        bytes_per_s=read,
        bytes_limit_per_s=limits.bytes_per_s,
    )


def flops_per_s(model: LoadedModel, pace: WorkerRate) -> float:
    """Operations of a worker."""
    return 2 * active_parameters(model) * pace.tokens


def bytes_per_s(model: LoadedModel, stats: BackendStats, pace: WorkerRate) -> float:
    """Bytes that a worker reads. Of a mixture of experts, what its requests can touch at most: each of them as much as
    a token is computed with, and a prompt everything."""
    active = active_parameters(model) / model.parameters if model.parameters else 1.0
    touched = 1.0 if stats.prefilling else min(1.0, active * max(1, stats.decoding))
    cached = sum(sequence.computed_tokens for sequence in stats.sequences)
    per_token = model.kv_bytes / model.kv_tokens if model.kv_tokens else 0.0
    return pace.steps * (model.weights_bytes * touched + cached * per_token)


def active_parameters(model: LoadedModel) -> int:
    """Parameters that one token is computed with."""
    return model.active_parameters or model.parameters


def _device_share(model: LoadedModel, device: str) -> float:
    shares = shares_of(model)
    total = sum(share.weights_bytes for share in shares)
    here = [share for share in shares if share.device == device]
    if not total:
        return len(here) / len(shares)
    return sum(share.weights_bytes for share in here) / total


SAVE_S = 60.0


class InsightCollector:
    """Brings `latest` up to date. It keeps energy and limits in the state folder of `config`, where that has one.

    Its calls belong to the engine's loop; files are read and written off it.
    """

    def __init__(self, config: EngineConfig, sampler: DeviceSampler, meter: Meter) -> None:
        self.latest = Insight()
        self._meter = meter
        self._sampler = sampler
        self._work = WorkMeter()
        self._config = config
        self._joules = _EnergyTotals(config.state_dir)
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
        """Begin a new session; the energy of the day goes on."""
        self._meter.reset_session(now, at)
        self._joules.reset()
        self._refresh(now, at, self.latest)

    def use(self, changes: Mapping[str, float | str | None]) -> None:
        """Go by other settings from now on: an SLO, the price of energy. Raises InvalidRequest out of range."""
        self._config = msgspec.structs.replace(self._config, **changes).validate()
        self._meter.set_slo(self.slo)

    @property
    def slo(self) -> Slo:
        """The latency that answers are to keep now."""
        return slo_of(self._config)

    def tick(self, now: float, at: float, replicas: Sequence[Replica]) -> None:
        """Bring `latest` up to date; at: unix time."""
        power = power_of(self._sampler.latest, {share.device for replica in replicas for share in replica.shares})
        busy_s, self._busy_s = self._meter.busy_s - self._busy_s, self._meter.busy_s
        self._joules.read(at, power, busy_s)
        workers = [
            WorkerCounters(replica.id, replica.model, replica.stats, self._meter.output_tokens_per_s(now, replica.id))
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
            raise EngineBusy("CPU peak can be measured only while no request is running", running=running)
        if self._measuring:
            raise EngineBusy("CPU peak is being measured already")
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
            self._meter.insight(now),
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


def slo_of(config: EngineConfig) -> Slo:
    """Return the SLO of the settings."""
    return Slo(ttft_s=config.slo_ttft_s, itl_s=config.slo_itl_s)


class _EnergyTotals:
    """Energy of the session and of the day; what is not in the file yet goes there once a minute."""

    def __init__(self, folder: Path | None) -> None:
        self.session = self.busy = 0.0
        self._file = EnergyFile(folder) if folder is not None else None
        self._meter = EnergyMeter()
        self._saved: dict[str, float] = {}
        self._unsaved: dict[str, float] = {}
        self._saved_at: float | None = None
        self._read_at: float | None = None
        self._saving: asyncio.Task[None] | None = None
        self._complained = False

    async def open(self) -> None:
        """Read what earlier runs kept."""
        if self._file is not None:
            self._saved = await asyncio.to_thread(self._file.read)

    def reset(self) -> None:
        """Forget the session's."""
        self.session = self.busy = 0.0

    def of_day(self, at: float) -> float:
        """Joules of the day that unix time `at` is in."""
        day = day_of(at)
        return self._saved.get(day, 0.0) + self._unsaved.get(day, 0.0)

    def read(self, at: float, power: Power, busy_s: float) -> None:
        """The devices draw `power` now; busy_s: how much of the time since the last reading a worker computed."""
        passed_s = at - self._read_at if self._read_at is not None else 0.0
        self._read_at = at
        more = self._meter.read(at, power.watts)
        self._unsaved = add_by_day(self._unsaved, more)
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
        """Return whether it is time to write: a minute after the last time, or after the clock was set back."""
        if self._saved_at is None:
            self._saved_at = at
        due = abs(at - self._saved_at) >= SAVE_S and (self._saving is None or self._saving.done())
        if due:
            self._saved_at = at
        return due

    async def _save(self, file: EnergyFile) -> None:
        if not self._unsaved:
            return
        before, written = self._saved, self._unsaved
        self._saved, self._unsaved = add_by_day(before, written), {}
        try:
            self._saved = await asyncio.to_thread(file.add, written)
        except OSError as error:
            self._saved, self._unsaved = before, add_by_day(written, self._unsaved)
            if not self._complained:
                _log.warning("today's energy cannot be saved: %s", error)
            self._complained = True
