"""A row of a bench from run to run: of the same work alone, and how many results are left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.bench.comparison import compare, trend
from console.bench.result import BenchResult, Column
from tests.unit.test_bench_history import RATE, made

GOODPUT = Column(name="request_goodput", title="goodput", better="higher")


def run(rate: float = 10.0, **settings: Any) -> BenchResult:
    """Of 4 users, with these settings."""
    found = made({4: [rate]}, columns=(RATE, GOODPUT), settings={"requests": 64, "output_tokens": "128", **settings})
    [row] = found.rows
    return msgspec.structs.replace(
        found, rows=(msgspec.structs.replace(row, values={**row.values, "request_goodput": [rate]}),)
    )


@pytest.mark.parametrize("other", [{"requests": 4}, {"output_tokens": "8"}, {"prefix_share": 0.5}])
def test_results_of_other_work_are_left_out_of_a_trend_and_counted(other: dict[str, Any]) -> None:
    shown = run()
    over = trend(shown, RATE, {3: shown, 2: run(99.0, **other), 1: run(20.0)})
    assert [(row.keys["number"], row.values["tok_s"]) for row in over.found.rows] == [(3, [10.0]), (1, [20.0])]
    assert over.left_out == 1
    assert over.about == " of users 4, over time, 1 result with other workloads left out"


def test_a_trend_keeps_what_was_only_set_otherwise() -> None:
    shown = run(max_prompts=16)
    over = trend(shown, RATE, {2: shown, 1: run(max_prompts=4, cache_bits=8, repeats=5)})
    assert (len(over.found.rows), over.left_out, over.about) == (2, 0, " of users 4, over time")


def test_another_slo_is_other_work_for_goodput_alone() -> None:
    shown = run(slo_ttft=0.5)
    results = {2: shown, 1: run(slo_ttft=0.1)}
    assert [trend(shown, column, results).left_out for column in (RATE, GOODPUT)] == [0, 1]


def test_a_result_without_the_row_is_none_that_is_left_out() -> None:
    shown = run()
    over = trend(shown, RATE, {2: shown, 1: made({8: [10.0]}, settings={"requests": 4})})
    assert (len(over.found.rows), over.left_out) == (1, 0)


def test_a_setting_that_an_older_result_lacks_is_as_good_as_an_empty_one() -> None:
    shown, older = run(trace="", slo_ttft=None), run()
    assert trend(shown, RATE, {2: shown, 1: older}).left_out == 0
    assert compare(older, shown).differences == ()
