"""What `python -m tools.benchmarks` takes, and when it writes the docs: a complete run, or one that is asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tools.benchmarks import __main__ as command
from tools.benchmarks.arguments import Asked, asked
from tools.benchmarks.complete import CLIENTS, SHAPES, lacking
from tools.benchmarks.driver import all_turns
from tools.benchmarks.engines import ROWS, chosen
from tools.benchmarks.machine import Machine
from tools.benchmarks.results import Cell, Failure, Goal, Results, Spread

BEFORE = "# Page\n\nbefore\n"
MACHINE = Machine("CPU", ("avx2",), 2, 8 << 30, "Linux", "3.11")

Measure = Callable[[Results], Path]


def run_of(*, rounds: int = 3, goals_only: bool = False, shapes: tuple[str, ...] = SHAPES) -> Results:
    rows = chosen(None, goals_only=goals_only, flags=MACHINE.flags)
    return Results(
        machine=MACHINE,
        date="2030-01-02",
        command="python -m tools.benchmarks bench-peers",
        minutes=40.0,
        cells=tuple(
            Cell(shape, row.key, count, (50.0,) * rounds)
            for shape in shapes
            for row in rows
            for count in row.runs_with(CLIENTS)
        ),
        goals=tuple(Goal(shape, "prefix", Spread(0.04, 0.03, 0.2), 0.1, at_most=True) for shape in shapes),
    )


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Lets a run come to these results; returns the page that they may be written into."""

    def measure(results: Results) -> Path:
        page = tmp_path / "performance.md"
        page.write_text(BEFORE)

        def measured(given: Asked, machine: Machine, arguments: list[str]) -> Results:
            return results

        monkeypatch.setattr(command, "PAGE", page)
        monkeypatch.setattr(command, "_measured", measured)
        return page

    return measure


def written(page: Path) -> set[str]:
    assert page.read_text().startswith(BEFORE.rstrip())
    return {file.stem for file in page.parent.glob("bench-*.json")}


def test_a_complete_run_of_all_rows_writes_both_sections_and_their_results(measure: Measure) -> None:
    whole = run_of()
    page = measure(whole)
    assert command.main(["bench-peers"]) == 0
    assert written(page) == {"bench-cpu", "bench-peers"}
    text = page.read_text()
    assert text.count("| EricLLM Console, in process | bf16 |") == len(SHAPES)
    assert text.count("| CTranslate2, in batches | int8 |") == len(SHAPES)
    assert text.count("Goals that are missed") == text.count("| ratio of medians (goal) |") / len(SHAPES) == 1
    assert msgspec.json.decode((page.parent / "bench-peers.json").read_bytes(), type=Results) == whole


def test_a_complete_run_of_the_goals_rows_leaves_what_was_said_of_the_others(measure: Measure) -> None:
    page = measure(run_of(goals_only=True))
    assert command.main(["bench-cpu"]) == 0
    assert written(page) == {"bench-cpu"}


@pytest.mark.parametrize(
    ("results", "lacks"),
    [
        (run_of(rounds=2), "3 rounds of ours of 135m with c=1 and "),
        (run_of(shapes=("135m",)), "3 rounds of ours of 0.5b with c=1 and "),
        (msgspec.structs.replace(run_of(), goals=()), "prefill, prefix and load of 135m, "),
        (run_of().of({row.key for row in ROWS} - {"ours-http"}), "3 rounds of ours-http of 135m with c=32 and 1 more"),
    ],
    ids=["two rounds", "one shape", "no other goals", "a row less"],
)
def test_an_incomplete_run_is_printed_and_leaves_the_docs_as_they_are(
    measure: Measure, capsys: pytest.CaptureFixture[str], results: Results, lacks: str
) -> None:
    page = measure(results)
    assert command.main(["bench-peers"]) == 0
    assert (page.read_text(), written(page)) == (BEFORE, set())
    said = capsys.readouterr()
    assert "| EricLLM Console, in process | bf16 |" in said.out
    assert f"performance.md keeps its bench-peers: this run lacks {lacks}" in said.err


def test_a_complete_run_is_not_written_where_that_is_asked_for(measure: Measure) -> None:
    page = measure(run_of())
    assert command.main(["bench-peers", "--no-write"]) == 0
    assert (page.read_text(), written(page)) == (BEFORE, set())


