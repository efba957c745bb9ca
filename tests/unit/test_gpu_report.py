"""The frame of the GPU checks: rows, table, JSON, the runner's budgets. None of it needs a GPU."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator
from dataclasses import replace
from importlib import metadata
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch

from tests.fakes.tiny_models import make_tiny_model
from tests.gpu import __main__ as run
from tests.gpu import machine, report
from tests.gpu.compare import compare
from tests.gpu.load import as_they_come
from tests.gpu.machine import build_environment, digest
from tests.gpu.place import Place
from tests.gpu.report import Machine, Report, Row
from tests.gpu.runner import Group, Part, chosen, run_parts

pytestmark = pytest.mark.long

_LIMIT_S = 100.0

_WELL = "return [Row(name='one', verdict='passed'), Row(name='two', verdict='measured', value=2.5, unit='tok/s')]"
_RAISES = "yield Row(name='before', verdict='passed')\n    raise RuntimeError('it broke\\nin two lines')"
_DIES = "yield Row(name='before', verdict='passed')\n    print('the driver is gone', flush=True)\n    os._exit(7)"
_HANGS = "print('waiting', flush=True)\n    yield Row(name='before', verdict='passed')\n    threading.Event().wait()"


@pytest.fixture
def make_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A part whose `checks` has the body given, in a module that only the part's process imports."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(report.__file__).parents[2]}")

    def make(name: str, body: str, *, budget_s: float = _LIMIT_S) -> Part:
        imports = "import os, threading\nfrom pathlib import Path\nfrom tests.gpu.report import Row\n"
        lines = f"{imports}\ndef checks(place):\n    {body}\n"
        (tmp_path / f"gpu_part_{name}.py").write_text(lines)
        return Part(name, f"the part {name}", f"gpu_part_{name}", budget_s)

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


_MISSED = Row(part="speed", name="8 requests", verdict="missed", value=0.9, unit="x", goal=">= 0.97", detail="of three")


def test_the_table_has_a_line_for_every_row() -> None:
    missed, failed = report.table([_MISSED, Row(part="life", name="unload", verdict="failed")]).splitlines()
    assert all(said in missed for said in ("8 requests", "below goal", "0.9 x", "(>= 0.97)", "of three"))
    assert failed.split() == ["unload", "FAILED"]


def test_the_summary_names_the_machine_and_what_needs_a_look_and_counts_the_verdicts() -> None:
    well = Row(part="life", name="load", verdict="passed")
    shown = report.summary(_report(well, _MISSED, Row(part="life", name="unload", verdict="failed")))
    assert "NVIDIA Test 9000" in shown
    assert "speed: 8 requests" in shown and "life: unload" in shown
    assert "life: load" not in shown
    assert shown.endswith("1 passed, 1 failed, 1 missed")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row(part="life", name="a", verdict="passed"), 0),
        (Row(part="life", name="a", verdict="skipped"), 0),
        (Row(part="speed", name="a", verdict="missed"), 0),
        (Row(part="speed", name="a", verdict="measured", value=3.0), 0),
        (Row(part="speed", name="a", verdict="error"), 1),
        (Row(part="life", name="a", verdict="failed"), 1),
        (Row(part="life", name="a", verdict="error"), 1),
    ],
)
def test_the_exit_code_is_1_where_a_promise_failed_or_a_part_broke(row: Row, code: int) -> None:
    assert report.exit_code([Row(part="first", name="well", verdict="passed"), row]) == code


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
    assert report.at_most("time", 15.1, 15.0, "us").verdict == "missed"
    assert report.at_most("time", 15.0, 15.0, "us").verdict == "passed"


def test_parts_that_break_are_rows_and_the_others_go_on(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    parts = [make_part("raises", _RAISES), make_part("dies", _DIES), make_part("well", _WELL)]
    results = list(run_parts(parts, Place(tmp_path / "run"), total_s=3 * _LIMIT_S))
    rows = [row for result in results for row in result.rows]
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
    assert [result.part for result in results] == parts


def test_the_rows_of_a_part_are_there_before_the_next_begins(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    begun: list[str] = []
    parts = [make_part("first", _WELL), make_part("second", _WELL)]
    results = run_parts(
        parts, Place(tmp_path / "run"), total_s=2 * _LIMIT_S, on_start=lambda part, limit_s: begun.append(part.name)
    )
    assert [row.name for row in next(results).rows] == ["one", "two"]
    assert begun == ["first"]


def test_a_part_that_checks_nothing_has_not_passed(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ((_, rows, _),) = run_parts([make_part("idle", "return []")], Place(tmp_path / "run"), total_s=_LIMIT_S)
    assert [(row.verdict, row.detail) for row in rows] == [("error", "it checked nothing: it printed nothing")]


def _run_until_stopped(part: Part, folder: Path) -> list[Row]:
    """The rows of a part that hangs after its first one: until that is there, no time passes."""
    seen: list[Row] = []
    now = count()
    ((_, rows, _),) = run_parts(
        [part],
        Place(folder),
        total_s=_LIMIT_S,
        clock=lambda: float(next(now)) if seen else 0.0,
        on_row=seen.append,
    )
    return rows


def test_a_part_that_hangs_is_stopped_and_keeps_its_rows(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = _run_until_stopped(make_part("hangs", _HANGS, budget_s=2.0), tmp_path / "run")
    assert [(row.name, row.verdict) for row in rows] == [("before", "passed"), ("the part hangs", "error")]
    assert rows[-1].detail == "not done after 2 s: waiting"


def test_a_part_that_is_silent_is_stopped_before_its_time_is_up(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = _run_until_stopped(replace(make_part("hangs", _HANGS), stall_s=3.0), tmp_path / "run")
    assert [(row.name, row.verdict) for row in rows] == [("before", "passed"), ("the part hangs", "error")]
    assert rows[-1].detail == "silent for 3 s: waiting"


_WAITS_TO_BE_SEEN = """yield Row(name='one', verdict='passed')
    while not any('"one"' in file.read_text() for file in Path(os.environ['OUT']).glob('*.json')):
        threading.Event().wait(0.01)
    yield Row(name='two', verdict='passed')"""
"""A second row that comes once the first is in the file."""


def test_each_row_is_printed_and_saved_before_the_next_comes(
    make_part,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "PARTS", (make_part("seen", _WAITS_TO_BE_SEEN),))
    monkeypatch.setattr(run, "this_machine", lambda: Machine(card="Test"))
    monkeypatch.setattr(run.signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["run.sh"])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert run.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " ok" in line] == ["one", "two"]


_STOPPED = """
import sys
from tests.gpu import __main__ as run
from tests.gpu.report import Machine
from tests.gpu.runner import Part

