"""Counting, rates, percentiles and history."""

from __future__ import annotations

import pytest

from engine.metrics.meter import HISTORY_SECONDS, Metrics, Rate, Window, percentiles


def tick(metrics: Metrics, now: float, **gauges: object) -> None:
    values: dict[str, object] = {"running": 0, "queued": 0, "kv_usage": 0.0, "device_utilisation": (), **gauges}
    metrics.tick(now, 1000.0 + now, **values)  # type: ignore[arg-type]


def test_a_rate_is_over_its_window() -> None:
    rate = Rate(window_s=4)
    for second in range(10):
        rate.add(float(second), 20)
    assert rate.per_second(9.0) == pytest.approx(25.0)
    assert rate.per_second(20.0) == 0.0


def test_a_rate_that_just_began_is_not_diluted() -> None:
    rate = Rate(window_s=4)
    rate.add(100.0, 5)
    rate.add(101.0, 5)
    assert rate.per_second(101.0) == pytest.approx(10.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100)])
def test_percentiles_are_nearest_rank(share: float, expected: int) -> None:
    assert percentiles(dict.fromkeys(range(1, 101), 1), share) == [expected]


def test_percentiles_of_nothing_are_none() -> None:
    assert Window().percentiles(0.0).p50 is None


def test_a_value_counts_as_often_as_it_was_sampled() -> None:
    window = Window()
    window.add(0.0, 1.0, times=99)
    window.add(0.0, 9.0)
    found = window.percentiles(1.0)
    assert (found.p50, found.p99) == (1.0, 1.0)
    window.add(0.0, 9.0, times=100)
    assert window.percentiles(1.0).p95 == 9.0


def test_a_crowd_of_requests_does_not_shorten_the_window() -> None:
    window = Window()
    for step in range(600):
        window.add(step / 10, 5.0 if step < 60 else 1.0, times=512)
    assert window.percentiles(60.0).p95 == 5.0


def test_samples_leave_the_window() -> None:
    window = Window(window_s=60)
    window.add(0.0, 100.0)
    window.add(50.0, 1.0)
    assert window.percentiles(61.0).p99 == 1.0


def test_a_second_of_history_holds_what_happened_in_it_alone() -> None:
    metrics = Metrics()
    metrics.started(0.5, prompt_tokens=7, cached_tokens=3, ttft_s=0.2)
    metrics.produced(0.5, 2)
    metrics.gap(0.6, 0.05, 2)
    tick(metrics, 1.0, running=1, queued=4, kv_usage=0.25, device_utilisation=(0.5, None))
    tick(metrics, 2.0)
    first, second = metrics.history
    assert (first.prompt_tokens, first.output_tokens, first.ttft_p50, first.itl_p95) == (7, 2, 0.2, 0.05)
    assert (first.running, first.queued, first.kv_usage, first.device_utilisation) == (1, 4, 0.25, (0.5, None))
    assert (second.prompt_tokens, second.output_tokens, second.ttft_p50) == (0, 0, None)


def test_history_keeps_ten_minutes_and_drops_the_oldest() -> None:
    metrics = Metrics()
    for second in range(HISTORY_SECONDS + 5):
        tick(metrics, float(second))
    assert len(metrics.history) == HISTORY_SECONDS == 600
    assert metrics.history[0].at == 1005.0


def test_every_end_is_counted_by_its_reason() -> None:
    metrics = Metrics()
    metrics.finished(1.0, "stop", 2.0)
    metrics.finished(1.0, "cancelled", 0.1)
    metrics.finished(1.0, "error", 0.1)
    assert metrics.totals().finished == {"stop": 1, "cancelled": 1, "error": 1}


def test_totals_add_up() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.started(0.0, prompt_tokens=7, cached_tokens=3, ttft_s=0.2)
        metrics.produced(0.0, 5)
    totals = metrics.totals()
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (14, 6, 10)


def test_marks_are_kept_in_order() -> None:
    metrics = Metrics()
    metrics.mark(1.0, "workers 1 -> 2")
    metrics.mark(2.0, "max_prompts 16 -> 8")
    assert [mark.text for mark in metrics.marks] == ["workers 1 -> 2", "max_prompts 16 -> 8"]
