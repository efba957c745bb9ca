"""A run of the benchmark: what it measures, what a complete one has, and what the docs take."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.snapshot import DeviceLimits
from tools.benchmarks import __main__ as command
from tools.benchmarks.__main__ import Asked, asked
from tools.benchmarks.driver import Driver
from tools.benchmarks.engine_process import EngineFailed
from tools.benchmarks.engines import ROWS
from tools.benchmarks.machine import Machine, this_machine
from tools.benchmarks.places import Places
from tools.benchmarks.protocol import About, Done, Load, Work
from tools.benchmarks.publish import CLIENTS, SHAPES, lacking
from tools.benchmarks.results import Cell, Failure, Goal, Latency, Results, Round, Spread, read_results

BEFORE = "# Page\n\nbefore\n"
MACHINE = Machine("CPU", ("avx2",), 2, 8 << 30, "Linux", "3.11")

Measure = Callable[[Results], Path]


def run_of(*, rounds: int = 3, shapes: tuple[str, ...] = SHAPES) -> Results:
    return Results(
        machine=MACHINE,
        date="2030-01-02",
        commands=("python -m tools.benchmarks",),
        minutes=40.0,
        cells=tuple(
            Cell(shape, row.key, count, 128, (Round(50.0, Latency(0.1, 0.2, 0.01, 0.02)),) * rounds)
            for shape in shapes
            for row in ROWS
            for count in CLIENTS
            if row.runs_with(count)
        ),
        goals=tuple(Goal(shape, "prefix", Spread(0.04, 0.03, 0.2), 0.1, at_most=True) for shape in shapes),
    )


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Lets a run come to these results; returns the page that they may be written into."""

    def measure(results: Results) -> Path:
        page = tmp_path / "performance.md"
        page.write_text(BEFORE)

        def measured(given: Asked, arguments: list[str]) -> Results:
            return results

        monkeypatch.setattr(command, "PAGE", page)
        monkeypatch.setattr(command, "_measured", measured)
        return page

    return measure


def is_written(page: Path) -> bool:
    assert page.read_text().startswith(BEFORE.rstrip())
    return page.with_name("bench-peers.json").exists()


def test_a_complete_run_writes_its_section_and_its_results(measure: Measure) -> None:
    whole = run_of()
    page = measure(whole)
    assert command.main([]) == 0
    assert is_written(page)
    text = page.read_text()
    assert text.count("| EricLLM Console, in process | bf16 |") == 2 * len(SHAPES)
    assert text.count("| CTranslate2, in batches | int8 |") == 2 * len(SHAPES)
    assert "This run lacks" not in text
    assert read_results(page.with_name("bench-peers.json")) == whole


@pytest.mark.parametrize(
    ("results", "lacks"),
    [
        (run_of(rounds=2), "3 rounds of ours of 135m with c=1 and "),
        (run_of(shapes=("135m",)), "3 rounds of ours of 0.5b with c=1 and "),
        (msgspec.structs.replace(run_of(), goals=()), "prefill, prefix and load of 135m, "),
        (run_of().of({row.key for row in ROWS} - {"ours-http"}), "3 rounds of ours-http of 135m with c=1 and 5 more"),
    ],
    ids=["two rounds", "one shape", "no other goals", "a row less"],
)
def test_an_incomplete_run_is_printed_and_leaves_the_docs_as_they_are(
    measure: Measure, capsys: pytest.CaptureFixture[str], results: Results, lacks: str
) -> None:
    page = measure(results)
    assert command.main([]) == 0
    assert (page.read_text(), is_written(page)) == (BEFORE, False)
    said = capsys.readouterr()
    assert "| EricLLM Console, in process | bf16 |" in said.out
    assert f"performance.md keeps its bench-peers: this run lacks {lacks}" in said.err


def test_an_incomplete_run_that_is_written_says_what_it_lacks(measure: Measure) -> None:
    page = measure(run_of(rounds=1, shapes=("135m",)))
    assert command.main(["--quick", "--write"]) == 0
    assert is_written(page)
    assert "This run lacks 3 rounds of ours of 135m with c=1 and " in page.read_text()


def test_a_complete_run_is_not_written_where_that_is_asked_for(measure: Measure) -> None:
    page = measure(run_of())
    assert command.main(["--no-write"]) == 0
    assert (page.read_text(), is_written(page)) == (BEFORE, False)


def test_a_row_that_says_why_it_cannot_run_lacks_nothing() -> None:
    whole = run_of()
    refused = tuple(Failure(shape, "mistralrs", "no such instruction") for shape in SHAPES)
    without = whole.of({row.key for row in ROWS} - {"mistralrs"})
    assert lacking(without).startswith("3 rounds of mistralrs of 135m with c=1")
    assert lacking(msgspec.structs.replace(without, failures=refused)) == ""


