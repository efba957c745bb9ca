"""What a processor draws, by its energy counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.devices.cpu_and_ram import PackagePower

RANGE_UJ = 262_143_328_850


def zone(folder: Path, name: str, kind: str, energy_uj: int) -> Path:
    """A powercap zone as Linux shows one."""
    path = folder / name
    path.mkdir(exist_ok=True)
    for file, content in (("name", kind), ("energy_uj", energy_uj), ("max_energy_range_uj", RANGE_UJ)):
        (path / file).write_text(f"{content}\n")
    return path


def test_power_is_the_energy_of_all_packages_over_time(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 5_000_000)
    power = PackagePower(tmp_path)
    assert power.watts(10.0) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 91_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 65_000_000)
    assert power.watts(12.0) == pytest.approx((90 + 60) / 2)


def test_parts_of_a_package_and_the_platform_are_not_counted_twice(tmp_path: Path) -> None:
    counted = ("intel-rapl:0", "package-0")
    others = (("intel-rapl:0:0", "core"), ("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0"))
    for name, kind in (counted, *others):
        zone(tmp_path, name, kind, 0)
    power = PackagePower(tmp_path)
    power.watts(0.0)
    for name, kind in (counted, *others):
        zone(tmp_path, name, kind, 30_000_000)
    assert power.watts(1.0) == pytest.approx(30.0)


def test_a_counter_that_began_again_is_no_negative_power(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 9_999_999)
    power = PackagePower(tmp_path)
    power.watts(0.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 20_000_000)
    assert power.watts(1.0) == pytest.approx(30.0)


def test_counters_that_may_not_be_read_are_unknown(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    power = PackagePower(tmp_path)
    power.watts(0.0)
    (package / "energy_uj").unlink()
    assert power.watts(1.0) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 7)
    assert power.watts(2.0) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_007)
    assert power.watts(3.0) == pytest.approx(1.0)


def test_a_machine_without_counters_is_unknown(tmp_path: Path) -> None:
    power = PackagePower(tmp_path / "none")
    assert (power.watts(0.0), power.watts(1.0)) == (None, None)