run.PARTS = (Part("hangs", "the part hangs", "gpu_part_hangs", 100), Part("late", "the part late", "gpu_part_well", 9))
run.this_machine = lambda: Machine(card="Test")
sys.argv = ["run.sh"]
sys.exit(run.main())
"""


def test_a_run_that_is_stopped_keeps_the_rows_that_it_had_and_fails(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make_part("hangs", _HANGS)
    environment = os.environ | {"OUT": str(tmp_path / "out")}
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        assert any(line.split()[:2] == ["before", "ok"] for line in iter(child.stdout.readline, ""))
        child.terminate()
        printed = child.stdout.read()
    assert child.returncode == 128 + signal.SIGTERM
    assert "1 passed, 1 error" in printed
    (file,) = (tmp_path / "out").iterdir()
    rows = report.read(file).rows
    assert [(row.part, row.name, row.verdict) for row in rows] == [
        ("hangs", "before", "passed"),
        ("hangs", "the run", "error"),
    ]


def test_no_part_starts_when_the_whole_time_is_used_up(make_part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    now = iter([0.0, 50.0])
    ((_, rows, seconds),) = run_parts(
        [make_part("late", _WELL)], Place(tmp_path), total_s=40.0, clock=lambda: next(now)
    )
    assert [(row.verdict, row.detail) for row in rows] == [("error", "the run's 40 s were used up")]
    assert seconds is None


def test_rounds_are_begun_only_where_there_is_time_for_them(tmp_path: Path) -> None:
    def counted(end_s: float, left: int = 1) -> list[bool]:
        now = iter(range(0, 100, 10))  # each round takes 10 s
        return list(Place(tmp_path, end_s=end_s).rounds(left, lambda: next(now)))

    assert counted(1000.0) == [False, True, True, True]
    assert counted(36.0) == [False, True, True]
    assert counted(1.0) == [False, True]
    assert counted(72.0, left=2) == [False, True, True]


def test_an_unknown_part_is_named_with_the_ones_there_are(make_part) -> None:  # type: ignore[no-untyped-def]
    parts = [make_part("a", _WELL), make_part("b", _WELL)]
    assert [part.name for part in chosen(parts, "b, a")] == ["a", "b"]
    assert chosen(parts, "") == parts
    with pytest.raises(ValueError, match="there is no part 'c'; the parts are a, b"):
        chosen(parts, "a,c")


def test_a_group_comes_with_what_its_parts_need_and_big_parts_only_where_they_are_asked_for(make_part) -> None:  # type: ignore[no-untyped-def]
    groups: dict[str, Group] = {"setup": "", "right": "correctness", "fast": "speed", "large": "big"}
    parts = [replace(make_part(name, _WELL), group=group) for name, group in groups.items()]

    def names(only: str, *, big: bool = False) -> list[str]:
        return [part.name for part in chosen(parts, only, big=big)]

    assert names("correctness") == ["setup", "right"]
    assert names("big,right") == ["setup", "right", "large"]
    assert names("large") == ["large"]
    assert names("") == ["setup", "right", "fast"]
    assert names("", big=True) == list(groups)


def test_each_part_is_in_a_group_or_needed_by_all_of_them() -> None:
    assert [part.name for part in run.PARTS if not part.group] == ["kernels", "models"]


def test_a_copy_without_git_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    before = digest(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    assert digest(tmp_path) == before
    (tmp_path / "a.py").write_text("two")
    assert digest(tmp_path) != before


def test_rows_of_an_asynchronous_check_are_there_before_it_goes_on_and_it_is_closed_when_no_more_are_wanted() -> None:
    ended: list[str] = []

    async def check() -> AsyncGenerator[Row, None]:
        waiting = asyncio.create_task(asyncio.Event().wait())
        try:
            yield report.promise("first", True)
            await asyncio.sleep(0)
            yield report.promise("second", True)
        finally:
            waiting.cancel()
            ended.append("check")

    assert [row.name for row in as_they_come(check())] == ["first", "second"]
    rows = as_they_come(check())
    assert next(rows).name == "first"
    assert ended == ["check"]
    rows.close()
    assert ended == ["check", "check"]


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
    monkeypatch.setattr(machine, "_CUDA_HOMES", ())
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


def test_a_run_saves_its_rows_and_fails_where_one_failed(
    make_part,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "PARTS", (make_part("well", _WELL), make_part("dies", _DIES)))
    monkeypatch.setattr(run, "this_machine", lambda: Machine(card="Test"))
    monkeypatch.setattr(run.signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["run.sh"])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    assert run.main() == 1
    (file,) = (tmp_path / "out").iterdir()
    assert [(row.part, row.verdict) for row in report.read(file).rows] == [
        ("well", "passed"),
        ("well", "measured"),
        ("dies", "passed"),
        ("dies", "error"),
    ]
    printed = capsys.readouterr().out
    assert printed.index("two") < printed.index("dies: the part dies")
    assert "2 passed, 1 measured, 1 error" in printed


# --- what run.sh needs ------------------------------------------------------------------------------------------------

_ROOT = Path(report.__file__).parents[2]
_RUN = _ROOT / "tests" / "gpu" / "run.sh"

_HIDES = """
import importlib.abc, importlib.util, sys
HIDDEN = {hidden!r}
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in HIDDEN else found(name, package)
class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}: run.sh does not ask for it", name=name)
sys.meta_path.insert(0, Hides())
"""
"""A sitecustomize.py: every Python that finds it has these packages no more, a worker's too."""

