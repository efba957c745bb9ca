"""`ericllm` without a screen: it says why, serves, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import ROOT, Headless

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[Headless]]:
    running: list[Headless] = []
    yield running
    for server in running:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_without_a_terminal_it_says_so_serves_and_leaves_nothing_behind(
    tmp_path: Path, model: Path, start: list[Headless]
) -> None:
    server = Headless("--model", str(model), "--port", "0", home=tmp_path)
    start.append(server)
    url = server.wait_for(r"listening on (http://\S+)")[1]
    assert server.lines[0] == "ericllm: stdout is not a terminal; running headless"
    server.wait_for("is ready")
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    body = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", data=body), timeout=60) as answer:
        assert json.load(answer)["text"].startswith("abc")
    assert server.end() == 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("redirected", ["stdin", "stdout", "stderr"])
def test_where_one_of_the_three_streams_is_no_terminal_it_says_which_and_shows_no_screen(
    tmp_path: Path, model: Path, redirected: str
) -> None:
    with in_terminal(tmp_path, "--model", str(model), "--port", "0", redirected=redirected) as (process, read):
        said = read("listening on")
        process.terminate()
        said += read("stopping")
        assert process.wait(timeout=60) == 0
    assert said.startswith(f"ericllm: {redirected} is not a terminal; running headless")
    assert "\x1b[?1049h" not in said


def test_a_dumb_terminal_is_refused_in_one_sentence(tmp_path: Path, model: Path) -> None:
    with in_terminal(tmp_path, "--model", str(model), TERM="dumb") as (process, read):
        assert process.wait(timeout=60) == 2
        assert read("\n") == "ericllm: This terminal cannot show the console (TERM=dumb); use --headless\r\n"


def _control(terminal: int) -> None:
    """Make a terminal the one that this process is told the end of."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(terminal, termios.TIOCSCTTY)


@contextmanager
def in_terminal(
    home: Path, *flags: str, redirected: str = "", **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[str], str]]]:
    """`ericllm` in a terminal but for one of its streams, and what reads its stderr until a text has come."""
    terminal, theirs = pty.openpty()
    env = {**os.environ, "XDG_STATE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "TERM": "xterm", **variables}
    with (home / "redirected").open("wb") as file:
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {redirected: file}
        streams.pop("", None)
        command = [sys.executable, "-m", "console", *flags]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, start_new_session=True, preexec_fn=partial(_control, theirs), **streams
        )
        os.close(theirs)

        def read(text: str) -> str:
            said = b""
            while text.encode() not in said:
                said = Path(file.name).read_bytes() if redirected == "stderr" else said + os.read(terminal, 4096)
            return said.decode()

        try:
            yield process, read
        finally:
            process.kill()
            process.wait()
            os.close(terminal)


def test_a_port_that_is_taken_is_one_sentence_and_exit_code_1(
    tmp_path: Path, model: Path, start: list[Headless]
) -> None:
    first = Headless("--headless", "--model", str(model), "--port", "0", home=tmp_path)
    start.append(first)
    port = first.wait_for(r"listening on http://127.0.0.1:(\d+)")[1]
    second = Headless("--headless", "--model", str(model), "--port", port, home=tmp_path / "2")
    start.append(second)
    second.wait_for(f"ericllm: .*{port}")
    assert second.end(0) == 1
    assert not any("Traceback" in line for line in second.lines)


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_exit_code_1(tmp_path: Path, start: list[Headless]) -> None:
    folder = make_tiny_model(tmp_path / "broken")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    missing = sorted(tensors)[1]
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, weights)
    server = Headless("--headless", "--no-api", "--model", str(folder), home=tmp_path)
    start.append(server)
    assert server.end(0) == 1
    said = [line for line in server.lines if line.startswith("ericllm: ") and missing in line]
    assert len(said) == 1
    assert not any("Traceback" in line for line in server.lines)


