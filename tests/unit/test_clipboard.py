"""Copying: to the terminal, through tmux, and to this machine's own clipboard where there is one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App

from console.tui import clipboard
from console.tui.clipboard import copy, native_command, osc_52, through_tmux
from console.tui.stylesheet import StyledApp


def there(*programs: str) -> Callable[[str], str | None]:
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def test_osc_52_holds_the_text_in_base64_and_a_text_too_long_for_a_terminal_is_not_sent() -> None:
    sequence = osc_52("häh\n")
    assert sequence is not None
    assert base64.b64decode(sequence.removeprefix("\x1b]52;c;").removesuffix("\a")).decode() == "häh\n"
    assert osc_52("x" * 100_000) is None


def test_tmux_is_asked_to_pass_the_sequence_on() -> None:
    assert through_tmux("\x1b]52;c;eA==\a") == "\x1bPtmux;\x1b\x1b]52;c;eA==\a\x1b\\"


@pytest.mark.parametrize(
    ("environ", "programs", "platform", "command"),
    [
        ({"WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":0"}, ["wl-copy", "xclip"], "linux", "wl-copy"),
        ({"WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":0"}, ["xclip"], "linux", "xclip"),
        ({"DISPLAY": ":0"}, ["xsel"], "linux", "xsel"),
        ({}, ["wl-copy", "xclip", "xsel"], "linux", None),
        ({"TMUX": "/tmp/tmux"}, ["tmux"], "linux", "tmux"),
        ({}, ["pbcopy"], "darwin", "pbcopy"),
    ],
)
def test_the_native_clipboard_is_the_one_that_this_session_shows(
    environ: dict[str, str], programs: list[str], platform: str, command: str | None
) -> None:
    found = native_command(environ, there(*programs), platform)
    assert (found[0] if found else None) == command


async def test_a_long_text_still_reaches_the_native_clipboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    monkeypatch.setattr(clipboard, "native_command", lambda: ["sh", "-c", f"cat > {taken}"])
    app: App[None] = App()
    assert await copy(app, "x" * 200_000)
    assert taken.read_text() == "x" * 200_000
    assert app.clipboard == ""


async def test_nothing_that_ends_a_paste_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    monkeypatch.setattr(clipboard, "native_command", lambda: ["sh", "-c", f"cat > {taken}"])
    app = StyledApp()
    answer = "if x:\r\n\ty \u200fשלום\x1b[201~\x9b201~\x00\x7f\ud800\n"
    clean = "if x:\n\ty \u200fשלום[201~201~\n"
    assert await copy(app, answer)
    assert (app.clipboard, taken.read_text()) == (clean, clean)
    app.copy_to_clipboard(answer)
    assert app.clipboard == clean


async def test_a_long_text_that_nothing_takes_is_not_said_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    app: App[None] = App()
    for command in (None, ["false"], ["/no/such/program"]):
        monkeypatch.setattr(clipboard, "native_command", lambda command=command: command)
        assert not await copy(app, "x" * 200_000)
        assert await copy(app, "short")
    assert app.clipboard == "short"
