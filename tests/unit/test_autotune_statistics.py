"""Means, percentiles and how sure they are; verdicts on an SLO; the grid of settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from console.tuning.autotune.record import (
    DRIFT,
    Record,
    Sample,
    Slice,
    quantile_of,
    rate_of,
    student_t,
)
from console.tuning.autotune.space import Knob, Setting, Space
from engine.metrics.distributions import percentiles
from engine.metrics.slo import Slo
from tests.fakes.simulated_tuning import knobs


def seconds(rates: Sequence[float]) -> list[tuple[float, float]]:
    """A window of slices of a second."""
    return [(float(rate), 1.0) for rate in rates]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 11, 15, 60])
def test_students_t_is_right_to_a_hundredth(freedom: int) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_the_mean_lies_in_its_interval_as_often_as_is_said() -> None:
    draw = random.Random(1)
    inside = 0
    for _ in range(1000):
        found = rate_of([seconds([draw.gauss(100, 8) for _ in range(4)])])
        inside += found.low <= 100 <= found.high
    assert inside >= 950


def test_a_rate_of_one_slice_is_known_and_not_how_surely() -> None:
    found = rate_of([seconds([5.0])])
    assert (found.value, found.low, found.high) == (5.0, 0.0, float("inf"))


def test_slices_that_are_all_alike_leave_what_a_whole_window_may_be_off() -> None:
    one, four = rate_of([seconds([100.0] * 4)]), rate_of([seconds([100.0] * 4)] * 4)
    assert one.high - 100 > 100 * DRIFT
    assert four.high < one.high


def test_a_percentile_lies_where_numpy_has_it() -> None:
    values = [3.0, 1.0, 2.0, 10.0, 4.0]
    for share in (0.0, 0.5, 0.9, 0.95, 1.0):
        expected = pytest.approx(float(np.quantile(values, share)))
        assert percentiles(values, share, interpolate=True) == [expected]


def test_gaps_of_one_step_do_not_make_a_percentile_surer() -> None:
    few = quantile_of([[0.01], [0.02], [0.03]], 0.95)
    many = quantile_of([[0.01] * 50, [0.02] * 50, [0.03] * 50], 0.95)
    assert few is not None and many is not None
    assert many.high - many.low >= few.high - few.low


def test_without_values_there_is_no_percentile() -> None:
    assert quantile_of([(), ()], 0.95) is None


def record(itl_s: float, spread: float, slo: Slo) -> Record:
    """Of four slices with gaps that differ by `spread` from one to the next."""
    slices = tuple(Slice(seconds=1, tokens=10, itl_s=(itl_s + spread * (index % 2),) * 9) for index in range(4))
    return Record.of(Setting(), [Sample(slices=slices)], slo)


def test_an_slo_is_kept_broken_or_not_yet_certain() -> None:
    slo = Slo(itl_s=0.050)
    assert record(0.030, 0.001, slo).verdict == "kept"
    assert record(0.070, 0.001, slo).verdict == "broken"
    assert record(0.045, 0.010, slo).verdict == "unsure"


def test_a_latency_that_was_never_measured_keeps_no_slo_surely() -> None:
    assert record(0.010, 0.0, Slo(ttft_s=1.0)).verdict == "unsure"


def test_without_an_slo_everything_keeps_it() -> None:
    assert record(9.0, 1.0, Slo()).verdict == "kept"


def test_the_coarse_grid_has_a_few_values_of_each_knob_and_begins_with_what_is_in_use() -> None:
    space = Space(knobs=knobs(workers=(1, 2), max_prompts=(1, 2, 4, 8, 16, 32)), start=Setting(max_prompts=16))
    coarse = space.coarse(100, random.Random(0))
    assert coarse[0] == space.start
    assert {each.max_prompts for each in coarse[1:]} == {2, 8, 32}
    assert len(coarse) == 7


def test_a_coarse_grid_with_too_many_settings_has_each_value_as_often() -> None:
    space = Space(knobs=knobs(workers=(1, 2, 3), max_prompts=(2, 8, 32), step_tokens=(64, 256, 1024)), start=Setting())
    coarse = space.coarse(9, random.Random(0))[1:]
    assert len(coarse) <= 9
    assert {each.workers for each in coarse} == {1, 2, 3}
    assert {each.step_tokens for each in coarse} == {64, 256, 1024}


def test_what_is_dear_to_turn_is_turned_least_often() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2, 4), cache_bits=(4, 8, 16)), start=Setting(max_prompts=1))
    order = space.in_order(list(space.all()))
    turns = sum(a.cache_bits != b.cache_bits for a, b in itertools.pairwise(order))
    assert (turns, order[0].cache_bits) == (2, 16)


def test_going_to_another_setting_takes_what_the_dearest_knob_takes() -> None:
    space = Space(knobs=knobs(workers=(1, 2), cache_bits=(8, 16), max_prompts=(1, 2)), start=Setting())
    bits = next(knob.turn_s for knob in space.knobs if knob.name == "cache_bits")
    assert space.turn_s(Setting(), Setting(workers=2, cache_bits=8)) == bits
    assert space.turn_s(Setting(), Setting(max_prompts=2)) == 0


def test_moves_stay_on_the_grid() -> None:
    space = Space(knobs=(Knob(name="max_prompts", values=(1, 2, 4)),), start=Setting(max_prompts=1))
    assert [each.max_prompts for each in space.moves(Setting(max_prompts=1), 1)] == [2]
    assert [each.max_prompts for each in space.moves(Setting(max_prompts=2), 2)] == []
    assert space.moves(Setting(max_prompts=3), 1) == []


def test_only_knobs_that_make_up_for_each_other_are_turned_together() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2, 4), threads=(1, 2, 4)), start=Setting())
    assert space.diagonal_moves(Setting(max_prompts=2, threads=2)) == []
    space = Space(knobs=knobs(max_prompts=(1, 2, 4), workers=(1, 2, 3)), start=Setting())
    assert len(space.diagonal_moves(Setting(max_prompts=2, workers=2))) == 4