_ANSWERS = """
import asyncio, sys
from importlib import import_module
from pathlib import Path
from engine.config import ModelSpec
from tests.gpu.__main__ import PARTS
from tests.gpu.load import engine_rate, serving

async def main():
    spec = ModelSpec(path=Path(sys.argv[1]), name="tiny", backend="torch", device="cpu", kv_cache_tokens=1024)
    async with serving(spec, 1) as (engine, model):
        assert await engine_rate(engine, 1, 1, 0) > 0

for part in PARTS:
    import_module(part.module)
asyncio.run(main())
print("answered")
"""


def _needed() -> list[str]:
    """The packages that run.sh looks for, by the names they are imported by."""
    found = re.search("^needed='(.*)'$", _RUN.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def _with_their_own(packages: list[str]) -> set[str]:
    """The packages, and those that they cannot be installed without."""
    known = metadata.packages_distributions()
    names = [name for package in packages for name in known.get(package, [])]
    seen: set[str] = set()
    while names:
        name = _plain(names.pop())
        if name not in seen:
            seen.add(name)
            try:
                required = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            names += [re.split(r"[^\w.-]", each)[0] for each in required if "extra ==" not in each]
    return {package for package, owners in known.items() if any(_plain(owner) in seen for owner in owners)}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hide(folder: Path, packages: set[str]) -> dict[str, str]:
    """The environment of a Python that lacks these packages."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HIDES.format(hidden=packages))
    return os.environ | {"PYTHONPATH": f"{folder}:{_ROOT}"}


def test_a_machine_that_has_what_run_sh_asks_for_can_import_every_part_and_answer(tmp_path: Path) -> None:
    ours = {"engine", "console", "tests"}
    hidden = set(metadata.packages_distributions()) - _with_their_own(_needed()) - ours
    assert "textual" in hidden
    done = subprocess.run(
        [sys.executable, "-c", _ANSWERS, str(make_tiny_model(tmp_path / "model"))],
        env=_hide(tmp_path / "site", hidden),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("answered\n"), done.stderr


def test_the_page_lists_the_wheels_of_all_that_run_sh_asks_for() -> None:
    page = (_ROOT / "docs" / "gpu.md").read_text().partition("what is missing is listed:")[2].partition(".")[0]
    listed = re.split(r",\s+|\s+and\s+", page.strip())
    wheels = {"PIL": "pillow", "pynvml": "nvidia-ml-py"}
    assert sorted(listed) == sorted(wheels.get(name, name) for name in _needed())


@pytest.mark.parametrize("package", ["llguidance", "msgspec"])
def test_a_package_that_neither_python_nor_wheels_have_is_named_before_anything_runs(
    tmp_path: Path, package: str
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "nothing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nothing.py", "")
        wheel.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("nothing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
        wheel.writestr("nothing-1.dist-info/RECORD", "")
    environment = _hide(tmp_path / "site", {package}) | {"WHEELS": str(wheels), "PYTHON": sys.executable}
    done = subprocess.run(["bash", _RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    missing = next(line for line in done.stdout.splitlines() if line.startswith("missing:"))
    assert package in missing.split()
    assert "sees no CUDA device" not in done.stderr


def _run_from(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", _RUN],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_nothing_is_installed_and_one_sentence_says_so(tmp_path: Path) -> None:
    lacking = _run_from(tmp_path, **_hide(tmp_path / "site", {"llguidance"}))
    assert lacking.returncode == 2
    assert lacking.stdout.startswith("missing: ") and "llguidance" in lacking.stdout.split()
    assert lacking.stderr == "no CUDA device is found; these checks need one, and nothing was installed\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_another_package_called_tests_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sees no CUDA device; these checks need one" in done.stderr


def test_folders_are_those_of_the_caller_and_one_without_wheels_is_named(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    done = _run_from(tmp_path, WHEELS="wheels")
    assert (done.returncode, done.stderr) == (1, f"WHEELS: there is no wheel in {tmp_path}/wheels\n")


def test_every_part_has_time_for_what_it_does() -> None:
    """About 40 compilations of Triton, of up to a second each, and as many launches."""
    limits = {part.name: part.budget_s for part in run.PARTS}
    assert limits["attention"] >= 90
    assert len(limits) == len(run.PARTS)
