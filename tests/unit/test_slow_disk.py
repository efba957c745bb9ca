"""Slow disks: a rate of reading that the disk is to blame for, and writes that take long."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.system.slow_disk import SLOW_WRITE_S, ProcessUsage, ReadWatch, SlowWrite, WriteWatch

MIB = 2**20


def rate(mib_per_s: float, *, busy: float = 0.1, waits: int = 1, seconds: int = 20) -> float | None:
    """The slow rate after a load of that speed, in MiB/s."""
    now = [0.0]
    watch = ReadWatch(lambda: now[0], lambda: ProcessUsage(busy_s=busy * now[0], waits=round(waits * now[0])))
    found = None
    for second in range(seconds + 1):
        now[0] = float(second)
        found = watch.slow_bytes_per_s(round(second * mib_per_s * MIB))
    return None if found is None else found / MIB


def test_weights_that_come_slowly_are_a_slow_disk_with_its_rate() -> None:
    assert rate(12) == pytest.approx(12)
    assert rate(49) == pytest.approx(49)
    assert rate(51) is None


@pytest.mark.parametrize("how", [{"busy": 0.9}, {"busy": 8.0}, {"waits": 0}, {"seconds": 9}])
def test_a_load_that_computes_or_reads_from_memory_or_has_just_begun_is_none(how: dict[str, float]) -> None:
    assert rate(12, **how) is None  # type: ignore[arg-type]


def test_a_disk_that_recovers_is_slow_no_more() -> None:
    now = [0.0]
    watch = ReadWatch(lambda: now[0], lambda: ProcessUsage(busy_s=0.0, waits=round(now[0])))
    done, found = 0, []
    for second in range(40):
        now[0] = float(second)
        done += (5 if second < 20 else 200) * MIB
        found.append(watch.slow_bytes_per_s(done) is not None)
    assert found[19] and not found[39]


def test_a_slow_write_is_taken_once_with_its_time_and_fast_ones_are_not() -> None:
    now, path = [0.0], Path("chats.db")
    writes = WriteWatch(lambda: now[0])
    for took_s in (SLOW_WRITE_S, 0.1, SLOW_WRITE_S + 3):
        with writes.timed(path):
            now[0] += took_s
    with writes.timed(Path("fast")):
        now[0] += 0.1
    with writes.timed(None):
        now[0] += 60
    assert writes.take() == {path: SlowWrite(5.0, 0)}
    assert writes.take() == {}


def test_a_write_that_fails_slowly_counts_too() -> None:
    now, path = [0.0], Path("chats.db")
    writes = WriteWatch(lambda: now[0])
    with pytest.raises(OSError, match="gone"), writes.timed(path):
        now[0] += 30
        raise OSError("gone")
    assert writes.take() == {path: SlowWrite(30.0, 0)}
