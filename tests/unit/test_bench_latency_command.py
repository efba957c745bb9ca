"""`ericllm bench latency` on an engine that is foretold: what is kept whatever fails, and how it ends early."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from console.bench.history import BenchHistory
from console.bench.own_engine import load_text
from console.bench.progress import Showing
from console.bench.result import read_result
from console.cli.bench_measure import write_files
from console.cli.main import main
from console.settings.schema import Settings, state_dir
from engine.backends.base import LoadProgress
from tests.fakes.bench_target import FakeTarget
from tests.unit.test_bench_history import made
from tests.unit.test_tuned_profiles import of_demo

QUICK = ("bench", "latency", "demo", "--prompts", "1", "--output-tokens", "2")
Opened = list[Settings]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The settings of each engine that was opened."""
    return opens(monkeypatch)


def opens(monkeypatch: pytest.MonkeyPatch, sent: signal.Signals | None = None) -> Opened:
    """Engines that are opened at once; where a signal is sent to this process meanwhile, never."""
    found: Opened = []

    @asynccontextmanager
    async def engine_target(settings: Settings, show: Showing, **options: int) -> AsyncIterator[FakeTarget]:
        found.append(settings)
        if sent is not None:
            os.kill(os.getpid(), sent)
            await asyncio.Event().wait()
        yield FakeTarget()

    monkeypatch.setattr("console.cli.bench_measure.engine_target", engine_target)
    return found


def test_a_result_is_remembered_before_its_files_are_written(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: Path, content: bytes) -> None:
        assert len(BenchHistory(state_dir()).results()) == 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("console.cli.bench_measure.replace_file", full)
    file = tmp_path / "r.json"
    assert main([*QUICK, "--json", str(file), "--csv", str(tmp_path / "r.csv")]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("bench latency: fake")
    assert f"{file} cannot be written: No space left on device\n" in told.err and "r.csv cannot be written" in told.err
    assert "saved as #1" in told.err


def test_a_file_that_cannot_be_made_leaves_the_others(tmp_path: Path) -> None:
    files = {"svg": tmp_path / "r.svg", "csv": tmp_path / "new" / "r.csv"}
    [said] = write_files(made({}), files)
    assert said.startswith(f"{files['svg']} was not written: ") and "no numbers to draw" in said
    assert (files["csv"].exists(), files["svg"].exists()) == (True, False)


@pytest.mark.parametrize("kind", ["json", "csv", "svg"])
@pytest.mark.parametrize(("below", "said"), [("a-file/r", "a-file is not a folder"), ("", "it is a folder")])
def test_a_file_that_cannot_be_is_refused_before_anything_is_loaded(
    opened: Opened, tmp_path: Path, kind: str, below: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").touch()
    assert main([*QUICK, f"--{kind}", str(tmp_path / below)]) == 2
    assert said in capsys.readouterr().err
    assert opened == []


def test_what_autotune_found_is_used_and_told(
    opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_demo(state_dir(), settings={"max_prompts": 24, "threads": 2})
    file = tmp_path / "r.json"
    assert main([*QUICK, "--threads", "1", "--json", str(file)]) == 0
    assert (opened[0].max_prompts, opened[0].threads) == (24, 1)
    result = read_result(file)
    assert result.settings["tuned"] == ["max_prompts"]
    said = "Used the settings of autotune for this model: max_prompts 24."
    assert said in result.notes and said in capsys.readouterr().out


def test_without_anything_tuned_nothing_is_said_of_it(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    assert "tuned" not in read_result(file).settings and read_result(file).notes == ()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_engine_is_opened_ends_it_in_one_line(
    ending: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opens(monkeypatch, ending)
    assert main([*QUICK]) == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "ericllm: cancelled before the first result\n")


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (None, ("loading demo", "")),
        (LoadProgress(phase="download", done=0, total=0), ("loading demo: downloading", "")),
        (
            LoadProgress(phase="download", done=3 << 29, total=4 << 30),
            ("loading demo: downloading", "1.5 of 4.0 GiB"),
        ),
        (
            LoadProgress(phase="weights", done=1 << 20, total=10 << 20),
            ("loading demo: reading weights", "1.0 of 10.0 MiB"),
        ),
        (LoadProgress(phase="warm_up", done=1, total=3, unit="steps"), ("loading demo: warming up", "1 of 3")),
    ],
)
def test_how_far_a_load_is_is_told_in_words_and_bytes(progress: LoadProgress | None, said: tuple[str, str]) -> None:
    assert load_text("demo", progress) == said
