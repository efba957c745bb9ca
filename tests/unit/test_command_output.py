"""What commands print steers no terminal, whoever wrote what they quote; programs read in it what was put in."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import console
from console.api.http.keys import Keys
from console.bench.history import BenchHistory
from console.bench.progress import Progress
from console.cli import top
from console.cli.autotune import Live
from console.cli.bench import show_results
from console.cli.main import main
from console.link.api import DialectReading
from console.runtime import headless
from console.runtime.output import say, write
from console.settings.schema import state_dir
from console.tui.screens.api.screen import curl_line
from engine.models.discover import demo_path
from engine.text.printable import ANY_UNSAFE
from tests.fakes import bench_scenes, scenes
from tests.fakes.hostile import HOSTILE, hostile

PRINTS_ITSELF = {
    "runtime/output.py": "the one place",
    "runtime/headless.py": "its warning is red",
    "planning/simulations.py": "a child process, read by its parent",
    "planning/measuring.py": "likewise",
}


def is_clean(text: str) -> bool:
    """Whether it is lines that steer nothing."""
    return ANY_UNSAFE.search(text.replace("\n", "")) is None


def prints(path: Path) -> bool:
    """Whether a module writes to stdout or stderr by itself."""
    found = {ast.unparse(each.func) for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)}
    return bool(found & {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write"})


def test_commands_print_through_one_module() -> None:
    root = Path(console.__file__).parent
    assert {str(path.relative_to(root)) for path in root.rglob("*.py") if prints(path)} == set(PRINTS_ITSELF)


def test_a_result_a_sentence_and_json_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    write(f"one {HOSTILE}\n\ttwo")
    write(msgspec.json.encode([HOSTILE]).decode(), as_json=True)
    say(f"{HOSTILE}\nericllm: forged")
    headless._say(HOSTILE, alarming=True)
    said = capsys.readouterr()
    assert is_clean(said.out.replace("\t", "")) and is_clean(said.err)
    lines = said.out.splitlines()
    assert (len(lines), lines[1], json.loads(lines[2])) == (3, "\ttwo", [HOSTILE])
    assert len(said.err.splitlines()) == 2


@pytest.mark.parametrize(
    "command", ["config sample", "keys", "api-keys list", "--help", "--version", "estimate --help"]
)
def test_a_result_that_cannot_be_written_is_one_sentence_and_a_failure(command: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "console", *command.split()],
            env=os.environ | {"ERICLLM_HOME": str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "ericllm: The output cannot be written: No space left on device\n")


def test_a_key_that_nobody_has_seen_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["api-keys", "make", "lost"]) == 1
    keys = Keys(state_dir())
    keys.open()
    assert keys.readings() == ()


def test_a_model_folder_writes_nothing_to_the_terminal_that_estimates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model\x1b]52;c;QQ==\x07\x9b6n"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [HOSTILE], "model_type": HOSTILE}))
    assert main(["estimate", str(folder)]) != 0
    said = capsys.readouterr()
    assert said.err.startswith("ericllm: ") and r"\x1b]52" in said.err
    assert is_clean(said.out) and is_clean(said.err)


@pytest.mark.parametrize("as_json", [False, True])
def test_another_instance_writes_nothing_to_the_terminal_that_looks_at_it(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def snapshot(instance: object) -> object:
        return hostile(scenes.failed(HOSTILE))

    monkeypatch.setattr(top, "_snapshot", snapshot)
    assert main(["top", *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr().out
    assert is_clean(said) and "click=app.quit" in said
    if as_json:
        assert json.loads(said)["model"].startswith(HOSTILE)


@pytest.mark.parametrize(
    "argv", [("attach", f"ftp://{HOSTILE}"), ("top", f"{HOSTILE}://x"), ("replay", f"/no/{HOSTILE}"), (f"--{HOSTILE}",)]
)
def test_a_refusal_that_quotes_what_was_given_is_one_clean_line(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main([each.replace("\x00", "") for each in argv]) != 0
    except SystemExit as ended:
        assert ended.code == 2
    said = capsys.readouterr()
    assert is_clean(said.err) and is_clean(said.out)
    assert said.err.startswith("ericllm: ") and len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv", [("history",), ("show", "last"), ("show", "last", "--csv"), ("compare", "last", "last")]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_kept_result_writes_nothing_to_the_terminal_that_shows_it(
    argv: tuple[str, ...], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if as_json and "--csv" in argv:
        pytest.skip("one of the two")
    BenchHistory(tmp_path).add(hostile(bench_scenes.users()))
    assert show_results((*argv, *(["--json"] if as_json else [])), argparse.ArgumentParser(), tmp_path) == 0
    said = capsys.readouterr().out
    assert is_clean(said) and said.strip()
    if as_json:
        found = json.loads(said)
        assert (found[0] if argv == ("history",) else found)["name"].startswith(HOSTILE)


def test_no_text_of_others_begins_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = "m\nericllm: all is well"
    monkeypatch.setattr("tests.fakes.hostile.HOSTILE", forged)
    result = msgspec.structs.replace(hostile(bench_scenes.users()), started="\n" * 19)
    (tmp_path / "result.json").write_bytes(msgspec.json.encode(result))
    file = str(tmp_path / "result.json")
    for argv in (("show", file), ("show", file, "--all"), ("compare", file, file)):
        assert show_results(argv, argparse.ArgumentParser(), tmp_path) == 0
    write(top.as_text(top.line_of(hostile(scenes.failed()), forged)))
    folder = tmp_path / forged
    shutil.copytree(demo_path() or "", folder)
    assert main(["estimate", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.count(r"m\nericllm: all is well") > 5
    assert "\nericllm: all is well" not in said


class Tty(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_clean_where_it_is_redrawn_and_where_it_is_not() -> None:
    for stream in (io.StringIO(), Tty()):
        Progress(stream).show(f"loading {HOSTILE}", HOSTILE)
        Live(stream).say(f"loading {HOSTILE}")
        own = stream.getvalue().replace("\r", "", 1) if stream.isatty() else stream.getvalue()
        assert is_clean(own)


def test_a_copied_curl_line_has_no_character_that_a_shell_or_terminal_would_obey() -> None:
    dialect = DialectReading(
        name="own", title="Own", routes=(), example_path=f"/{HOSTILE}", example_body={HOSTILE: HOSTILE}
    )
    line = curl_line("http://127.0.0.1:8000", HOSTILE, dialects=[dialect], with_key=False)
    assert ANY_UNSAFE.search(line) is None


@pytest.mark.parametrize(
    ("closed", "arguments", "status"), [(">&-", "path", 0), ("2>&-", "nonsense", 2), ("<&- >&- 2>&-", "path", 0)]
)
def test_streams_that_are_closed_are_nobodys_and_no_failure(closed: str, arguments: str, status: int) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "console.cli.main", "config", arguments]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False)


def test_a_sentence_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(full, write_through=True))
        say("the disk is full")


def test_top_says_that_an_instance_is_draining() -> None:
    draining = scenes.busy(draining_since=scenes.NOW)
    assert "NeuralHermes-7B ready, draining" in top.as_text(top.line_of(draining, "10.0.0.7:8000"))
