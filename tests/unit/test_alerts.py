"""Alerts: one for each cause, with a count, the newest 200, and what each asks of an operator."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, ErrorInfo, InsufficientMemory, LoadCancelled, UnsupportedModel, WorkerFailed
from engine.metrics.alerts import (
    MARK_S,
    MAX_ALERTS,
    MERGE_S,
    AlertLog,
    add_failed_load,
    advice_after_death,
    advice_after_load,
    cause_of_death,
)
from engine.metrics.meter import Meter
from engine.snapshot import AlertLevel
from engine.worker_process.hosts import WorkerExit
from engine.workers.health import describe_exit


class Clock:
    """Unix time, as a test wants it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_one_cause_is_one_alert_with_a_count() -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    first = alerts.add("worker_died", "w0", "w0 died", done="Restarting.")
    clock.now += MERGE_S
    again = alerts.add("worker_died", "w0", "w0 died again", done="Left dead.")
    alerts.add("worker_died", "w1", "w1 died")
    assert [(each.subject, each.count) for each in alerts.latest] == [("w0", 2), ("w1", 1)]
    assert (again.id, again.at, again.last_at) == (first.id, first.at, clock.now)
    assert (again.text, again.done) == ("w0 died again", "Left dead.")


def test_the_same_cause_much_later_is_another_alert() -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    first = alerts.add("worker_died", "w0", "w0 died")
    clock.now += MERGE_S + 1
    later = alerts.add("worker_died", "w0", "w0 died")
    assert [each.count for each in alerts.latest] == [1, 1]
    assert later.id > first.id


@pytest.mark.parametrize(
    ("cause", "level", "text", "kind"),
    [
        ("worker_died", "error", "w0: crashed", "worker"),
        ("worker_hung", "error", "w0: hung", "worker"),
        ("out_of_memory", "warning", "w0: out of memory", "failure"),
        ("model_failed", "error", "w0: model failed", "failure"),
        ("client_refused_429", "warning", "w0: client refused 429", "warning"),
    ],
)
def test_every_alert_is_a_mark(cause: str, level: AlertLevel, text: str, kind: str) -> None:
    meter = Meter()
    AlertLog(meter, Clock()).add(cause, "w0", "a sentence", level=level)
    assert [(mark.text, mark.kind) for mark in meter.marks] == [(text, kind)]


def test_an_alert_that_goes_on_is_one_mark_and_another_after_a_pause() -> None:
    clock, meter = Clock(), Meter()
    alerts = AlertLog(meter, clock)
    for pause_s in (0, MARK_S - 1, MARK_S - 1, MARK_S):
        clock.now += pause_s
        alerts.add("client_refused_429", "10.0.0.7", "refused", level="warning")
    assert len(alerts.latest) == 1
    assert [mark.at for mark in meter.marks] == [1_000_000.0, clock.now]


def test_a_load_that_failed_is_an_alert_that_names_the_model_once_and_a_cancelled_one_is_none() -> None:
    def added(error: EngineError) -> list[tuple[str, str]]:
        alerts = AlertLog(clock=Clock())
        add_failed_load(alerts, "m", error, "Nothing was changed.")
        return [(alert.cause, alert.text) for alert in alerts.latest]

    assert added(UnsupportedModel("m cannot be loaded: x")) == [("load_failed", "m cannot be loaded: x")]
    assert added(InsufficientMemory("out of memory")) == [("out_of_memory", "m could not be loaded: out of memory")]
    assert added(LoadCancelled("the load of m was cancelled")) == []


def test_the_last_two_hundred_are_kept_each_with_an_id_of_its_own() -> None:
    alerts = AlertLog(clock=Clock())
    for number in range(MAX_ALERTS + 50):
        alerts.add("refused", str(number), "refused")
    assert len(alerts.latest) == MAX_ALERTS
    assert alerts.latest[-1].subject == str(MAX_ALERTS + 49)
    assert len({each.id for each in alerts.latest}) == MAX_ALERTS


def test_what_was_done_is_added_to_the_alert_where_it_is_still_kept() -> None:
    alerts = AlertLog(clock=Clock())
    alert = alerts.add("worker_died", "w0", "w0 died", done="Restarting.")
    alerts.add_done(alert.id, "Ready again after 2.0 s.")
    alerts.add_done(alert.id + 1, "nothing of it")
    assert [each.done for each in alerts.latest] == ["Ready again after 2.0 s."]


@pytest.mark.parametrize(
    ("error", "cause", "advice"),
    [
        (WorkerFailed("worker w0 hung: no report for 61 s", silent_s=61.0).info, "worker_hung", "--hang-seconds"),
        (ErrorInfo(code="worker_failed", message="CUDA out of memory. Tried"), "out_of_memory", "max prompts"),
        (ErrorInfo(code="worker_failed", message="worker w0 exited with code 3"), "worker_died", "last output"),
    ],
)
def test_a_death_has_a_cause_and_says_what_to_do(error: ErrorInfo, cause: str, advice: str) -> None:
    assert cause_of_death(error) == cause
    assert advice in advice_after_death(error)


def test_a_kill_from_outside_only_guesses_at_memory() -> None:
    exit_ = WorkerExit(code=None, signal="SIGKILL", log_tail="")
    error = WorkerFailed(describe_exit("w0", exit_), worker="w0", signal="SIGKILL").info
    assert cause_of_death(error) == "worker_died"
    assert "OOM killer" in advice_after_death(error)


def test_a_load_without_room_says_what_takes_less() -> None:
    assert "fewer workers" in advice_after_load(InsufficientMemory("it does not fit").info)
    assert "Correct the cause" in advice_after_load(ErrorInfo(code="unsupported_model", message="unknown architecture"))


def test_a_failed_load_of_a_folder_names_it_once() -> None:
    alerts = AlertLog(clock=Clock())
    error = UnsupportedModel("x cannot be loaded: it has no weights")
    add_failed_load(alerts, "/models/x", error, "Nothing was changed.")
    (alert,) = alerts.latest
    assert (alert.subject, alert.text) == ("/models/x", "x cannot be loaded: it has no weights")
