"""What the screens say of a load that requests wait for."""

from __future__ import annotations

from console.text import load_plan
from engine.snapshot import LoadPlan


def test_it_says_what_leaves_how_long_it_takes_and_who_waits() -> None:
    plan = LoadPlan(unloads=("a", "b"), began=100.0, stay_s=5.0, load_s=8.0)
    assert load_plan(plan, 3, 101.0) == "unloads a and b, ready in about 12 s, 3 requests wait"


def test_while_models_that_leave_finish_their_requests_no_time_is_promised() -> None:
    assert load_plan(LoadPlan(unloads=("a",), began=100.0, load_s=8.0), 1, 101.0) == "unloads a, 1 request waits"


def test_while_it_loads_nothing_leaves_any_more() -> None:
    assert load_plan(LoadPlan(unloads=("a",), began=100.0, load_s=8.0, loading=True), 1, 102.0) == (
        "ready in about 6 s, 1 request waits"
    )


def test_a_load_that_takes_longer_than_expected_is_ready_at_no_time_in_the_past() -> None:
    assert load_plan(LoadPlan(began=100.0, load_s=8.0, loading=True), 0, 200.0) == ""
