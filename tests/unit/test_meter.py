"""Counting, rates, percentiles and history."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from engine.backends.base import BackendStats, FinishReason, StepLimit
from engine.metrics.distributions import Rate, SampleWindow, percentiles
from engine.metrics.history import HISTORY_SECONDS, tens_of
from engine.metrics.meter import FinishedRequest, Meter
from engine.snapshot import Second


def new_meter() -> Meter:
    meter = Meter()
    meter.add_model("m")
    return meter


def produce(meter: Meter, now: float, tokens: int, gaps: Mapping[float, int] | None = None, worker: str = "w0") -> None:
    """A step that brings tokens."""
    meter.count_steps(
        now,
        "m",
        worker,
        steps=1,
        step_s=0.01,
        ended_at=now,
        sequences=1,
        output_tokens=tokens,
        gaps=gaps or {},
        stats=BackendStats(),
        before=BackendStats(),
    )


def tick(meter: Meter, now: float, **gauges: object) -> None:
    values: dict[str, object] = {"running": 0, "queued": 0, "kv_usage": 0.0, "device_utilisation": (), **gauges}
    meter.tick(now, 1000.0 + now, **values)  # type: ignore[arg-type]


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
    assert SampleWindow().percentiles(0.0).p50 is None


def test_a_value_counts_as_often_as_it_was_sampled() -> None:
    window = SampleWindow()
    window.add(0.0, 1.0, times=99)
    window.add(0.0, 9.0)
    found = window.percentiles(1.0)
    assert (found.p50, found.p99) == (1.0, 1.0)
    window.add(0.0, 9.0, times=100)
    assert window.percentiles(1.0).p95 == 9.0


def test_a_crowd_of_requests_does_not_shorten_the_window() -> None:
    window = SampleWindow()
    for step in range(600):
        window.add(step / 10, 5.0 if step < 60 else 1.0, times=512)
    assert window.percentiles(60.0).p95 == 5.0


def test_samples_leave_the_window() -> None:
    window = SampleWindow(window_s=60)
    window.add(0.0, 100.0)
    window.add(50.0, 1.0)
    assert window.percentiles(61.0).p99 == 1.0


def test_a_second_of_history_holds_what_happened_in_it_alone() -> None:
    meter = new_meter()
    meter.count_prefill(0.5, "m", prompt_tokens=7, cached_tokens=3, ttft_s=0.2)
    produce(meter, 0.5, 2, {0.05: 2})
    tick(meter, 1.0, running=1, queued=4, kv_usage=0.25, device_utilisation=(0.5, None))
    tick(meter, 2.0)
    first, second = meter.history.seconds
    assert (first.prompt_tokens, first.output_tokens, first.ttft_p50, first.itl_p95) == (7, 2, 0.2, 0.05)
    assert (first.running, first.queued, first.kv_usage, first.device_utilisation) == (1, 4, 0.25, (0.5, None))
    assert (second.prompt_tokens, second.output_tokens, second.ttft_p50) == (0, 0, None)


def test_history_keeps_ten_minutes_and_drops_the_oldest() -> None:
    meter = new_meter()
    for second in range(HISTORY_SECONDS + 5):
        tick(meter, float(second))
    assert len(meter.history.seconds) == HISTORY_SECONDS == 600
    assert meter.history.seconds[0].at == 1005.0


def test_the_last_hour_is_kept_in_means_of_ten_seconds() -> None:
    meter = new_meter()
    for second in range(3700):
        tick(meter, float(second), running=second % 10)
        if second == 3691:
            earlier = meter.history.hour
    hour = meter.history.hour
    assert (len(hour), hour is earlier) == (360, True)
    assert {ten.running for ten in hour} == {4.5}
    assert {ten.seconds for ten in hour} == {10}
    assert [b.at - a.at for a, b in pairwise(hour)] == [10.0] * 359
    assert tens_of(meter.history.seconds) == hour[-59:]


def test_a_ten_of_which_seconds_are_missing_is_the_mean_of_the_others() -> None:
    (ten,) = tens_of([Second(at=103.0, running=4), Second(at=107.0, running=5, ttft_p50=0.2), Second(at=110.0)])
    assert (ten.at, ten.seconds, ten.running, ten.ttft_p50, ten.ttft_p95) == (105.0, 2, 4.5, 0.2, None)


def test_every_end_is_counted_by_its_reason() -> None:
    meter = new_meter()
    reasons: tuple[FinishReason, ...] = ("stop", "cancelled", "error")
    for reason in reasons:
        meter.count_finish(1.0, "m", FinishedRequest(reason=reason, prompt_tokens=1, output_tokens=1))
    assert meter.totals().finished == {"stop": 1, "cancelled": 1, "error": 1}


def test_totals_add_up() -> None:
    meter = new_meter()
    for _ in range(2):
        meter.count_prefill(0.0, "m", prompt_tokens=7, cached_tokens=3, ttft_s=0.2)
        produce(meter, 0.0, 5)
    totals = meter.totals()
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (14, 6, 10)


def test_marks_are_kept_in_order() -> None:
    meter = new_meter()
    meter.mark(1.0, "workers 1 -> 2")
    meter.mark(2.0, "max_prompts 16 -> 8")
    assert [mark.text for mark in meter.marks] == ["workers 1 -> 2", "max_prompts 16 -> 8"]


def test_marks_of_many_refusals_displace_none_of_another_kind() -> None:
    meter = Meter()
    meter.mark(1.0, "workers 1 -> 2")
    for at in range(2, 300):
        meter.mark(float(at), "refused", kind="warning")
    assert meter.marks[0].text == "workers 1 -> 2"
    assert [mark.at for mark in meter.marks[1:]] == [float(at) for at in range(200, 300)]


def test_each_worker_has_a_rate_of_its_own_until_it_has_been_silent() -> None:
    meter = new_meter()
    produce(meter, 1.0, 8, worker="w0")
    produce(meter, 1.0, 2, worker="w1")
    assert [meter.output_tokens_per_s(1.5, worker) for worker in ("w0", "w1", "w2", None)] == [8.0, 2.0, 0.0, 10.0]
    tick(meter, 30.0)
    assert meter.output_tokens_per_s(30.0, "w0") == 0.0


def test_every_view_counts_the_same_events() -> None:
    meter = new_meter()
    meter.add_model("other")
    for now in (1.0, 2.0):
        meter.count_prefill(now, "m", prompt_tokens=7, cached_tokens=3, ttft_s=0.2)
        produce(meter, now, 5, {0.1: 4})
        meter.count_finish(now, "m", FinishedRequest(reason="stop", prompt_tokens=7, output_tokens=5))
    meter.count("rejected")
    totals, insight, usage = meter.totals(), meter.insight(3.0), {each.name: each for each in meter.usage()}
    assert set(usage) == {"m", "other"}
    assert totals.output_tokens == insight.session.output_tokens == usage["m"].output_tokens == 10
    assert totals.finished == insight.finished == usage["m"].finished == {"stop": 2}
    assert (totals.rejected, usage["other"].output_tokens, meter.recent["inter_token_latency_seconds"].p50) == (
        1,
        0,
        None,
    )
    meter.reset_session(3.0, 0.0)
    assert (meter.insight(3.0).session.output_tokens, meter.insight(3.0).finished) == (0, {})
    assert (meter.totals().output_tokens, meter.usage()[0].finished) == (10, {"stop": 2})


def limited(meter: Meter, before: dict[StepLimit, int], after: dict[StepLimit, int], *, queued: bool = False) -> None:
    """Some steps of a tenth of a second, by what limited them."""
    stats, earlier = BackendStats(limited=after), BackendStats(limited=before)
    steps = sum(after.values()) - sum(before.values())
    meter.count_steps(
        1.0, "m", "w0", steps=steps, step_s=0.1, ended_at=1.0, sequences=1, output_tokens=0, gaps={}, stats=stats,
        before=earlier, queued=queued,
    )  # fmt: skip


def test_a_second_has_the_limit_of_most_of_its_steps() -> None:
    meter = new_meter()
    limited(meter, {"none": 5}, {"none": 6, "kv_pages": 3})
    tick(meter, 1.0, running=1)
    tick(meter, 2.0, running=1)
    assert [second.limit for second in meter.history.seconds] == ["kv_pages"] * 2


def test_an_idle_second_has_no_work_and_one_without_a_known_limit_none() -> None:
    meter = new_meter()
    tick(meter, 1.0)
    produce(meter, 1.5, 1)
    tick(meter, 2.0, running=1)
    assert [second.limit for second in meter.history.seconds] == ["none", None]


def test_max_prompts_limits_a_worker_that_has_no_slot_for_what_is_queued() -> None:
    meter = new_meter()
    limited(meter, {}, {"none": 2}, queued=True)
    tick(meter, 1.0, running=1, queued=1)
    assert meter.history.seconds[-1].limit == "max_prompts"


def test_ten_seconds_have_the_most_frequent_limit() -> None:
    seconds = [Second(at=100.0 + at, limit="kv_pages" if at < 6 else "none") for at in range(11)]
    assert tens_of(seconds)[0].limit == "kv_pages"
