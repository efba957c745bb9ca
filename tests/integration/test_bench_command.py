"""`ericllm bench latency` and its kin as a command: files, history, and ctrl+c."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from console.bench.result import read_result
from console.cli.main import main
from tests.fakes.kernel_cache import share_kernels
from tests.fakes.tiny_models import make_tiny_model

PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_kernels(tmp_path / "cache")
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("measuring") / "tiny", num_hidden_layers=1)


@pytest.mark.slow
def test_a_bench_prints_a_table_writes_its_files_and_is_remembered(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"result.{kind}" for kind in ("json", "csv", "svg")]
    flags = [part for file in files for part in (f"--{file.suffix[1:]}", str(file))]
    asked = ["--users", "1,2", "--requests", "2", "--prompt-tokens", "4-8", "--output-tokens", "5", "--samples"]
    assert main(["bench", "users", str(tiny), *asked, *flags, "--dtype", "float32"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("bench users: tiny (torch, float32), 1 repeat")
    assert "users 2, 2 of 6, about " in said.err and "users 1: mean response" in said.err
    result = read_result(files[0])
    assert [row.keys for row in result.rows] == [{"users": 1}, {"users": 2}]
    assert {sample.output_tokens for sample in result.samples} == {5}
    assert len(files[1].read_text().splitlines()) == 3
    assert files[2].read_text().startswith("<svg")
    assert main(["bench", "history", "--json"]) == 0
    assert [kept["name"] for kept in json.loads(capsys.readouterr().out)] == ["users"]


@pytest.mark.slow
def test_a_result_notes_that_the_native_kernels_could_not_be_had(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-compiler")
    file = tmp_path / "result.json"
    asked = ["--users", "1", "--requests", "1", "--prompt-tokens", "4", "--output-tokens", "2", "--devices", "sim:8"]
    assert main(["bench", "users", str(tiny), *asked, "--json", str(file), "--no-history"]) == 0
    assert "The native kernels were not used" in read_result(file).notes[0]
    assert "CXX names no-compiler, which is not on PATH" in read_result(file).notes[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ctrl_c_ends_a_bench_with_what_was_measured_by_then(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = (
        "bench",
        "users",
        str(tiny),
        "--users",
        "1,2",
        "--requests",
        "1",
        "--repeats",
        "1000",
        "--output-tokens",
        "8",
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "console", *command, "--no-history", "--json", str(file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while not (await process.stderr.readline()).startswith(b"users 1: mean response"):
            assert not process.stderr.at_eof()
        process.send_signal(signal.SIGINT)
        said, errors = await process.communicate()
    assert process.returncode == 130, errors.decode()
    assert b"Ended early" in said and b"Traceback" not in errors
    result = read_result(file)
    assert not result.complete
    assert 1 <= len(result.rows[0].values["response_s"]) < 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["users", "demo", "--users", "0"], "users must be 1 or more"),
        (["grid", "demo", "--workers", "0"], "workers must be 1 or more"),
        (["serve", "demo", "--rates", "0"], "a rate must be above 0"),
        (["serve", "demo", "--prompt-tokens", "trace"], "lengths from a trace need --trace"),
        (["serve", "demo", "--trace", "no-such-file.json"], "no-such-file.json cannot be read"),
        (["latency", "demo", "--prompt-tokens", "900000"], "do not fit the model's"),
        (["latency", "demo", "--max-model-len", "100"], "answers of up to 200 do not fit the model's 100"),
        (["load", "--url", "http://127.0.0.1:9"], "loads a model, which a server does not allow; leave --url out"),
    ],
)
def test_what_is_known_to_fail_is_refused_before_anything_is_loaded_or_asked(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and said in told[0]  # no "loading demo" before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "0"], "0 is not between 1 and 1000000"),
        (["demo", "--model", "other"], "the model is given twice"),
        (["--dialect", "tgi"], "need --url"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is a load option"),
        (["--url", "http://127.0.0.1:9"], "connection refused"),
        (["--promts", "3"], "there is no --promts"),
        (["no-such-model"], "no model is called no-such-model"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "latency", *arguments])
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    told = capsys.readouterr()
    assert code in (1, 2)
    assert told.out == ""
    assert said in told.err.strip().splitlines()[-1]
    assert "Traceback" not in told.err
