"""What is made of windows: the front over the latencies that are asked for, and windows that gave nothing."""

from __future__ import annotations

import math

from console.tuning.autotune.record import Interval, Record, Sample, Slice, pareto
from console.tuning.autotune.space import Setting
from engine.metrics.slo import Slo


def record(prompts: int, tokens_per_s: float, *, ttft_s: float, itl_s: float) -> Record:
    return Record(
        setting=Setting(max_prompts=prompts),
        windows=1,
        seconds=1.0,
        tokens_per_s=Interval(tokens_per_s),
        ttft_s=Interval(ttft_s),
        itl_s=Interval(itl_s),
        goodput_per_s=1.0,
        verdict="unsure",
        excess=0.0,
    )


SLOW_FIRST = record(1, 100, ttft_s=0.9, itl_s=0.01)
FAST = record(2, 200, ttft_s=0.5, itl_s=0.05)
EVEN = record(3, 150, ttft_s=0.4, itl_s=0.06)
BEATEN = record(4, 120, ttft_s=0.6, itl_s=0.07)
ALL = (SLOW_FIRST, FAST, EVEN, BEATEN)


def test_the_front_is_drawn_against_the_latencies_that_are_asked_for() -> None:
    assert pareto(ALL, Slo(itl_s=0.1)) == [FAST, SLOW_FIRST]
    assert pareto(ALL, Slo(ttft_s=1.0)) == [FAST, EVEN]


def test_where_none_is_asked_for_the_front_is_drawn_against_both() -> None:
    assert pareto(ALL, Slo()) == pareto(ALL, Slo(ttft_s=1.0, itl_s=0.1)) == [FAST, EVEN, SLOW_FIRST]


def test_of_two_that_are_alike_one_is_on_the_front() -> None:
    twin = record(5, 200, ttft_s=0.5, itl_s=0.05)
    assert pareto((FAST, twin), Slo()) == [FAST]


def test_a_setting_that_gave_nothing_keeps_no_slo_is_worth_nothing_and_on_no_front() -> None:
    slo = Slo(ttft_s=1.0)
    failed = Record.of(Setting(), [Sample.of_failure("no request was answered", 2.0)], slo)
    assert (failed.failed, failed.verdict, failed.excess) == ("no request was answered", "broken", math.inf)
    assert (failed.tokens_per_s.high, failed.value, failed.keeps) == (0.0, 0.0, False)
    assert pareto((failed, FAST), slo) == [FAST]


def test_a_setting_that_failed_once_is_out_whatever_else_it_gave() -> None:
    good = Sample(slices=(Slice(seconds=1.0, tokens=100),) * 4)
    assert Record.of(Setting(), [good, Sample.of_failure("it died", 1.0)], Slo()).failed == "it died"