def test_an_incomplete_run_is_written_when_it_is_asked_to(measure: Measure) -> None:
    page = measure(run_of(rounds=1, shapes=("135m",)))
    assert command.main(["bench-peers", "--quick"]) == 0
    assert (page.read_text(), written(page)) == (BEFORE, set())
    assert command.main(["bench-peers", "--quick", "--write"]) == 0
    assert written(page) == {"bench-cpu", "bench-peers"}


def test_a_row_that_failed_leaves_the_docs_as_they_are(measure: Measure) -> None:
    whole = run_of()
    cells = tuple(cell for cell in whole.cells if cell.row != "openvino")
    failed = tuple(Failure(shape, "openvino", "no network") for shape in SHAPES)
    page = measure(msgspec.structs.replace(whole, cells=cells, failures=failed))
    assert command.main(["bench-cpu"]) == 0
    assert (page.read_text(), written(page)) == (BEFORE, set())


@pytest.mark.parametrize("more", [[], ["--write"]])
def test_a_run_without_results_is_never_written(
    measure: Measure, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    failed = tuple(Failure("135m", row.key, "no such instruction") for row in ROWS)
    page = measure(msgspec.structs.replace(run_of(), cells=(), goals=(), failures=failed))
    assert command.main(["bench-peers", *more]) == 1
    assert (page.read_text(), written(page)) == (BEFORE, set())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "nothing was measured, and nothing is written: no such instruction\n")


def test_half_a_section_in_the_page_is_told_in_a_sentence(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    page = measure(run_of())
    page.write_text("<!-- bench-cpu: end -->\n")
    assert command.main(["bench-cpu"]) == 1
    assert 'the docs are not written: the page has one mark of "bench-cpu" without the other' in capsys.readouterr().err


def test_results_that_were_kept_are_published_without_measuring(measure: Measure, tmp_path: Path) -> None:
    page = measure(msgspec.structs.replace(run_of(), cells=()))
    run_of(shapes=("135m",)).write(tmp_path / "runs" / "kept.json")
    assert command.main(["bench-peers", "--from", str(tmp_path / "runs" / "kept.json"), "--write"]) == 0
    assert written(page) == {"bench-cpu", "bench-peers"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "nope"], "argument --shapes: invalid choice: 'nope' (choose from "),
        (["--rounds", "0"], "argument --rounds: '0' is no whole number from 1 on"),
        (["--rounds", "many"], "argument --rounds: 'many' is no whole number from 1 on"),
        (["--clients", "8", "-1"], "argument --clients: "),
        (["--only", "vllm"], "there is no vllm; there are ours, "),
        (["--only", "openvino-int8"], "bench-cpu has no openvino-int8; bench-peers has"),
        (["--only", "ours-http", "--clients", "8"], "ours-http is not measured with 8 clients"),
        (["--from", "/nowhere/kept.json"], "/nowhere/kept.json cannot be read: No such file or directory"),
        (["--from", __file__], "holds no results: "),
        (["--cache", __file__], "--cache is no folder: "),
        (["--from", "kept.json", "--quick"], "--from measures nothing: "),
    ],
)
def test_what_makes_no_sense_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["bench-cpu", *arguments])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m tools.benchmarks: error: ")
    assert said in last


def test_what_a_complete_run_has_is_what_is_measured_by_default() -> None:
    given = asked(["bench-peers"], MACHINE.flags)
    rounds = dict.fromkeys(all_turns(given.plan), given.plan.rounds)
    assert lacking(rounds, given.plan.shapes, given.plan.rows) == ""
    assert lacking(rounds, ["135m"], given.plan.rows) == "prefill, prefix and load of 0.5b"


def test_a_quick_run_is_one_round_of_the_first_shape_unless_told() -> None:
    plan = asked(["bench-peers", "--quick"], MACHINE.flags).plan
    assert (plan.shapes, plan.clients, plan.rounds) == (("135m",), (1, 8), 1)
    plan = asked(["bench-peers", "--quick", "--rounds", "2", "--clients", "32", "32"], MACHINE.flags).plan
    assert (plan.shapes, plan.clients, plan.rounds) == (("135m",), (32,), 2)
