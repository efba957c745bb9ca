"""Joules out of watts, day by day, and the file that keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from engine.metrics.insight import MAX_DAYS, EnergyFile, EnergyMeter, day_of, power_of
from engine.snapshot import DeviceReading


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def midnight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Unix time at which the 30th of May begins, somewhere."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield datetime(2026, 5, 30).timestamp()
    monkeypatch.undo()
    time.tzset()


def device(device_id: str, power_w: float | None) -> DeviceReading:
    return DeviceReading(
        id=device_id, name="", kind="cuda", utilisation=None, total_bytes=1, free_bytes=1, power_w=power_w
    )


# --- power ------------------------------------------------------------------------------------------------------------


def test_power_is_of_the_devices_in_use_alone() -> None:
    readings = [device("cuda:0", 300.0), device("cuda:1", 50.0), device("cpu", None)]
    assert power_of(readings, {"cuda:0"}).watts == 300.0
    assert power_of(readings, {"cuda:0", "cuda:1"}).watts == 350.0
    assert power_of(readings, set()).watts is None


def test_devices_that_do_not_tell_are_counted_and_nothing_is_made_up_for_them() -> None:
    readings = [device("cuda:0", 300.0), device("cpu", None)]
    both = power_of(readings, {"cuda:0", "cpu"})
    assert (both.watts, both.unmetered) == (300.0, 1)
    assert (power_of(readings, {"cpu"}).watts, power_of(readings, {"cpu"}).unmetered) == (None, 1)
    assert power_of(readings, {"node/cuda:0"}).unmetered == 1


# --- integration ------------------------------------------------------------------------------------------------------


def test_watts_are_integrated_by_the_trapezoid_rule(midnight: float) -> None:
    meter = EnergyMeter()
    noon = midnight + 43_200
    assert meter.read(noon, 100.0) == {}
    assert meter.read(noon + 2, 300.0) == {"2026-05-30": pytest.approx(400.0)}
    assert meter.read(noon + 3, 300.0) == {"2026-05-30": pytest.approx(300.0)}


def test_a_reading_over_midnight_is_split_between_the_days(midnight: float) -> None:
    meter = EnergyMeter()
    meter.read(midnight - 3, 200.0)
    days = meter.read(midnight + 1, 200.0)
    assert days == {"2026-05-29": pytest.approx(600.0), "2026-05-30": pytest.approx(200.0)}


def test_a_gap_in_which_the_machine_may_have_slept_is_not_counted(midnight: float) -> None:
    meter = EnergyMeter()
    meter.read(midnight, 200.0)
    assert meter.read(midnight + 3600, 200.0) == {}
    assert meter.read(midnight + 3601, 200.0) == {"2026-05-30": pytest.approx(200.0)}


def test_a_time_without_readings_is_not_counted(midnight: float) -> None:
    meter = EnergyMeter()
    meter.read(midnight, 200.0)
    assert meter.read(midnight + 1, None) == {}
    assert meter.read(midnight + 2, 200.0) == {}


def test_a_clock_that_is_set_back_counts_nothing_twice(midnight: float) -> None:
    meter = EnergyMeter()
    meter.read(midnight + 60, 200.0)
    assert meter.read(midnight + 50, 200.0) == {}


def test_a_day_is_that_of_the_machines_clock(midnight: float) -> None:
    assert (day_of(midnight - 1), day_of(midnight)) == ("2026-05-29", "2026-05-30")


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_with_the_days_joules(tmp_path: Path) -> None:
    EnergyFile(tmp_path / "state").add({"2026-05-29": 500.0})
    assert EnergyFile(tmp_path / "state").add({"2026-05-29": 100.0, "2026-05-30": 7.0}) == {
        "2026-05-29": 600.0,
        "2026-05-30": 7.0,
    }
    assert EnergyFile(tmp_path / "state").read() == {"2026-05-29": 600.0, "2026-05-30": 7.0}


@pytest.mark.parametrize("torn", [b"", b'{"2026-05-29": 5', b"[1, 2]", b'{"2026-05-29": "x"}', b"\xff\xfe\x00"])
def test_a_torn_file_is_begun_anew_and_said_so(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "energy.json").write_bytes(torn)
    assert EnergyFile(tmp_path).read() == {}
    assert "energy.json cannot be read and starts empty" in caplog.text
    assert EnergyFile(tmp_path).add({"2026-05-29": 5.0}) == {"2026-05-29": 5.0}
    assert EnergyFile(tmp_path).read() == {"2026-05-29": 5.0}


def test_only_the_last_days_are_kept(tmp_path: Path) -> None:
    days = {f"{2000 + index // 12}-{index % 12 + 1:02d}-01": 1.0 for index in range(MAX_DAYS + 5)}
    kept = EnergyFile(tmp_path).add(days)
    assert list(kept) == sorted(days)[5:]


def test_nothing_unfinished_is_left_beside_the_file(tmp_path: Path) -> None:
    EnergyFile(tmp_path).add({"2026-05-29": 5.0})
    assert [path.name for path in tmp_path.iterdir()] == ["energy.json"]
