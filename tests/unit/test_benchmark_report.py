"""The benchmark's tables, and the section of a page that they are written into."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tools.benchmarks.goals import linear_flops
from tools.benchmarks.machine import Machine, this_machine
from tools.benchmarks.page import with_section, write_section
from tools.benchmarks.report import (
    behind,
    failures,
    goals_table,
    markdown,
    rates_table,
    ratios_table,
    slower,
)
from tools.benchmarks.results import Cell, Failure, Goal, Results, Spread

MACHINE = Machine("CPU", ("avx2",), 2, 8 << 30, "Linux", "3.11")


@pytest.fixture
def results() -> Results:
    return Results(
        machine=MACHINE,
        date="2030-01-02",
        command="python -m tools.benchmarks bench-cpu",
        minutes=3.2,
        cells=(
            Cell("135m", "ours", 1, (84.0, 90.0, 87.0)),
            Cell("135m", "openvino", 1, (58.0, 60.0, 59.0)),
            Cell("135m", "ours", 8, (390.0, 410.0, 400.0)),
            Cell("135m", "openvino", 8, (330.0, 310.0, 320.0)),
        ),
        failures=(Failure("135m", "llamacpp-q4", "RuntimeError: illegal instruction"),),
        goals=(Goal("135m", "prefix", Spread(0.04, 0.03, 0.2), 0.1, at_most=True),),
        versions={"ours": {"torch": "2.13"}, "openvino": {"openvino": "2026.4"}},
    )


def test_a_cell_says_the_median_of_its_rounds_and_their_spread(results: Results) -> None:
    assert rates_table(results, "135m", [1, 8]).splitlines() == [
        "| generated tok/s | weights | c=1 | c=8 |",
        "| --- | --- | --- | --- |",
        "| EricLLM Console, in process | bf16 | 87.0 (84.0 to 90.0) | 400 (390 to 410) |",
        "| OpenVINO GenAI | bf16 | 59.0 (58.0 to 60.0) | 320 (310 to 330) |",
        "| llama.cpp | Q4_0 | failed | failed |",
    ]


def test_ratios_are_of_medians_and_stand_beside_their_goal(results: Results) -> None:
    assert "| ours bf16 / OpenVINO bf16 | 1.47 (1.40) | 1.25 (1.40) |" in ratios_table(results, "135m", [1, 8])
    assert "HTTP" not in ratios_table(results, "135m", [1, 8])


def test_a_missed_goal_is_named_with_its_number(results: Results) -> None:
    assert behind(results) == (
        "Goals that are missed ([why, and what is being done](#where-it-loses-and-what-is-being-done)):\n\n"
        "* 135m, c=8: ours bf16 / OpenVINO bf16 is 1.25; the goal is 1.40."
    )
    kept = msgspec.structs.replace(results, cells=results.cells[:2])
    assert behind(kept) == ""


def test_an_engine_is_said_to_be_faster_beyond_a_tie_of_ours_with_as_many_bits(results: Results) -> None:
    assert slower(results).startswith("No other engine is faster")
    more = Cell("135m", "llamacpp-q4", 1, (95.0,)), Cell("135m", "llamacpp-q8", 8, (480.0,))
    with_more = msgspec.structs.replace(results, cells=(*results.cells, *more))
    assert slower(with_more).splitlines()[2:] == ["* 135m, c=8: llama.cpp, Q8_0, 1.20 times ours."]
    quantised = msgspec.structs.replace(with_more, cells=(*with_more.cells, Cell("135m", "ours-int4", 8, (500.0,))))
    assert "Q8_0, 1.20" in slower(quantised)
    assert slower(msgspec.structs.replace(results, cells=results.cells[:1])) == ""


def test_a_section_has_its_own_rows_of_a_run(results: Results) -> None:
    ours = results.of({"ours"})
    assert {cell.row for cell in ours.cells} == {"ours"}
    assert not ours.failures
    assert list(ours.versions) == ["ours"]
    assert ours.goals == results.goals


def test_an_engine_that_failed_is_quoted(results: Results) -> None:
    assert failures(results) == "Not measured:\n\n* 135m, llama.cpp, Q4_0: RuntimeError: illegal instruction"


def test_a_goal_is_met_by_its_median(results: Results) -> None:
    assert goals_table(results.goals).splitlines()[-1] == "| prefix | 4% (3% to 20%) | max 10% |"
    assert results.goals[0].is_met
    assert not msgspec.structs.replace(results.goals[0], at_most=False).is_met


def test_a_report_says_what_ran_where_and_how(results: Results) -> None:
    text = markdown(results, "Peers")
    assert text.startswith("## Peers\n\nCPU, 2 cores (avx2), 8.0 GiB, Linux, Python 3.11; 2030-01-02; ")
    assert "Median of 3 interleaved rounds" in text
    assert text.endswith("Versions: openvino 2026.4, torch 2.13")


def test_results_come_back_from_their_json(results: Results, tmp_path: Path) -> None:
    results.write(tmp_path / "results.json")
    assert msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=Results) == results


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
