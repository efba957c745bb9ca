"""When a worker counts as hung."""

from __future__ import annotations

from typing import get_args

import pytest

from engine.backends.base import BackendStats, LoadPhase, LoadProgress
from engine.worker_process.protocol import StepBatch
from engine.workers.health import PATIENCE, Activity, AwakeClock, Heartbeat, describe_silence, patience_s


def test_every_phase_of_a_load_has_its_patience() -> None:
    assert PATIENCE.keys() == {"starting", "loading", "working", "idle", *get_args(LoadPhase)}


def test_a_load_gets_more_time_than_a_step_and_compilers_get_most() -> None:
    assert patience_s("working", 60) == 60
    assert patience_s("idle", 60) == 120
    assert patience_s("weights", 60) == 300
    assert patience_s("kernels", 60) == 1800 == max(patience_s(each, 60) for each in PATIENCE)


@pytest.mark.parametrize(("activity", "least_s"), [("working", 60), ("idle", 120)])
def test_a_worker_whose_steps_are_slow_gets_three_times_the_slowest(activity: Activity, least_s: float) -> None:
    assert patience_s(activity, 60, slowest_step_s=50) == 150
    assert patience_s(activity, 60, slowest_step_s=10) == least_s


@pytest.mark.parametrize(
    ("activity", "requests", "sentence"),
    [
        ("working", 8, "worker w0 hung: no report for 60 s while it ran 8 requests"),
        ("working", 1, "worker w0 hung: no report for 60 s while it ran 1 request"),
        ("idle", 0, "worker w0 hung: no report for 60 s while it was idle"),
        ("weights", 0, "worker w0 hung: no report for 60 s while it loaded weights"),
    ],
)
def test_the_reason_says_how_long_it_was_silent_and_at_what(activity, requests, sentence) -> None:
    assert describe_silence("w0", 60.2, activity, requests) == sentence


def test_time_passes_while_the_loop_turns() -> None:
    clock = AwakeClock(100.0)
    for second in range(1, 61):
        clock.turn(100.0 + second)
    assert clock.read(160.0) == pytest.approx(60.0)
    assert clock.read(160.5) == pytest.approx(60.5)


def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    clock = AwakeClock(100.0)
    clock.turn(101.0)
    before = clock.read(101.0)
    assert clock.read(1000.0) - before == 2.0
    clock.turn(1000.0)
    assert clock.read(1001.0) - before == 3.0


def test_a_worker_that_reports_is_well_however_long_it_works() -> None:
    clock = AwakeClock(0.0)
    heartbeat = Heartbeat(clock)
    heartbeat.begin(0.0)
    heartbeat.ready(0.0)
    for second in range(1, 1000):
        clock.turn(second)
        assert heartbeat.hung_s(second, "working", 3.0) is None
        if second % 2 == 0:
            heartbeat.sign(StepBatch(outputs=[], stats=BackendStats()), second)
    clock.turn(1000)
    clock.turn(1002)
    assert heartbeat.hung_s(1002, "working", 3.0) == 4.0
    assert heartbeat.worked_s == 998


def test_the_warm_up_counts_as_a_step() -> None:
    heartbeat = Heartbeat(AwakeClock(0.0))
    heartbeat.begin(0.0)
    for done, now in ((0, 10.0), (1, 52.0)):
        heartbeat.progressed(LoadProgress(phase="warm_up", done=done, total=1, unit="steps"), now)
    heartbeat.ready(53.0)
    assert heartbeat.slowest_step_s == 43.0


def test_what_a_load_says_of_its_largest_step_counts_before_the_warm_up() -> None:
    heartbeat = Heartbeat(AwakeClock(0.0))
    heartbeat.begin(0.0)
    heartbeat.progressed(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"), 10.0)
    heartbeat.ready(12.0, step_s=15.0)
    assert heartbeat.slowest_step_s == 15.0


def test_steps_that_are_reported_late_and_together_keep_the_times_at_which_they_ended() -> None:
    heartbeat = Heartbeat(AwakeClock(0.0))
    ended = []
    for sent_s, arrived_s in ((7.0, 100.2), (7.5, 100.6), (8.0, 103.0), (8.5, 103.0), (9.0, 103.0)):
        heartbeat.sign(StepBatch(outputs=[], stats=BackendStats(), sent_s=sent_s), arrived_s)
        ended.append(heartbeat.step_ended_at)
    assert ended == pytest.approx([100.2, 100.6, 101.1, 101.6, 102.1], abs=1e-3)


def test_a_clock_of_another_machine_that_runs_slower_does_not_make_reports_look_later_and_later() -> None:
    heartbeat = Heartbeat(AwakeClock(0.0))
    for hour in range(1, 25):
        arrived_s = 3600.0 * hour
        heartbeat.sign(StepBatch(outputs=[], stats=BackendStats(), sent_s=arrived_s * (1 - 5e-5)), arrived_s)
    assert heartbeat.step_ended_at == pytest.approx(24 * 3600.0, abs=0.01)


def test_a_worker_that_does_not_say_when_it_sent_a_report_sent_it_as_it_arrived() -> None:
    heartbeat = Heartbeat(AwakeClock(0.0))
    heartbeat.sign(StepBatch(outputs=[], stats=BackendStats()), 5.0)
    assert heartbeat.step_ended_at == 5.0