@pytest.mark.parametrize("more", [[], ["--write"]])
def test_a_run_without_results_is_never_written(
    measure: Measure, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    failed = tuple(Failure("135m", row.key, "no such instruction") for row in ROWS)
    page = measure(msgspec.structs.replace(run_of(), cells=(), goals=(), failures=failed))
    assert command.main(more) == 1
    assert (page.read_text(), is_written(page)) == (BEFORE, False)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "nothing was measured, and nothing is written: no such instruction\n")


def test_half_a_section_in_the_page_is_told_in_a_sentence(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    page = measure(run_of())
    page.write_text("<!-- bench-peers: end -->\n")
    assert command.main([]) == 1
    said = capsys.readouterr().err
    assert 'the docs are not written: the page has one mark of "bench-peers" without the other' in said


def test_saved_results_are_published_without_measuring(measure: Measure, tmp_path: Path) -> None:
    page = measure(msgspec.structs.replace(run_of(), cells=()))
    run_of(shapes=("135m",)).write(tmp_path / "runs" / "saved.json")
    assert command.main(["--from", str(tmp_path / "runs" / "saved.json"), "--write"]) == 0
    assert is_written(page)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "nope"], "argument --shapes: invalid choice: 'nope' (choose from "),
        (["--rounds", "0"], "argument --rounds: '0' is no whole number from 1 on"),
        (["--minutes", "many"], "argument --minutes: 'many' is no whole number from 1 on"),
        (["--clients", "8", "-1"], "argument --clients: "),
        (["--prompt", "none"], "argument --prompt: 'none' is no whole number from 1 on"),
        (["--only", "sglang"], "there is no sglang; there are ours, "),
        (["--only", "ik-q4", "--clients", "8"], "ik-q4 is not measured with 8 clients"),
        (["--from", "/nowhere/saved.json"], "/nowhere/saved.json cannot be read: No such file or directory"),
        (["--resume", "/nowhere/saved.json"], "/nowhere/saved.json cannot be read: No such file or directory"),
        (["--from", __file__], "holds no results: "),
        (["--cache", __file__], "--cache is no folder: "),
        (["--from", "saved.json", "--quick"], "--from measures nothing: "),
    ],
)
def test_what_makes_no_sense_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m tools.benchmarks: error: ")
    assert said in last


def test_the_run_of_another_machine_is_not_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_of().write(tmp_path / "saved.json")
    with pytest.raises(SystemExit):
        asked(["--resume", str(tmp_path / "saved.json")])
    assert "saved.json is of another machine: CPU, 2 cores" in capsys.readouterr().err


def test_a_quick_run_is_one_round_of_the_first_shape_unless_told() -> None:
    plan = asked(["--quick"]).plan
    assert (plan.shapes, plan.clients, plan.rounds, plan.prompts) == (("135m",), (1, 8), 1, (128,))
    plan = asked(["--quick", "--rounds", "2", "--clients", "32", "32", "--prompt", "1024", "--minutes", "3"]).plan
    assert (plan.shapes, plan.clients, plan.rounds, plan.prompts) == (("135m",), (32,), 2, (1024,))
    assert plan.seconds == 180.0


class FakeEngine:
    """Answers each work in no time; the row "vllm" cannot start."""

    about = About("bf16", {"package": "1"})
    works: list[Work | Load]

    def __init__(self, row: str) -> None:
        if row == "vllm":
            raise OSError("no such program")
        self.works = []

    def do(self, work: Work | Load) -> Done:
        assert isinstance(work, Work)
        self.works.append(work)
        return Done(len(work.prompts) * work.output_tokens, 2.0, (0.1,) * work.clients, (0.01,) * work.clients)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows that were started, instead of engines."""
    started: list[str] = []

    def start(places: Places, shape: str, row: object, clients: int, tokens: int) -> FakeEngine:
        started.append(getattr(row, "key", ""))
        return FakeEngine(started[-1])

    monkeypatch.setattr("tools.benchmarks.driver.start", start)
    monkeypatch.setattr(Driver, "prepare", lambda _: None)
    limits = DeviceLimits(flops_16bit_per_s=1e12, flops_32bit_per_s=1e12, bytes_per_s=1e10)
    monkeypatch.setattr(command, "measured_limits", lambda: limits)
    return started


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, engines: list[str]) -> list[DeviceLimits | BaseException]:
    """What looks at the machine's limits find or raise, the next one first."""
    to_come: list[DeviceLimits | BaseException] = []

    def look() -> DeviceLimits:
        found = to_come.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(command, "measured_limits", look)
    return to_come


def saved(cache: Path) -> Path:
    (file,) = (cache / "runs").iterdir()
    return file


def run(cache: Path, *arguments: str) -> int:
    return run_with_goals(cache, "--no-goals", *arguments)


def run_with_goals(cache: Path, *arguments: str) -> int:
    return command.main(["--no-write", "--shapes", "135m", "--cache", str(cache), *arguments])


