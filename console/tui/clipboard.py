"""Copying out of the terminal: OSC 52 to the terminal itself, and this machine's own clipboard where there is one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping

from textual.app import App

from engine.system.child_process import child_environment

OSC_52_LIMIT = 100_000
"""Characters of base64; terminals drop longer sequences without a word."""
NATIVE_TIMEOUT_S = 2.0
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def pasteable(text: str) -> str:
    """Return `text` without the controls that a terminal obeys when it is pasted into one: one of them ends the paste,
    and what follows is typed. Letters of any script stay, with what turns them around."""
    return _CONTROLS.sub("", text)


def osc_52(text: str) -> str | None:
    """The sequence that hands `text` to a terminal; None where that is too long for one."""
    encoded = base64.b64encode(text.encode()).decode()
    return f"\x1b]52;c;{encoded}\a" if len(encoded) <= OSC_52_LIMIT else None


def through_tmux(sequence: str) -> str:
    """The sequence as tmux passes it on to the terminal that it runs in."""
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def native_command(
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    platform: str = sys.platform,
) -> list[str] | None:
    """The program that takes text for this machine's clipboard on its standard input, None where there is none."""
    ways: list[tuple[bool, list[str]]] = [
        (platform == "darwin", ["pbcopy"]),
        (bool(environ.get("WAYLAND_DISPLAY")), ["wl-copy"]),
        (bool(environ.get("DISPLAY")), ["xclip", "-selection", "clipboard"]),
        (bool(environ.get("DISPLAY")), ["xsel", "--clipboard", "--input"]),
        (bool(environ.get("TMUX")), ["tmux", "load-buffer", "-w", "-"]),
    ]
    return next((command for there, command in ways if there and which(command[0])), None)


async def copy(app: App[object], text: str) -> bool:
    """Copy in every way there is; False where the text is too long for the terminal and nothing else took it."""
    text = pasteable(text)
    sequence = osc_52(text)
    if sequence is not None:
        app.copy_to_clipboard(text)
        if os.environ.get("TMUX") and app._driver is not None:
            app._driver.write(through_tmux(sequence))
    command = native_command()
    native = await _hand_over(command, text) if command is not None else False
    return sequence is not None or native


async def _hand_over(command: list[str], text: str) -> bool:
    """Give `text` to a program; it may stay behind to serve the clipboard, so its end is not waited for long."""
    nowhere = asyncio.subprocess.DEVNULL
    try:
        program = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=nowhere, stderr=nowhere, env=child_environment()
        )
    except OSError:
        return False
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(program.communicate(text.encode()), NATIVE_TIMEOUT_S)
    if program.returncode is None:
        program.kill()
        await program.wait()
        return False
    return program.returncode == 0
