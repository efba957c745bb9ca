"""`ericllm top`, `record`, `replay` and `attach` as a person runs them, on a real headless instance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.link.recording.reader import Recording
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import ROOT, Headless
from tests.integration.terminal import console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NOBODY = "127.0.0.1:9"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A headless instance with a key."""
    home = tmp_path_factory.mktemp("home")
    model = make_tiny_model(home / "models" / "tiny")
    record = ("--record", str(home / "own.rec"))
    server = Headless("--headless", "--model", str(model), "--port", "0", "--api-key", "sesame", *record, home=home)
    found = server.wait_for(r"listening on (http://\S+)")[1]
    server.wait_for("is ready")
    yield found
    assert server.end() == 0
    assert Recording(home / "own.rec").frame(0).snapshot.at > 0


def ericllm(*arguments: str, key: str | None = "sesame") -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ERICLLM_")}
    env |= {} if key is None else {"ERICLLM_API_KEY": key}
    return subprocess.run(
        [sys.executable, "-m", "console", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_top_says_how_an_instance_is_in_one_line(url: str) -> None:
    done = ericllm("top", url)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    for words in (url.removeprefix("http://"), "tiny ready", "1/1 workers", "tok/s", "TTFT p95", "ITL p95", "KV 0%"):
        assert words in line, (words, line)


def test_top_goes_on_and_speaks_json(url: str) -> None:
    done = ericllm("top", url, "--json", "--interval", "0.1", "--count", "3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 3
    assert {(line["model"], line["state"], line["workers_ready"]) for line in lines} == {("tiny", "ready", 1)}
    assert lines[0]["devices"][0]["total_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (("top", NOBODY), None, "127.0.0.1:9 cannot be reached: connection refused"),
        (("record", "night.rec", NOBODY), None, "127.0.0.1:9 cannot be reached: connection refused"),
        (("top", "{url}"), "wrong", "The API key is not valid"),
        (("top", "{url}"), None, "This server needs an API key"),
    ],
)
def test_what_cannot_be_reached_is_one_sentence_and_exit_code_1(
    url: str, tmp_path: Path, arguments: tuple[str, ...], key: str | None, said: str
) -> None:
    done = ericllm(*(part.format(url=url).replace("night", str(tmp_path / "night")) for part in arguments), key=key)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"ericllm: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("top", "ftp://x"), "is not the URL of an instance"),
        (("top", "--interval", "soon"), "soon is not a number between"),
        (("attach", "http://user@host"), "is more than the URL of an instance"),
        (("replay", "pyproject.toml"), "is not a recording of ericllm"),
        (("replay", "nothing.rec"), "No such file: nothing.rec"),
        (("attach", NOBODY), "is not a terminal"),
        (("--headless", "--read-only"), "--read-only has no effect with --headless"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = ericllm(*arguments, key=None)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_what_was_recorded_is_replayed_in_a_terminal(url: str, tmp_path: Path) -> None:
    night = tmp_path / "night.rec"
    frames = [0]
    for _ in range(2):
        done = ericllm("record", str(night), url, "--seconds", "2.5", "--interval", "0.5")
        assert done.returncode == 0, done.stderr
        frames.append(len(Recording(night).times))
    assert frames[0] < frames[1] < frames[2]
    with console("replay", str(night), home=tmp_path) as terminal:
        terminal.wait_for("night.rec", "recording", "tiny")
        terminal.press("End")
        terminal.wait_for("ended")
        terminal.press("Home", "Space")
        terminal.wait_for("paused")
        terminal.press("Home")
        terminal.wait_for("0:00 of", "paused")
        terminal.press("Space")
        terminal.wait(lambda screen: "playing ×1" in screen or "ended" in screen, "the recording going on")
        terminal.press("q")
        terminal.wait_for("exit code 0")


def test_a_console_attaches_in_a_terminal_and_changes_what_is_there(url: str, tmp_path: Path) -> None:
    name = url.removeprefix("http://")
    with console("attach", url, "--api-key", "sesame", home=tmp_path) as terminal:
        terminal.wait_for(name, "tiny", "ready")
        terminal.press("-")
        terminal.wait_for("15 prompts")
        terminal.press("3")
        terminal.wait_for("Message. Enter sends")
        terminal.type("hello")
        terminal.press("Enter")
        terminal.wait_for("tok/s", "TTFT")
        terminal.press("F1")
        terminal.wait_for("Devices")
        terminal.press("q")
        terminal.wait_for("exit code 0")
    line = json.loads(ericllm("top", url, "--json").stdout)
    assert line["max_prompts"] == 15
