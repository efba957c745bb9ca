"""Engines of the benchmark run in processes of their own, one at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tools.benchmarks.engine_process import EngineFailed, EngineProcess
from tools.benchmarks.engines import Row
from tools.benchmarks.places import NotPrepared, Places, last_words
from tools.benchmarks.protocol import Given, work_of

Start = Callable[..., EngineProcess]

RUNNER = """
import os
from contextlib import asynccontextmanager
from tools.benchmarks.protocol import Ready, serve

@asynccontextmanager
async def loaded(given):
    if given.mode == "broken":
        raise RuntimeError("no such instruction")
    def batch(prompts, tokens, answers):
        print("engines chat on standard output", flush=True)
        if given.mode == "dies":
            os._exit(3)
        for answer in answers:
            answer.arrived(tokens)
        answer.tokens -= given.mode == "short"
    yield Ready("bf16", batch=batch)

serve(loaded, ["msgspec"])
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    engines: list[EngineProcess] = []

    def start(mode: str = "") -> EngineProcess:
        command = [sys.executable, str(runner), *Given(tmp_path, 2, 300, 1, mode).arguments()]
        engines.append(EngineProcess(command, {}, tmp_path / "log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_an_engine_says_what_it_is_and_works_until_it_is_closed(started: Start, tmp_path: Path) -> None:
    engine = started()
    assert (engine.about.precision, list(engine.about.versions)) == ("bf16", ["msgspec"])
    for round_ in range(2):
        done = engine.do(work_of(2, round_))
        assert (done.tokens, done.seconds > 0, len(done.ttft_s)) == (256, True, 2)
    assert (tmp_path / "log").read_text() in ("", "engines chat on standard output\n" * 2)


def test_an_engine_that_is_starting_when_the_run_is_ended_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(EngineProcess, "_answer", ended)
    with pytest.raises(SystemExit):
        EngineProcess([sys.executable, "-c", "input()"], {}, tmp_path / "log")
    assert not [each for each in psutil.Process().children() if "input()" in each.cmdline()]


def test_an_engine_stands_still_between_its_turns(started: Start) -> None:
    engine = started()
    engine.pause()
    (child,) = (each for each in psutil.Process().children() if any("runner.py" in word for word in each.cmdline()))
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert child.status() == psutil.STATUS_STOPPED
    assert engine.do(work_of(1, 0)).tokens == 128


@pytest.mark.parametrize(
    ("mode", "said"),
    [("short", "generated 255 tokens of 256"), ("dies", "ended with 3"), ("broken", "no such instruction")],
)
def test_an_engine_that_fails_is_quoted(started: Start, mode: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        started(mode).do(work_of(2, 0))


def test_what_an_installer_said_last_about_an_error_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Collecting\nERROR: no matching distribution\n\nnote: see above\n")
    assert last_words(log) == "ERROR: no matching distribution"
    log.write_text("")
    assert last_words(log) == "it said nothing"


def test_a_conversion_that_fails_names_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.benchmarks.places.make_synthetic", lambda shape, folder: folder)
    row = Row("x", "X", "int8", convert="int8")
    with pytest.raises(NotPrepared, match="invalid choice: 'ours'"):
        Places(tmp_path).model("135m", row)
    assert not (tmp_path / "converted").exists()
