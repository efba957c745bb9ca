"""The frame of the GPU checks: rows, table, JSON, the runner's budgets. None of it needs a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.gpu import report, toolchain
from tests.gpu.compare import compare
from tests.gpu.place import Place
from tests.gpu.report import Machine, Report, Row
from tests.gpu.runner import Part, chosen, run_parts
from tests.gpu.toolchain import build_environment

_LIMIT_S = 100.0
_HANGS_S = 2.0

_WELL = "return [Row(name='one', verdict='passed'), Row(name='two', verdict='measured', value=2.5, unit='tok/s')]"
_RAISES = "yield Row(name='before', verdict='passed')\n    raise RuntimeError('it broke\\nin two lines')"
_DIES = "yield Row(name='before', verdict='passed')\n    print('the driver is gone', flush=True)\n    os._exit(7)"
_HANGS = "yield Row(name='before', verdict='passed')\n    print('waiting', flush=True)\n    threading.Event().wait()"


@pytest.fixture
def make_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A part whose `checks` has the body given, in a module that only the part's process imports."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(report.__file__).parents[2]}")

    def make(name: str, body: str, *, budget_s: float = _LIMIT_S, correctness: bool = True) -> Part:
        lines = f"import os, threading\nfrom tests.gpu.report import Row\n\ndef checks(place):\n    {body}\n"
        (tmp_path / f"gpu_part_{name}.py").write_text(lines)
        return Part(name, f"the part {name}", f"gpu_part_{name}", budget_s, correctness)

    return make


def _report(*rows: Row) -> Report:
    machine = Machine(card="NVIDIA Test 9000", torch="2.11.0", commit="0123456789abcdef")
    return Report(machine=machine, at="2031-01-02 03:04:05", quick=False, rows=rows, seconds={"speed": 12.0})


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    before = _report(Row(part="speed", name="8 requests", verdict="missed", value=0.9, unit="x", goal=">= 0.97"))
    file = report.write(before, tmp_path / "new")
    assert file.name == "NVIDIA-Test-9000-2031-01-02-030405.json"
    assert report.read(file) == before


def test_another_files_contents_are_no_report(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"rows": 3}')
    with pytest.raises(msgspec.ValidationError):
        report.read(tmp_path / "other.json")


def test_the_table_has_a_line_for_every_row_and_counts_the_verdicts() -> None:
    shown = report.table(
        _report(
            Row(
                part="speed",
                name="8 requests",
                verdict="missed",
                value=0.9,
                unit="x",
                goal=">= 0.97",
                detail="of three",
            ),
            Row(part="life", name="unload", verdict="failed", detail="70 MiB stayed"),
        )
    )
    assert "NVIDIA Test 9000" in shown
    assert "speed (12 s)" in shown
    (missed,) = [line for line in shown.splitlines() if "8 requests" in line]
    assert all(said in missed for said in ("below goal", "0.9 x", "(>= 0.97)", "of three"))
    assert shown.endswith("1 failed, 1 missed")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row(part="life", name="a", verdict="passed"), 0),
        (Row(part="life", name="a", verdict="skipped"), 0),
        (Row(part="speed", name="a", verdict="missed"), 0),
        (Row(part="speed", name="a", verdict="error"), 0),
        (Row(part="speed", name="a", verdict="failed"), 1),
        (Row(part="life", name="a", verdict="failed"), 1),
        (Row(part="life", name="a", verdict="error"), 1),
    ],
)
def test_the_exit_code_is_1_where_correctness_was_not_shown(row: Row, code: int) -> None:
    assert report.exit_code([row], ["life"]) == code


def test_a_check_that_raises_is_one_error_row_after_the_rows_it_gave() -> None:
    def check():  # type: ignore[no-untyped-def]
        yield report.promise("first", True)
        raise ValueError("no\nsuch thing")

    first, second = report.attempt("the check", check)
    assert first.verdict == "passed"
    assert (second.name, second.verdict, second.detail) == ("the check", "error", "ValueError: no such thing")


def test_a_speed_below_its_goal_is_missed_not_failed() -> None:
    assert report.at_least("ratio", 0.969, 0.97, "x").verdict == "missed"
    assert report.at_least("ratio", 0.97, 0.97, "x").verdict == "passed"


def test_parts_that_break_are_rows_and_the_others_go_on(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    parts = [make_part("raises", _RAISES), make_part("dies", _DIES), make_part("well", _WELL)]
    rows, seconds = run_parts(parts, Place(tmp_path / "run"), total_s=3 * _LIMIT_S)
    assert [(row.part, row.name, row.verdict) for row in rows] == [
        ("raises", "before", "passed"),
        ("raises", "gpu_part_raises", "error"),
        ("dies", "before", "passed"),
        ("dies", "the part dies", "error"),
        ("well", "one", "passed"),
        ("well", "two", "measured"),
    ]
    assert rows[1].detail == "RuntimeError: it broke in two lines"
    assert rows[3].detail == "ended with 7: the driver is gone"
    assert list(seconds) == ["raises", "dies", "well"]


def test_a_part_that_hangs_is_stopped_and_keeps_its_rows(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows, _ = run_parts([make_part("hangs", _HANGS, budget_s=_HANGS_S)], Place(tmp_path / "run"), total_s=_LIMIT_S)
    assert rows[-1].verdict == "error"
    assert rows[-1].detail.startswith("not done after 2 s")


def test_no_part_starts_when_the_whole_time_is_used_up(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    now = iter([0.0, 50.0])
    rows, seconds = run_parts([make_part("late", _WELL)], Place(tmp_path), total_s=40.0, clock=lambda: next(now))
    assert [(row.verdict, row.detail) for row in rows] == [("error", "the run's 40 s were used up")]
    assert seconds == {}


def test_rounds_are_begun_only_where_there_is_time_for_them(tmp_path: Path) -> None:
    def counted(end_s: float) -> list[bool]:
        now = iter(range(0, 100, 10))  # each round takes 10 s
        return list(Place(tmp_path, end_s=end_s).rounds(lambda: next(now)))

    assert counted(1000.0) == [False, True, True, True]
    assert counted(36.0) == [False, True, True]
    assert counted(1.0) == [False, True]


def test_an_unknown_part_is_named_with_the_ones_there_are(make_part) -> None:  # type: ignore[no-untyped-def]
    parts = [make_part("a", _WELL), make_part("b", _WELL)]
    assert [part.name for part in chosen(parts, "b, a")] == ["b", "a"]
    assert chosen(parts, "") == parts
    with pytest.raises(ValueError, match="there is no part 'c'; the parts are a, b"):
        chosen(parts, "a,c")


def test_a_comparison_shows_changes_and_what_is_in_one_alone() -> None:
    before = _report(
        Row(part="speed", name="8 requests", verdict="passed", value=100.0, unit="tok/s"),
        Row(part="life", name="unload", verdict="passed"),
    )
    after = _report(
        Row(part="speed", name="8 requests", verdict="missed", value=90.0, unit="tok/s"),
        Row(part="life", name="cancel", verdict="failed"),
    )
    shown = compare(before, after)
    assert "100 tok/s -> 90 tok/s  -10.0 %  [passed -> missed]" in shown
    assert "only before: passed" in shown
    assert "only after: failed" in shown


def test_a_build_finds_an_nvcc_that_nothing_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_CUDA_HOMES", ())
    home = tmp_path / "site" / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    assert build_environment({"PATH": ""}, [tmp_path / "site"]) == {}
    (home / "bin" / "nvcc").touch(mode=0o755)
    assert build_environment({"PATH": ""}, [tmp_path / "site"]) == {"CUDA_HOME": str(home)}


def test_a_build_keeps_what_the_environment_leads_to(tmp_path: Path) -> None:
    home = tmp_path / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(mode=0o755)
    assert build_environment({"PATH": "", "CUDA_HOME": "/kept"}, [tmp_path]) == {}
    assert build_environment({"PATH": str(home / "bin")}, [tmp_path]) == {}
