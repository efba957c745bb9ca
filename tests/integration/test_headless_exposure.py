"""`ericllm --headless` for other machines: not without a key, or else said in red."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import ROOT, Headless

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RED = "\x1b[1;31m"
OPEN = ("--headless", "--host", "0.0.0.0", "--port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def started() -> Iterator[list[Headless]]:
    running: list[Headless] = []
    yield running
    for server in running:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def status(url: str, key: str = "") -> int:
    """What is answered to who asks for the models."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"X-API-Key": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_without_a_key_it_does_not_listen_for_others_and_says_what_to_do(
    tmp_path: Path, model: Path, started: list[Headless]
) -> None:
    server = Headless(*OPEN, "--model", str(model), home=tmp_path)
    started.append(server)
    assert server.process.wait(timeout=60) == 2
    assert server.process.stderr is not None
    (said,) = [line for line in server.process.stderr.read().splitlines() if line.startswith("ericllm: Not listening")]
    for way in ("ericllm api-keys make", "--api-key", "--no-auth"):
        assert way in said


def test_with_a_key_from_the_command_line_it_does_and_heeds_its_revocation(
    tmp_path: Path, model: Path, started: list[Headless]
) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    def api_keys(*order: str) -> str:
        command = [sys.executable, "-m", "console", "api-keys", *order]
        return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.strip()

    key = api_keys("make", "app")
    server = Headless(*OPEN, "--model", str(model), home=tmp_path)
    started.append(server)
    url = f"http://127.0.0.1:{server.wait_for(r'listening on http://0.0.0.0:([0-9]+)')[1]}"
    server.wait_for("is ready")
    assert (status(url), status(url, key)) == (401, 200)
    other = api_keys("make", "other")
    api_keys("revoke", "app")
    while status(url, other) != 200:
        time.sleep(0.05)
    while status(url, key) != 401:
        time.sleep(0.05)
    assert server.end() == 0


@pytest.mark.parametrize("in_terminal", [True, False])
def test_with_no_auth_it_listens_for_everybody_and_says_so_in_red_where_there_is_red(
    tmp_path: Path, model: Path, started: list[Headless], in_terminal: bool
) -> None:
    ours, theirs = os.openpty() if in_terminal else os.pipe()
    server = Headless(*OPEN, "--no-auth", "--model", str(model), home=tmp_path, stderr=theirs)
    os.close(theirs)
    started.append(server)
    said = ""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while "is ready" not in said:
            said += terminal.read(4096).decode()
        (line,) = [line for line in said.splitlines() if "anyone who can connect to" in line and "ericllm: " in line]
        assert "--no-auth" in line
        assert line.startswith(RED) == in_terminal
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
