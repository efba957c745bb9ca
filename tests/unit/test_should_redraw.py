"""What is drawn at once, and what may wait for the next second."""

from __future__ import annotations

import msgspec

from console.tui.app import is_another_second, should_redraw
from engine.snapshot import ModelStatus, Snapshot, Totals, WorkerReading

QUIET = Snapshot(at=100.0, workers=(WorkerReading(id="w0", state="ready"),))


def later(seconds: float, **changes: object) -> Snapshot:
    return msgspec.structs.replace(QUIET, at=QUIET.at + seconds, **changes)


def test_the_first_snapshot_is_drawn() -> None:
    assert should_redraw(None, QUIET)


def test_an_engine_that_does_nothing_is_drawn_once_a_second() -> None:
    assert not should_redraw(QUIET, later(0.25, uptime_s=0.25, kv_usage=0.1))
    assert not should_redraw(QUIET, later(0.75))
    assert should_redraw(QUIET, later(1.0))


def test_a_screen_may_be_drawn_less_often_than_its_clock() -> None:
    assert not should_redraw(QUIET, later(1.75), idle_s=2)
    assert should_redraw(QUIET, later(2.0), idle_s=2)
    assert is_another_second(QUIET, later(1.0))
    assert not is_another_second(later(0.25), later(0.75))


def test_whatever_is_done_is_drawn_at_once() -> None:
    for changes in (
        {"running": 1},
        {"queued": 1},
        {"status": ModelStatus(state="loading")},
        {"target_workers": 2},
        {"max_prompts": 3},
        {"log_total": 1},
        {"totals": Totals(requests=1)},
        {"workers": (WorkerReading(id="w0", state="restarting"),)},
    ):
        assert should_redraw(QUIET, later(0.25, **changes)), changes


def test_the_end_of_the_last_request_is_drawn_at_once() -> None:
    assert should_redraw(later(0, running=1), later(0.25))


def test_another_snapshot_of_the_same_moment_is_drawn() -> None:
    assert not should_redraw(QUIET, QUIET)
    assert should_redraw(QUIET, later(0, kv_usage=0.5))
