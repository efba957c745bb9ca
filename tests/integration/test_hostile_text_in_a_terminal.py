"""A real console in a real terminal, and everything that strangers can write: none of it reaches the terminal raw."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.ports import free_port
from tests.integration.terminal import console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COPIES = "\x1b]52;c;RVZJTA==\x1b\\"
"""Puts EVIL on the clipboard of whoever looks."""
RAW = [b"]52;c;RVZJTA==\x1b\\", b"\x1b]52", b"\xc2\x9d52", b"\xc2\x9b6n", "\u202e".encode()]
HOSTILE = f"{COPIES}\x9d52;c;RVZJTA==\x9c\x9b6n\u202e[/x][@click=app.quit]"


def ask(port: int, path: str, body: dict[str, object] | None = None, key: str = "") -> int:
    """A request; the status of its answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_no_client_and_no_model_folder_writes_to_the_operators_terminal(tmp_path: Path) -> None:
    port, written = free_port(), tmp_path / "tty"
    folder = tmp_path / "models" / f"evil{HOSTILE.replace('/', '')}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [HOSTILE], "model_type": HOSTILE}))
    flags = ("--port", str(port), "--api-key", "k", "--show-prompts", "--models-dir", str(folder.parent))
    with console(*flags, home=tmp_path, size=(150, 60)) as terminal:
        terminal.wait_for("demo", "1 of 1 ready")
        terminal.record(written)
        assert ask(port, "/z%1b%5d52%3bc%3bRVZJTA%3d%3d%1b%5c%c2%9d52%3bc%3bRVZJTA%3d%3d%c2%9c") == 401
        assert ask(port, "/v1/completions", {"prompt": "x", HOSTILE: 1}, "k") == 400
        assert ask(port, "/v1/completions", {"prompt": HOSTILE, "max_tokens": 3}, "k") == 200
        terminal.press("6")
        terminal.wait_for(r"/z\x1b]52;c;RVZJTA==", "invalid_api_key")
        terminal.press("4")
        terminal.wait_for("length", "1 ended")
        terminal.press("Home", "Enter")
        terminal.wait_for("Prompt", r"\x1b]52;c;RVZJTA==\x1b", "[@click=app.quit]")
        terminal.press("Escape")
        terminal.wait(lambda screen: "app.quit" not in screen, "the request closed")
        terminal.press("2")
        terminal.wait_for("2 models", r"evil\x1b]52;c;")
        terminal.press("Down")
        terminal.press("7")
        terminal.wait_for("Log")
        terminal.press("q")
        terminal.wait_for("exit code 0")
    raw = written.read_bytes()
    assert raw.count(b"RVZJTA==") >= 3, "it was shown"
    assert [sequence for sequence in RAW if sequence in raw] == []
