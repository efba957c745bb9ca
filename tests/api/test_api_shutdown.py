"""The real headless command under SIGTERM: what runs may end, what comes is turned away, a second signal hurries."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.paced import FACTORY, PACE_FILE
from tests.fakes.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
TOKENS = 6
USAGE = {"include_usage": True}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Command:
    """`ericllm --headless` with a backend that the test paces. url: where it listens."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._pace = folder / "pace"
        self._pace.touch()
        env = {
            **os.environ,
            "XDG_STATE_HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "ERICLLM_BACKEND_FACTORY": FACTORY,
            PACE_FILE: str(self._pace),
        }
        model = make_tiny_model(folder / "tiny")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "console", "--headless", "--model", str(model), "--port", "0", *flags],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.wait_for(r"listening on (http://\S+)")[1]
        self.wait_for("is ready")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read stderr until a line matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"it ended without {pattern!r}")

    def step(self, count: int) -> None:
        """Allow `count` more steps."""
        with self._pace.open("ab") as file:
            file.write(b"." * count)

    def stream(self) -> HTTPResponse:
        """A stream of TOKENS tokens, begun: its first token has come."""
        self.step(1)
        response = self.open("/v1/completions", prompt="x", max_tokens=TOKENS, stream=True, stream_options=USAGE)
        while (line := response.readline()).startswith(b":") or line == b"\n":
            pass  # comments on a prompt that takes a second
        assert b'"text":' in line
        return response

    def open(self, path: str, **body: Any) -> HTTPResponse:
        """The answer to a POST, or to a GET where there is no body."""
        content = json.dumps(body).encode() if body else None
        response = urllib.request.urlopen(urllib.request.Request(self.url + path, data=content), timeout=PATIENCE_S)
        assert isinstance(response, HTTPResponse)
        return response

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused with 503."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.open(path, **body)
        assert caught.value.code == 503
        return dict(json.load(caught.value)["error"])

    def terminate(self) -> None:
        """Send SIGTERM; returns when it was heard."""
        self.process.send_signal(signal.SIGTERM)
        self.wait_for("stopping")

    def ended(self) -> int:
        """Its exit code, once it is gone."""
        return self.process.wait(timeout=PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts the command with more flags."""
    running: list[Command] = []

    def starting(*flags: str) -> Command:
        running.append(Command(tmp_path, *flags))
        return running[-1]

    yield starting
    for command in running:
        if command.process.poll() is None:
            command.process.kill()
        command.process.wait()


def events(stream: HTTPResponse) -> list[Any]:
    """What is left of a stream, pings left out."""
    frames = [line.removeprefix(b"data: ").strip() for line in stream if line.startswith(b"data: ")]
    return [frame.decode() if frame == b"[DONE]" else json.loads(frame) for frame in frames]


def test_a_stream_under_way_ends_whole_while_new_requests_are_turned_away(start: Any) -> None:
    command = start()
    stream = command.stream()
    command.terminate()
    error = command.refused("/v1/completions", prompt="y", max_tokens=1)
    assert (error["type"], error["code"]) == ("server_error", "engine_closed")
    assert command.refused("/ready")["code"] == "engine_closed"
    with command.open("/health") as health:
        assert json.load(health)["status"] == "draining"
    command.step(TOKENS - 1)
    rest = events(stream)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["usage"]["completion_tokens"] == TOKENS
    assert rest[-3]["choices"][0]["finish_reason"] == "length"
    assert command.ended() == 0
    address = command.url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[1])), timeout=PATIENCE_S)


def test_a_signal_to_all_processes_at_once_drains_as_one_to_the_server_does(start: Any) -> None:
    command = start()
    stream = command.stream()
    for worker in psutil.Process(command.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one of those that come and go
            worker.terminate()
    command.terminate()
    command.step(TOKENS - 1)
    rest = events(stream)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["usage"]["completion_tokens"] == TOKENS
    assert command.ended() == 0
    assert command.process.stderr is not None
    assert "restarted" not in command.process.stderr.read()


def test_a_second_signal_ends_it_at_once_and_tells_the_client(start: Any) -> None:
    command = start("--drain-seconds", "600")
    stream = command.stream()
    command.terminate()
    command.process.send_signal(signal.SIGTERM)
    rest = events(stream)
    assert rest[-1]["error"]["code"] == "engine_closed"
    assert command.ended() == 0


def test_what_takes_longer_than_the_drain_is_cut_with_an_error_event(start: Any) -> None:
    command = start("--drain-seconds", "0.2")
    stream = command.stream()
    command.terminate()
    rest = events(stream)
    assert rest[-1]["error"]["code"] == "engine_closed"
    assert "[DONE]" not in rest
    assert command.ended() == 0
