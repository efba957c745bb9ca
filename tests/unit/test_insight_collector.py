"""Observer: the session, energy that outlives a restart, and measuring the processor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.base import BackendStats
from engine.config import DeviceShare, EngineConfig
from engine.devices.sampler import DeviceSampler
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.metrics import insight as observers
from engine.metrics.insight import SAVE_S, EnergyFile, InsightCollector
from engine.metrics.meter import Meter
from engine.snapshot import DeviceLimits, DeviceReading
from tests.fakes.engines import until

LIMITS = DeviceLimits(flops_16bit_per_s=1e11, flops_32bit_per_s=5e10, bytes_per_s=2e10)


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


NOON = 1_780_056_000.0  # 2026-05-29 12:00 UTC


def gpu(power_w: float | None) -> DeviceReading:
    return DeviceReading(
        id="cuda:0", name="", kind="cuda", utilisation=None, total_bytes=1, free_bytes=1, power_w=power_w
    )


def worker(**fields: Any) -> Any:
    """A replica as far as an observer looks at one: on cuda:0, with nothing loaded."""
    values = {
        "id": "w0",
        "shares": (DeviceShare(device="cuda:0"),),
        "model": None,
        "stats": BackendStats(),
    }
    return SimpleNamespace(**(values | fields))


class Watched:
    """An observer with a GPU of so many watts, told a second at a time."""

    def __init__(self, folder: Path | None, watts: float | None = 100.0, **settings: Any) -> None:
        self.sampler = DeviceSampler()
        self.sampler.latest = (gpu(watts),)
        self.meter = Meter()
        self.meter.add_model("m")
        self.observer = InsightCollector(EngineConfig(state_dir=folder, **settings), self.sampler, self.meter)
        self.second = 0

    async def start(self) -> Watched:
        await self.observer.start(0.0, NOON)
        self.observer.tick(0.0, NOON, [worker()])
        return self

    def go_on(self, seconds: int, *, busy: bool = False) -> None:
        for _ in range(seconds):
            self.second += 1
            if busy:
                self.meter.count_steps(
                    float(self.second),
                    "m",
                    "w0",
                    steps=1,
                    step_s=1.0,
                    ended_at=float(self.second),
                    sequences=1,
                    output_tokens=0,
                    gaps={},
                    stats=BackendStats(),
                    before=BackendStats(),
                )
            self.observer.tick(float(self.second), NOON + self.second, [worker()])

    @property
    def energy(self) -> Any:
        return self.observer.latest.energy


async def test_energy_of_the_session_and_of_the_day_are_counted_and_idle_time_is_told_apart(tmp_path: Path) -> None:
    watched = await Watched(tmp_path).start()
    watched.go_on(5)
    watched.go_on(3, busy=True)
    assert watched.energy.session_joules == pytest.approx(800.0)
    assert watched.energy.busy_joules == pytest.approx(300.0)
    assert watched.energy.today_joules == pytest.approx(800.0)
    assert (watched.energy.power_w, watched.energy.unmetered) == (100.0, 0)


async def test_a_device_that_tells_no_power_leaves_energy_unknown(tmp_path: Path) -> None:
    watched = await Watched(tmp_path, watts=None).start()
    watched.go_on(5)
    assert (watched.energy.power_w, watched.energy.unmetered, watched.energy.today_joules) == (None, 1, 0.0)


async def test_a_restart_does_not_forget_the_energy_of_today(tmp_path: Path) -> None:
    watched = await Watched(tmp_path).start()
    watched.go_on(5)
    await watched.observer.close()
    again = await Watched(tmp_path).start()
    again.go_on(2)
    assert again.energy.today_joules == pytest.approx(700.0)
    assert again.energy.session_joules == pytest.approx(200.0)


async def test_a_kill_loses_a_minute_of_energy_at_most(tmp_path: Path) -> None:
    watched = await Watched(tmp_path).start()
    watched.go_on(int(SAVE_S))
    await until(lambda: EnergyFile(tmp_path).read() != {})
    watched.go_on(1)
    assert EnergyFile(tmp_path).read() == {"2026-05-29": pytest.approx(100.0 * SAVE_S)}
    assert watched.energy.today_joules == pytest.approx(100.0 * (SAVE_S + 1))
    await watched.observer.close()


async def test_what_cannot_be_written_is_said_once_and_stays_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    watched = await Watched(tmp_path / "state").start()
    watched.go_on(5)
    await watched.observer.close()
    watched.go_on(1)
    await watched.observer.close()
    assert watched.energy.today_joules == pytest.approx(600.0)
    assert caplog.text.count("today's energy cannot be saved") == 1


async def test_a_new_day_begins_with_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    midnight = datetime(2026, 5, 30).timestamp()
    await watched.observer.start(0.0, midnight - 2)
    for second in range(5):
        watched.observer.tick(float(second), midnight - 2 + second, [worker()])
    assert watched.energy.today_joules == pytest.approx(200.0)
    assert watched.energy.session_joules == pytest.approx(400.0)


async def test_a_reset_leaves_the_day_alone(tmp_path: Path) -> None:
    watched = await Watched(tmp_path).start()
    watched.go_on(5, busy=True)
    watched.observer.reset(5.0, NOON + 5)
    assert (watched.energy.session_joules, watched.energy.busy_joules) == (0.0, 0.0)
    assert watched.energy.today_joules == pytest.approx(500.0)
    assert watched.energy.power_w == 100.0
    assert watched.observer.latest.session.since == NOON + 5


async def test_without_a_state_folder_nothing_is_written(tmp_path: Path) -> None:
    watched = await Watched(None).start()
    watched.go_on(70)
    await watched.observer.close()
    assert watched.energy.today_joules == pytest.approx(7000.0)
    assert EnergyFile(tmp_path).read() == {}


async def test_the_rate_and_the_slo_can_be_changed_while_it_runs() -> None:
    watched = await Watched(None, energy_rate=0.3, energy_currency="EUR").start()
    assert (watched.energy.rate_per_kwh, watched.energy.currency) == (0.3, "EUR")
    watched.observer.use({"energy_rate": 0.4, "slo_ttft_s": 0.5})
    watched.go_on(1)
    assert watched.energy.rate_per_kwh == 0.4
    assert watched.observer.latest.goodput.slo_ttft_s == 0.5
    with pytest.raises(InvalidRequest, match="slo_itl_s is -1"):
        watched.observer.use({"slo_itl_s": -1})


# --- the processor's limits -------------------------------------------------------------------------------------------


async def test_what_was_measured_is_shown_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "measure_cpu", lambda: LIMITS)
    watched = await Watched(tmp_path).start()
    await watched.observer.measure(0)
    assert watched.sampler.cpu_limits == LIMITS
    assert (await Watched(tmp_path).start()).sampler.cpu_limits == LIMITS


async def test_the_processor_is_not_measured_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "measure_cpu", lambda: LIMITS)
    watched = await Watched(None).start()
    with pytest.raises(EngineBusy, match="while no request is running"):
        await watched.observer.measure(3)
    assert watched.sampler.cpu_limits is None


async def test_two_measurements_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "measure_cpu", lambda: LIMITS)
    watched = await Watched(None).start()
    both = await asyncio.gather(watched.observer.measure(0), watched.observer.measure(0), return_exceptions=True)
    assert [type(each) for each in both] == [type(None), EngineBusy]


async def test_a_measurement_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> DeviceLimits:
        raise EngineError("CPU peak could not be measured: no torch")

    watched = await Watched(None).start()
    monkeypatch.setattr(observers, "measure_cpu", failing)
    with pytest.raises(EngineError, match="no torch"):
        await watched.observer.measure(0)
    monkeypatch.setattr(observers, "measure_cpu", lambda: LIMITS)
    await watched.observer.measure(0)
    assert watched.sampler.cpu_limits == LIMITS