def test_a_folder_that_cannot_be_a_model_is_refused_before_anything_starts(
    tmp_path: Path, start: list[Headless]
) -> None:
    folder = make_tiny_model(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    server = Headless("--headless", "--no-api", "--model", str(folder), home=tmp_path)
    start.append(server)
    assert server.end(0) == 2
    assert len(server.lines) == 1
    assert weights.name in server.lines[0]


def test_a_signal_during_the_load_ends_it(tmp_path: Path, model: Path, start: list[Headless]) -> None:
    server = Headless("--headless", "--no-api", "--model", str(model), home=tmp_path)
    start.append(server)
    server.wait_for("loading")
    assert server.end(signal.SIGINT) == 0


def test_the_end_of_the_terminal_drains_like_any_other_end(tmp_path: Path, model: Path) -> None:
    flags = ("--headless", "--no-api", "--model", str(model))
    with in_terminal(tmp_path, *flags, redirected="stderr") as (process, read):
        read("is ready")
        os.kill(process.pid, signal.SIGHUP)  # as the kernel does then
        assert process.wait(timeout=60) == 0
        assert "unloaded" in read("unloaded")


def test_without_a_terminal_a_hang_up_has_the_settings_read_again(
    tmp_path: Path, model: Path, start: list[Headless]
) -> None:
    config = tmp_path / "ericllm" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("max_prompts = 3\n")
    server = Headless("--headless", "--no-api", "--model", str(model), "--drain-seconds", "1", home=tmp_path)
    start.append(server)
    server.wait_for("is ready")

    def reload(text: str, said: str) -> None:
        config.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(said)

    reload("max_prompts = 3\n", f"{config} was reloaded; no changes")
    reload("max_prompts = 5\ndrain_seconds = 9\nport = 1\n", "applied: max_prompts$")
    server.wait_for("applies to the next load or start: port$")
    reload("max_prompts = 'many'\n", f"settings unchanged: 'max_prompts' in {config} many: ")
    reload("max_prompts = [\n", f"settings unchanged: {config} cannot be read: ")
    reload("max_prompts = 4\n", "applied: max_prompts$")
    if not any("max_prompts 5 -> 4" in line for line in server.lines):  # a thread writes the log: before or after
        server.wait_for("max_prompts 5 -> 4")
    reload("", "applied: max_prompts$")
    config.unlink()
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(f"{config} does not exist; no changes")
    assert server.end() == 0


def test_two_at_once_write_logs_of_their_own(tmp_path: Path, model: Path, start: list[Headless]) -> None:
    for _ in range(2):
        start.append(Headless("--headless", "--no-api", "--model", str(model), home=tmp_path))
        start[-1].wait_for("is ready")
    for server in start:
        assert server.end() == 0
    for name in ("log", "log-2"):
        told = (tmp_path / "ericllm" / name / "ericllm.log").read_text()
        assert told.count("tiny: ready") == 1
        assert (tmp_path / "ericllm" / name / "worker-w0.log").exists()
    third = Headless("--headless", "--no-api", "--model", str(model), home=tmp_path)
    start.append(third)
    third.wait_for("is ready")
    assert third.end() == 0
    assert (tmp_path / "ericllm" / "log" / "ericllm.log").read_text().count("tiny: ready") == 2


@pytest.mark.parametrize(
    ("flags", "on_stderr", "in_file"),
    [(("--quiet",), False, True), (("--log-level", "warning"), False, False), (("--verbose",), True, True)],
)
def test_what_is_logged_is_chosen(
    tmp_path: Path, model: Path, start: list[Headless], flags: tuple[str, ...], on_stderr: bool, in_file: bool
) -> None:
    server = Headless("--headless", "--no-api", "--model", str(model), *flags, home=tmp_path)
    start.append(server)
    server.wait_for("is ready")
    assert server.end() == 0
    assert any("tiny: ready" in line for line in server.lines) == on_stderr
    assert ("tiny: ready" in (tmp_path / "ericllm" / "log" / "ericllm.log").read_text()) == in_file
