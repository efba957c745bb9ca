"""Results as `ericllm bench show` and `compare` print them: with spread, with what others got, and with all numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from console.bench.comparison import compare
from console.bench.history import BenchHistory
from console.bench.kinds.serve import Serve
from console.bench.result import BenchResult, Published
from console.bench.run import run_bench
from console.bench.text import result_text
from console.cli.bench import comparison_text, show_results, shown
from console.tui.screens.benches.plot import plottable_columns
from engine.simulation.lengths import fixed
from tests.fakes.bench_target import FakeTarget
from tests.unit.test_bench_history import RATE, TTFT, made

OTHERS = Published(who="Somebody", device="a card", source="a study", values={"tok_s": 77.0})
TIMES = [f"{name} {kind}" for name in ("TTFT", "TPOT", "ITL", "response") for kind in ("p50", "p90", "p95", "p99")]


async def served(**changed: object) -> BenchResult:
    plan = Serve(rates=(500.0, float("inf")), requests=6, prompt_tokens=fixed(4), output_tokens=fixed(4))
    return await run_bench(msgspec.structs.replace(plan, **changed), FakeTarget())


def test_a_result_is_shown_as_its_bench_printed_it_and_when() -> None:
    result = made({1: [10.0, 11.0]}, published=(OTHERS,), complete=False, notes=("a note",))
    said = shown(result, "text")
    assert said == f"measured 2026-03-01 12:30 UTC\n{result_text(result)}"
    for words in ("Somebody", "From a study", "a note", "Ended early", "Some CPU", "10.5 ±5%"):
        assert words in said, words


def test_a_comparison_tells_medians_and_spread_of_both() -> None:
    said = comparison_text(compare(made({1: [100.0, 102.0, 110.0]}), made({1: [200.0, 202.0, 204.0]})))
    [line] = [line for line in said.splitlines() if line.startswith("users 1  throughput")]
    assert line.split() == ["users", "1", "throughput", "(tok/s)", "102.0", "±5%", "202.0", "±1%", "+98.0%", "better"]


async def test_the_table_has_the_share_within_an_slo_where_one_is_asked_for() -> None:
    assert "within SLO (%)" in result_text(await served(slo_ttft=60.0))
    assert "within SLO (%)" not in result_text(await served())


async def test_all_numbers_are_told_a_line_each_with_the_rows_side_by_side() -> None:
    result = await served()
    plain, said = result_text(result), result_text(result, everything=True)
    for title in TIMES:
        assert f"\n{title} (ms)  " in said, title
    assert "ITL p90" not in plain
    [asked] = [line for line in said.splitlines() if line.startswith("asked (req/s)")]
    [answered] = [line for line in said.splitlines() if line.startswith("answered")]
    assert (asked.split()[2:], answered.split()[1:]) == (["500", "inf"], ["6", "6"])
    assert result_text(msgspec.structs.replace(result, rows=()), everything=True).endswith("nothing was measured.")


@pytest.mark.parametrize("flags", [(), ("--all",)])
def test_the_command_tells_what_the_table_leaves_out_where_it_is_asked_to(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = msgspec.structs.replace(TTFT, shown=False)
    number = BenchHistory(tmp_path).add(made({1: [10.0, 11.0]}, columns=(RATE, hidden)))
    for argv in (("show", str(number)), ("compare", str(number), "last")):
        assert show_results((*argv, *flags), argparse.ArgumentParser(), tmp_path) == 0
        assert ("TTFT (ms)" in capsys.readouterr().out) == bool(flags)


async def test_any_number_can_be_plotted_those_of_the_table_first() -> None:
    result = await served()
    names = [column.name for column in plottable_columns(result)]
    told = [column.name for column in result.columns if column.shown and result.rows[0].numbers(column.name)]
    assert names[: len(told)] == told
    assert set(names) == {column.name for column in result.columns if result.rows[0].numbers(column.name)}
    assert {"p90_itl_ms", "std_ttft_ms", "mean_e2el_ms"} <= set(names) - set(told)