def test_a_run_goes_on_where_it_stopped(engines: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "ours", "openvino", "--clients", "1", "--rounds", "1") == 0
    first = read_results(saved(tmp_path))
    assert {cell.place.row: len(cell.rounds) for cell in first.cells} == {"ours": 1, "openvino": 1}
    engines.clear()
    only = ("--only", "ours", "continuous", "--clients", "1", "--rounds", "2")
    assert run(tmp_path, *only, "--resume", str(saved(tmp_path))) == 0
    whole = read_results(saved(tmp_path))
    assert {cell.place.row: len(cell.rounds) for cell in whole.cells} == {"ours": 2, "openvino": 1, "continuous": 2}
    assert sorted(engines) == ["continuous", "ours"]
    assert len(whole.commands) == 2
    assert whole.machine == this_machine()


def test_limits_of_a_machine_are_the_most_that_was_measured_and_unknown_where_none_was(
    looks: list[DeviceLimits | BaseException], tmp_path: Path
) -> None:
    only = ("--only", "ours", "--clients", "1")
    looks += [DeviceLimits(flops_16bit_per_s=2e12, bytes_per_s=1e10), DeviceLimits(bytes_per_s=2e10)]
    assert run(tmp_path, *only, "--rounds", "1") == 0
    assert read_results(saved(tmp_path)).limits == DeviceLimits(flops_16bit_per_s=2e12, bytes_per_s=2e10)
    looks += [DeviceLimits(bytes_per_s=1e10), DeviceLimits(flops_16bit_per_s=1e12, bytes_per_s=3e10)]
    assert run(tmp_path, *only, "--rounds", "2", "--resume", str(saved(tmp_path))) == 0
    assert read_results(saved(tmp_path)).limits == DeviceLimits(flops_16bit_per_s=2e12, bytes_per_s=3e10)
    assert not looks


@pytest.mark.parametrize(
    "error",
    [subprocess.CalledProcessError(-9, ["measure"]), OSError("Cannot allocate memory")],
    ids=["killed", "not started"],
)
def test_a_run_keeps_the_limits_that_it_has_where_its_last_look_at_them_fails(
    looks: list[DeviceLimits | BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    looks += [DeviceLimits(bytes_per_s=1e10), error]
    assert run(tmp_path, "--only", "ours", "--clients", "1", "--rounds", "1") == 0
    said = capsys.readouterr()
    assert "| EricLLM Console, in process | bf16 |" in said.out
    assert said.err.endswith(
        f"the limits of the machine stay as they were measured before, as they cannot be measured now: {error}\n"
    )
    assert read_results(saved(tmp_path)).limits == DeviceLimits(bytes_per_s=1e10)


def test_a_run_without_limits_does_not_begin(
    engines: list[str], looks: list[DeviceLimits | BaseException], tmp_path: Path
) -> None:
    looks.append(subprocess.CalledProcessError(-9, ["measure"]))
    with pytest.raises(SystemExit, match="the limits of the machine cannot be measured: "):
        run(tmp_path, "--only", "ours", "--clients", "1", "--rounds", "1")
    assert not engines


@pytest.mark.parametrize("is_met", [True, False])
def test_goals_or_why_they_were_not_measured_are_saved_before_the_last_look_at_the_limits(
    looks: list[DeviceLimits | BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_met: bool
) -> None:
    goal = Goal("135m", "prefix", Spread(0.04, 0.03, 0.2), 0.1, at_most=True)

    def measured(shape: str, places: Places, rounds: int) -> list[Goal]:
        if not is_met:
            raise EngineFailed("out of memory")
        return [goal]

    monkeypatch.setattr("tools.benchmarks.goals.measured", measured)
    looks += [DeviceLimits(bytes_per_s=1e10), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run_with_goals(tmp_path, "--only", "ours", "--clients", "1", "--rounds", "1")
    found = read_results(saved(tmp_path))
    assert (found.goals, found.failures) == (
        ((goal,), ()) if is_met else ((), (Failure("135m", "ours", "out of memory"),))
    )


def test_a_peer_that_fails_is_quoted_and_leaves_the_others_running(engines: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "ours", "vllm", "--clients", "1", "8", "--rounds", "2") == 0
    found = read_results(saved(tmp_path))
    assert {cell.place.row: len(cell.rounds) for cell in found.cells} == {"ours": 2}
    assert found.failures == (Failure("135m", "vllm", "no such program"),)
    assert engines.count("vllm") == 1


def test_no_turn_begins_that_would_not_end_in_time(
    engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tools.benchmarks.driver.time.monotonic", lambda: clock[0])
    pause = FakeEngine.pause

    def slow(self: FakeEngine) -> None:
        clock[0] += 25.0
        pause(self)

    monkeypatch.setattr(FakeEngine, "pause", slow)
    assert run(tmp_path, "--only", "ours", "--clients", "1", "--rounds", "9", "--minutes", "1") == 0
    found = read_results(saved(tmp_path))
    assert [len(cell.rounds) for cell in found.cells] == [2]
    assert "the time is up" in capsys.readouterr().err
