"""The whole path in a real terminal: load, chat, tune under load, serve, quit; nothing is left running."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.ports import free_port
from tests.integration.headless import Headless
from tests.integration.terminal import Terminal, console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ANSWER_TOKENS = 300


def post(port: int, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def refuses(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).close()
    except (urllib.error.URLError, ConnectionError):
        return True
    return False


class Load:
    """Clients that ask for long answers, all at once, and count what they got."""

    def __init__(self, port: int, clients: int) -> None:
        self.tokens: list[int] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(port, number)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, port: int, number: int) -> None:
        body = {"prompt": f"Client {number} says", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        try:
            usage = post(port, "/v1/completions", body)["usage"]
            assert isinstance(usage, dict)
            self.tokens.append(int(usage["completion_tokens"]))
        except Exception as problem:
            self.problems.append(repr(problem))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=180)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def terminal(tmp_path: Path, port: int) -> Iterator[Terminal]:
    with console("--port", str(port), "--max_prompts", "4", home=tmp_path) as running:
        yield running


def _workers(terminal: Terminal) -> list[psutil.Process]:
    found = []
    for process in terminal.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # one of those that come and go
            if process.name() == "ericllm-worker":
                found.append(process)
    return found


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # one of those that come and go
        return []


def test_sigterm_quits_as_q_does_and_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.wait_for("demo", "1 of 1 ready")
    processes = terminal.processes()
    next(process for process in processes if "console" in _command(process)).terminate()
    screen = terminal.wait_for("exit code")
    assert "exit code 0" in screen
    assert "1 of 1 ready" not in screen, "the console is still on the screen"
    assert gone(processes)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_an_operators_round(terminal: Terminal, port: int) -> None:
    """Load, chat, tune under load, watch a worker die and return, serve, quit."""
    terminal.wait_for("demo", "1 of 1 ready")
    terminal.press("2")
    terminal.wait_for("1 model", "Fits")
    terminal.press("b")
    terminal.wait_for("● ready  demo-2")
    terminal.press("u")
    terminal.wait_for("demo unloaded")

    terminal.press("3")
    terminal.wait_for("Message. Enter sends")
    terminal.type("What does max_prompts do?")
    terminal.press("Enter")
    answered = terminal.wait_for("tok/s", "TTFT")
    assert "What does max_prompts do?" in answered

    terminal.press("F1")
    load = Load(port, clients=10)
    terminal.wait(lambda screen: "decode" in screen, "a decoding request in the table")
    terminal.press("]")
    terminal.wait_for("2 workers × 4 prompts", "w0", "w1")
    terminal.press("+", "+")
    terminal.wait_for("2 workers × 6 prompts")
    terminal.press("F5")
    terminal.wait_for("Effect of changes", "workers 1 → 2", "→ 6")
    terminal.press("u")
    terminal.wait(lambda screen: "× 4 prompts" in screen or "× 5 prompts" in screen, "the last change undone")
    terminal.press("F1", "[")
    terminal.wait_for("1 worker × ")
    load.join()
    assert load.problems == []
    assert load.tokens == [ANSWER_TOKENS] * 10

    terminal.wait(lambda screen: len(_workers(terminal)) == 1, "the end of the worker that left")
    (worker,) = _workers(terminal)
    worker.kill()
    assert gone([worker])
    terminal.press("F7")
    terminal.wait_for("SIGKILL")
    terminal.press("F1")
    terminal.wait(lambda screen: len(_workers(terminal)) == 1, "another worker in the place of the killed one")
    (again,) = _workers(terminal)
    assert again.pid != worker.pid
    terminal.wait_for("idle", "ready", "1 of 1 ready", "0 running")

    terminal.press("a")
    terminal.wait_for("No request is running")
    terminal.press("y")
    terminal.wait_for("API off")
    assert refuses(port)
    terminal.press("a")
    terminal.wait_for(f"API 127.0.0.1:{port} on")
    chat = post(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
    assert chat["object"] == "chat.completion"
    terminal.wait_for("0 running")
    processes = terminal.processes()
    assert len(processes) >= 2
    terminal.press("q")
    terminal.wait_for("exit code 0")
    assert gone(processes)
    assert refuses(port)


def test_the_console_attached_to_a_headless_instance_tunes_it_and_leaves_it_running(tmp_path: Path, port: int) -> None:
    instance = Headless("--headless", "--port", str(port), "--max_prompts", "4", home=tmp_path / "there")
    try:
        instance.wait_for("is ready")
        with console("attach", f"http://127.0.0.1:{port}", home=tmp_path / "here") as terminal:
            terminal.wait_for("demo", "ready", "1 worker × 4 prompts", f"127.0.0.1:{port}")
            terminal.press("+")
            terminal.wait_for("1 worker × 5 prompts")
            terminal.press("3")
            terminal.wait_for("Message. Enter sends")
            terminal.type("What does max_prompts do?")
            terminal.press("Enter")
            terminal.wait_for("tok/s", "TTFT")
            terminal.press("C-q")
            terminal.wait_for("exit code 0")
        assert instance.process.poll() is None
        assert not refuses(port)
    finally:
        assert instance.end() == 0


def test_killing_the_console_takes_its_workers_along(terminal: Terminal) -> None:
    terminal.wait_for("demo", "1 of 1 ready")
    processes = terminal.processes()
    assert _workers(terminal)
    parent = next(process for process in processes if "console" in _command(process))
    parent.kill()
    assert gone(processes)


@pytest.mark.parametrize("size", [(80, 24)])
def test_the_console_works_in_the_smallest_terminal(tmp_path: Path, size: tuple[int, int]) -> None:
    with console("--no-api", home=tmp_path, size=size) as terminal:
        terminal.wait_for("ready", "Workers")
        for key, seen in (("2", "Models"), ("7", "Log"), ("3", "Message. Enter sends")):
            terminal.press(key)
            terminal.wait_for(seen)
        terminal.press("C-q")
        terminal.wait_for("exit code 0")
