"""The benchmark's tables, and the section of a page that they are written into."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.snapshot import DeviceLimits
from tools.benchmarks.limits import linear_flops, share_of_limits
from tools.benchmarks.machine import Machine, this_machine
from tools.benchmarks.protocol import Answer, Done
from tools.benchmarks.publish import with_section, write_section
from tools.benchmarks.report import (
    behind,
    failures,
    goals_table,
    latencies_table,
    markdown,
    rates_table,
    ratios_table,
    shares_table,
    slower,
)
from tools.benchmarks.results import Cell, Failure, Goal, Latency, Results, Round, Spread, read_results

MACHINE = Machine("CPU", ("avx2",), 2, 8 << 30, "Linux", "3.11")


def cell(shape: str, row: str, clients: int, rates: tuple[float, ...], prompt: int = 128) -> Cell:
    return Cell(shape, row, clients, prompt, tuple(Round(rate, Latency(0.2, 0.4, 0.011, 0.02)) for rate in rates))


@pytest.fixture
def results() -> Results:
    return Results(
        machine=MACHINE,
        date="2030-01-02",
        commands=("python -m tools.benchmarks --rounds 3",),
        minutes=3.2,
        cells=(
            cell("135m", "ours", 1, (84.0, 90.0, 87.0)),
            cell("135m", "openvino", 1, (58.0, 60.0, 59.0)),
            cell("135m", "ours", 8, (390.0, 410.0, 400.0)),
            cell("135m", "openvino", 8, (330.0, 310.0, 320.0)),
        ),
        failures=(Failure("135m", "xllamacpp-q4", "RuntimeError: illegal instruction"),),
        goals=(Goal("135m", "prefix", Spread(0.04, 0.03, 0.2), 0.1, at_most=True),),
        versions={"ours": {"torch": "2.13"}, "openvino": {"openvino": "2026.4"}},
    )


def test_a_cell_says_the_median_of_its_rounds_and_their_spread(results: Results) -> None:
    assert rates_table(results, "135m", [1, 8]).splitlines() == [
        "| generated tok/s | weights | c=1 | c=8 |",
        "| --- | --- | --- | --- |",
        "| EricLLM Console, in process | bf16 | 87.0 (84.0 to 90.0) | 400 (390 to 410) |",
        "| OpenVINO GenAI | bf16 | 59.0 (58.0 to 60.0) | 320 (310 to 330) |",
        "| llama.cpp's server, xllamacpp's wheel | Q4_0 | failed | failed |",
    ]


def test_ratios_are_of_medians_and_stand_beside_their_goal(results: Results) -> None:
    assert "| ours bf16 / best peer, bf16 | 1.47 (2.00) openvino | 1.25 (1.70) openvino |" in ratios_table(
        results, "135m", [1, 8]
    )
    assert "HTTP" not in ratios_table(results, "135m", [1, 8])


def test_a_missed_goal_is_named_with_its_number(results: Results) -> None:
    assert behind(results) == (
        "Goals that are missed ([why, and what is being done](#where-it-loses-and-what-is-being-done)):\n\n"
        "* 135m, c=1: ours bf16 / best peer, bf16 is 1.47; the goal is 2.00.\n"
        "* 135m, c=8: ours bf16 / best peer, bf16 is 1.25; the goal is 1.70."
    )
    fast = cell("135m", "ours", 1, (120.0,))
    assert behind(msgspec.structs.replace(results, cells=(fast, results.cells[1]))) == ""


def test_a_ratio_is_over_the_best_of_its_peers(results: Results) -> None:
    faster = msgspec.structs.replace(results, cells=(*results.cells, cell("135m", "vllm", 8, (400.0,))))
    assert "1.47 (2.00) openvino | 1.00 (1.70) vllm |" in ratios_table(faster, "135m", [1, 8])


def test_goals_are_of_short_prompts_alone(results: Results) -> None:
    long = [cell("135m", row, 1, (rate,), 1024) for row, rate in (("ours", 50.0), ("openvino", 40.0))]
    with_long = msgspec.structs.replace(results, cells=(*results.cells, *long))
    assert "| ours bf16 / best peer, bf16 | 1.25 openvino |" in ratios_table(with_long, "135m", [1], 1024)
    assert behind(with_long) == behind(results)
    assert "Prompts of 1024 tokens:\n\n| generated tok/s | weights | c=1 |" in markdown(with_long)


def test_latencies_stand_beside_rates_and_an_engine_without_any_says_so(results: Results) -> None:
    silent = Cell("135m", "generate", 1, 128, (Round(20.0),))
    table = latencies_table(msgspec.structs.replace(results, cells=(*results.cells, silent)), "135m", [1, 8])
    assert "| OpenVINO GenAI | bf16 | 200 / 400; 11.0 / 20.0 | 200 / 400; 11.0 / 20.0 |" in table
    assert "| transformers, generate in batches | bf16 | reports no single tokens |  |" in table


def test_latencies_are_those_of_chunks_at_the_client() -> None:
    answer = Answer()
    answer.sent_s, answer.arrivals, answer.tokens = 10.0, [10.5, 10.6, 10.9], 5
    done = Done.of([answer, Answer()], 2.0)
    assert (done.tokens, done.rate) == (5, 2.5)
    assert done.ttft_s == pytest.approx((0.5,))
    assert done.itl_s == pytest.approx((0.1, 0.3))
    found = Latency.of(done)
    assert found is not None
    assert msgspec.structs.astuple(found) == pytest.approx((0.5, 0.5, 0.1, 0.3))
    assert Latency.of(Done(5, 2.0)) is None


def test_our_rows_show_their_share_of_the_larger_limit(results: Results) -> None:
    limits = DeviceLimits(flops_16bit_per_s=500e9, flops_32bit_per_s=200e9, bytes_per_s=40e9)
    table = shares_table(msgspec.structs.replace(results, limits=limits), "135m", [1, 8])
    (line,) = table.splitlines()[2:]
    one, eight = share_of_limits("135m", 16, 1, 128, 87.0, limits), share_of_limits("135m", 16, 8, 128, 400.0, limits)
    shown = f"{one.share:.0%} bandwidth | {eight.share:.0%} {eight.limit}"
    assert line == f"| EricLLM Console, in process | bf16 | {shown} |"
    assert shares_table(results, "135m", [1, 8]) == ""


@pytest.mark.parametrize(("times", "is_explained"), [(0.99, False), (1.004, False), (1.01, True)])
def test_a_share_over_its_limit_is_explained_below_its_table(
    results: Results, times: float, is_explained: bool
) -> None:
    reached = share_of_limits("135m", 16, 1, 128, 87.0, DeviceLimits(bytes_per_s=1.0)).share
    with_limits = msgspec.structs.replace(results, limits=DeviceLimits(bytes_per_s=reached / times))
    table = shares_table(with_limits, "135m", [1, 8])
    assert f"| EricLLM Console, in process | bf16 | {times:.0%} bandwidth |" in table
    assert ("|\n\nA share over 100% means that the limit was measured lower" in table) is is_explained
    assert table in markdown(with_limits)


def test_one_client_is_bound_by_reading_weights_and_many_by_arithmetic() -> None:
    limits = DeviceLimits(flops_16bit_per_s=500e9, flops_32bit_per_s=200e9, bytes_per_s=40e9)
    weights = 30 * (576 * 576 * 2 + 2 * 192 * 576 + 3 * 576 * 1536) + 49152 * 576
    one = share_of_limits("135m", 16, 1, 128, 100.0, limits)
    assert one.limit == "bandwidth"
    assert one.share == pytest.approx(100 * (2 * weights + 2 * 30 * 3 * 64 * 2 * 192) / 40e9)
    assert share_of_limits("135m", 16, 32, 128, 600.0, limits).limit == "arithmetic"
    assert share_of_limits("135m", 4, 1, 128, 100.0, limits).share < one.share


def test_an_engine_is_said_to_be_faster_beyond_a_tie_of_ours_with_as_many_bits(results: Results) -> None:
    assert slower(results).startswith("No other engine is faster")
    more = cell("135m", "xllamacpp-q4", 1, (95.0,)), cell("135m", "xllamacpp-q8", 8, (480.0,))
    with_more = msgspec.structs.replace(results, cells=(*results.cells, *more))
    assert slower(with_more).splitlines()[2:] == [
        "* 135m, c=8: llama.cpp's server, xllamacpp's wheel, Q8_0, 1.20 times ours."
    ]
    quantised = msgspec.structs.replace(with_more, cells=(*with_more.cells, cell("135m", "ours-int4", 8, (500.0,))))
    assert "Q8_0, 1.20" in slower(quantised)
    assert slower(msgspec.structs.replace(results, cells=results.cells[:1])) == ""


def test_a_section_has_its_own_rows_of_a_run(results: Results) -> None:
    ours = results.of({"ours"})
    assert {cell.row for cell in ours.cells} == {"ours"}
    assert not ours.failures
    assert list(ours.versions) == ["ours"]
    assert ours.goals == results.goals


def test_an_engine_that_failed_is_quoted(results: Results) -> None:
    assert failures(results) == (
        "Not measured:\n\n* 135m, llama.cpp's server, xllamacpp's wheel, Q4_0: RuntimeError: illegal instruction"
    )


def test_a_goal_is_met_by_its_median(results: Results) -> None:
    assert goals_table(results.goals).splitlines()[-1] == "| prefix | 4% (3% to 20%) | max 10% |"
    assert results.goals[0].is_met
    assert not msgspec.structs.replace(results.goals[0], at_most=False).is_met


def test_a_report_says_what_ran_where_and_how(results: Results) -> None:
    text = markdown(results)
    assert text.startswith(
        "## On a CPU, next to other engines\n\nCPU, 2 cores (avx2), 8.0 GiB, Linux, Python 3.11; 2030-01-02; "
    )
    assert "Median of 3 interleaved rounds" in text
    assert "This run lacks" not in text
    assert "This run lacks 3 rounds of vllm." in markdown(results, "3 rounds of vllm")
    assert text.endswith("Versions: openvino 2026.4, torch 2.13")
    assert "Limits" not in text
    limits = DeviceLimits(flops_16bit_per_s=500e9, flops_32bit_per_s=200e9, bytes_per_s=40e9)
    assert "3 min. Limits, the most that was measured: 500 GFLOP/s in products of 16 bits" in markdown(
        msgspec.structs.replace(results, limits=limits)
    )


def test_results_come_back_from_their_json(results: Results, tmp_path: Path) -> None:
    results.write(tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_section_is_added_once_and_then_replaced_in_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nbefore\n")
    write_section(page, "bench-cpu", "## One\n")
    page.write_text(page.read_text() + "\n## After\n")
    write_section(page, "bench-cpu", "## Two\n\nrow\n")
    text = page.read_text()
    assert text.startswith("# Page\n\nbefore\n\n<!-- bench-cpu: begin")
    assert text.endswith("-->\n## Two\n\nrow\n<!-- bench-cpu: end -->\n\n## After\n")
    assert with_section(text, "bench-cpu", "## Two\n\nrow") == text


def test_half_a_section_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match='one mark of "bench-cpu" without the other'):
        with_section("text\n<!-- bench-cpu: end -->\n", "bench-cpu", "new")


def test_the_machine_is_described_by_itself() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 30
    assert f"{machine.cores} cores" in machine.line


def test_the_arithmetic_of_a_prompt_is_that_of_its_layers_and_one_output_row() -> None:
    layer = 576 * 576 * 2 + 2 * 192 * 576 + 3 * 576 * 1536
    assert linear_flops("135m", 2048) == 2 * (30 * layer * 2048 + 49152 * 576)
