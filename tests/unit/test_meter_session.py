"""The session: where requests spend their time, how long they are, goodput, drafts, and what a reset forgets."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.backends.base import BackendStats, DraftPosition
from engine.metrics.distributions import (
    LENGTH_BOUNDS,
    RELATIVE_ERROR,
    LengthCounter,
    QuantileSketch,
    percentiles,
)
from engine.metrics.meter import BusyClock, FinishedRequest, Meter
from engine.metrics.slo import Slo
from engine.snapshot import Insight


def answer(**changes: object) -> FinishedRequest:
    """A whole answer: a second in the queue, two in prefill, four for its other eight tokens."""
    values: dict[str, object] = {
        "reason": "stop",
        "prompt_tokens": 100,
        "output_tokens": 9,
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "decode_s": 4.0,
        "ttft_s": 3.0,
        "itl_s": 0.5,
    }
    return FinishedRequest(**(values | changes))  # type: ignore[arg-type]


def after(*requests: FinishedRequest, slo: Slo | None = None, now: float = 10.0) -> Insight:
    """What is known once these ended, one a second."""
    session = new_meter(slo)
    for second, request in enumerate(requests):
        session.count_finish(float(second), "m", request)
    return session.insight(now)


def stepped(session: Meter, now: float, steps: int = 1, step_s: float = 0.1, **changes: object) -> None:
    values = {"sequences": 4, "stats": BackendStats(), "before": BackendStats(), "output_tokens": 0, "gaps": {}}
    session.count_steps(now, "m", "w0", steps=steps, step_s=step_s, ended_at=now, **(values | changes))  # type: ignore[arg-type]


def new_meter(slo: Slo | None = None) -> Meter:
    meter = Meter(slo)
    meter.add_model("m")
    return meter


# --- quantiles --------------------------------------------------------------------------------------------------------


def test_nothing_measured_is_not_zero() -> None:
    assert (QuantileSketch().freeze().p50, QuantileSketch().freeze().mean) == (None, None)


def test_one_measurement_is_every_percentile_exactly() -> None:
    quantiles = QuantileSketch()
    quantiles.add(0.1234)
    spread = quantiles.freeze()
    assert (spread.p50, spread.p90, spread.p99, spread.longest, spread.mean) == (0.1234,) * 5


def test_percentiles_are_within_one_percent_over_six_decades() -> None:
    draw = random.Random(7)
    values = [draw.lognormvariate(-2.0, 2.5) for _ in range(5000)]
    quantiles = QuantileSketch()
    for value in values:
        quantiles.add(value)
    spread = quantiles.freeze()
    exact = percentiles(Counter(values), 0.50, 0.90, 0.99)
    assert [spread.p50, spread.p90, spread.p99] == pytest.approx(exact, rel=RELATIVE_ERROR * 1.01)
    assert spread.mean == pytest.approx(sum(values) / 5000)
    assert (spread.count, spread.longest) == (5000, max(values))


def test_zeros_are_measurements_too() -> None:
    quantiles = QuantileSketch()
    for value in (0.0, 0.0, 0.0, 8.0):
        quantiles.add(value)
    spread = quantiles.freeze()
    assert (spread.p50, spread.p90, spread.longest) == (0.0, pytest.approx(8.0, rel=0.01), 8.0)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_length_at_a_bound_belongs_to_it_and_one_beyond_all_is_kept() -> None:
    lengths = LengthCounter()
    for tokens in (1, 16, 17, 200_000):
        lengths.add(tokens)
    frozen = lengths.freeze()
    assert frozen.bounds == LENGTH_BOUNDS
    assert frozen.counts[:2] == (2, 1)
    assert (frozen.counts[-1], sum(frozen.counts), frozen.spread.longest) == (1, 4, 200_000)


# --- where time goes --------------------------------------------------------------------------------------------------


def test_each_phase_has_its_own_percentiles() -> None:
    insight = after(*(answer(queue_s=0.1 * each, prefill_s=1.0, decode_s=2.0 * each) for each in range(1, 11)))
    assert insight.queue.p50 == pytest.approx(0.5, rel=0.01)
    assert insight.queue.p90 == pytest.approx(0.9, rel=0.01)
    assert (insight.prefill.p50, insight.prefill.mean) == (1.0, 1.0)
    assert insight.decode.mean == pytest.approx(11.0)
    assert insight.decode.longest == 20.0


def test_only_whole_answers_say_where_time_goes_and_how_long_they_are() -> None:
    insight = after(
        answer(), answer(reason="length"), *(answer(reason=why) for why in ("cancelled", "timeout", "error"))
    )
    assert (insight.queue.count, insight.outputs.spread.count, insight.prompts.spread.count) == (2, 2, 2)
    assert insight.finished == {"stop": 1, "length": 1, "cancelled": 1, "timeout": 1, "error": 1}
    assert insight.session.requests == 5


def test_an_answer_that_never_got_a_token_spent_nothing_on_decode() -> None:
    insight = after(answer(output_tokens=0, prefill_s=None, decode_s=None, ttft_s=None, itl_s=None))
    assert (insight.queue.count, insight.prefill.count, insight.decode.count) == (1, 0, 0)


def test_the_longest_context_is_of_any_request_that_ended() -> None:
    insight = after(answer(), answer(reason="cancelled", prompt_tokens=900, output_tokens=3), answer(prompt_tokens=300))
    assert insight.longest_context_tokens == 903


# --- goodput ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), 1),
        (Slo(ttft_s=3.0), 1),
        (Slo(ttft_s=2.9), 0),
        (Slo(itl_s=0.5), 1),
        (Slo(itl_s=0.4), 0),
        (Slo(ttft_s=3.0, itl_s=0.4), 0),
    ],
)
def test_an_answer_keeps_an_slo_up_to_its_very_limits(slo: Slo, kept: int) -> None:
    assert after(answer(), slo=slo).goodput.within_slo == kept


def test_a_single_token_is_judged_by_its_ttft_alone() -> None:
    assert after(answer(output_tokens=1, itl_s=None), slo=Slo(ttft_s=3.0, itl_s=0.01)).goodput.within_slo == 1


def test_a_failure_keeps_no_slo_and_a_cancelled_request_is_not_judged() -> None:
    ends = (answer(), answer(reason="error"), answer(reason="timeout"), answer(reason="cancelled"))
    goodput = after(*ends, slo=Slo(ttft_s=5.0)).goodput
    assert (goodput.judged, goodput.within_slo) == (3, 1)
    assert (goodput.slo_ttft_s, goodput.slo_itl_s) == (5.0, None)


def test_a_request_without_an_answer_is_not_judged_and_no_answer_of_no_tokens() -> None:
    insight = after(answer(output_tokens=0, prefill_s=None, decode_s=None, ttft_s=None), slo=Slo(ttft_s=5.0))
    assert (insight.goodput.judged, sum(insight.outputs.counts), sum(insight.prompts.counts)) == (0, 0, 1)


def test_the_rate_of_goodput_is_that_of_the_last_minute() -> None:
    session = new_meter(Slo(ttft_s=5.0))
    for second in range(120):
        session.count_finish(float(second), "m", answer())
    assert session.insight(119.0).goodput.per_s == pytest.approx(61 / 60)
    assert session.insight(300.0).goodput.per_s == 0.0


def test_the_rate_of_goodput_in_a_sessions_first_minute_is_over_its_age() -> None:
    session = new_meter(Slo(ttft_s=5.0))
    session.reset_session(100.0, 0.0)
    session.count_finish(119.0, "m", answer())
    session.count_finish(119.5, "m", answer())
    assert session.insight(120.0).goodput.per_s == pytest.approx(2 / 20)


def test_another_slo_judges_anew() -> None:
    session = new_meter(Slo(ttft_s=1.0))
    session.count_finish(0.0, "m", answer())
    session.set_slo(Slo(ttft_s=4.0))
    session.count_finish(1.0, "m", answer())
    goodput = session.insight(2.0).goodput
    assert (goodput.judged, goodput.within_slo, goodput.slo_ttft_s) == (1, 1, 4.0)
    assert session.insight(2.0).session.requests == 2


# --- steps ------------------------------------------------------------------------------------------------------------


def test_busy_time_counts_steps_of_several_workers_at_once_only_once() -> None:
    clock = BusyClock()
    for began, ended in ((0.0, 1.0), (0.5, 1.5), (3.0, 4.0)):
        clock.add(began, ended)
    assert clock.busy_s == pytest.approx(2.5)


def test_a_long_step_fills_what_lay_idle_between_those_that_ended_before_it() -> None:
    clock = BusyClock()
    for began, ended in ((0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (0.5, 6.0)):
        clock.add(began, ended)
    assert clock.busy_s == pytest.approx(6.0)
    clock.add(5.5, 6.5)
    assert clock.busy_s == pytest.approx(6.5)


def test_a_gap_that_is_filled_in_part_is_filled_the_rest_of_the_way_later() -> None:
    clock = BusyClock()
    for began, ended in ((0.0, 1.0), (5.0, 6.0), (4.0, 6.0), (2.0, 6.0)):
        clock.add(began, ended)
    assert clock.busy_s == pytest.approx(1.0 + 4.0)


@pytest.mark.parametrize("seed", range(40))
def test_busy_time_is_the_union_of_all_steps_in_whatever_order_they_are_reported(seed: int) -> None:
    draw = random.Random(seed)
    steps = [((end := draw.randrange(1, 400)), draw.randrange(0, end)) for _ in range(60)]
    if seed < 20:
        steps.sort()
    clock = BusyClock()
    for end, begin in steps:
        clock.add(float(begin), float(end))
    covered = {moment for end, begin in steps for moment in range(begin, end)}
    assert clock.busy_s == pytest.approx(len(covered))


def test_averages_are_over_busy_time() -> None:
    session = new_meter()
    session.reset_session(100.0, 5000.0)
    stepped(session, 110.0, steps=10, step_s=0.2, sequences=6)
    stepped(session, 112.0, steps=10, step_s=0.1, sequences=2)
    stepped(session, 115.0, steps=0, step_s=0.0, sequences=9)  # idle: how things are
    stepped(session, 116.0, steps=0, step_s=0.0, output_tokens=80)
    seen = session.insight(120.0).session
    assert (seen.since, seen.elapsed_s) == (5000.0, 20.0)
    assert seen.busy_s == pytest.approx(3.0)
    assert (seen.steps, seen.batch, seen.output_tokens) == (20, pytest.approx(4.0), 80)


def test_prompt_tokens_are_those_that_were_computed() -> None:
    session = new_meter()
    before, stats = BackendStats(prompt_tokens_computed=500), BackendStats(prompt_tokens_computed=1300)
    stepped(session, 1.0, before=before, stats=stats)
    stepped(session, 2.0, before=stats, stats=BackendStats())  # the worker was started again
    assert session.insight(3.0).session.prompt_tokens == 800


def test_guesses_of_all_workers_are_summed_by_position() -> None:
    session = new_meter()

    def stats(*positions: tuple[int, int]) -> BackendStats:
        return BackendStats(drafts=tuple(DraftPosition(drafted=guessed, accepted=held) for guessed, held in positions))

    stepped(session, 1.0, stats=stats((10, 8), (10, 4)))
    stepped(session, 2.0, before=stats((10, 8), (10, 4)), stats=stats((15, 12), (15, 6), (2, 1)))
    stepped(session, 2.5, stats=stats((1, 1)))
    assert [(each.drafted, each.accepted) for each in session.insight(3.0).drafts] == [(16, 13), (15, 6), (2, 1)]


def test_without_guesses_there_are_no_positions() -> None:
    session = new_meter()
    stepped(session, 1.0)
    assert session.insight(2.0).drafts == ()


# --- reset ------------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_the_session_and_goes_on_counting() -> None:
    session = new_meter(Slo(ttft_s=9.0))
    session.count_finish(1.0, "m", answer(prompt_tokens=5000))
    stepped(session, 2.0, step_s=1.0)
    stepped(session, 116.0, steps=0, step_s=0.0, output_tokens=7)
    session.reset_session(10.0, 1000.0)
    fresh = session.insight(10.0)
    assert (fresh.session.requests, fresh.session.busy_s, fresh.session.output_tokens) == (0, 0.0, 0)
    assert (fresh.queue.count, fresh.finished, fresh.longest_context_tokens, fresh.goodput.judged) == (0, {}, 0, 0)
    assert (fresh.session.since, fresh.session.batch, fresh.goodput.slo_ttft_s) == (1000.0, None, 9.0)
    stepped(session, 11.0, step_s=0.5)
    assert session.insight(12.0).session.busy_s == pytest.approx(0.5)
    assert session.busy_s == pytest.approx(1.5)
