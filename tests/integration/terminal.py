"""A real terminal (tmux) with the real console in it, for tests that press keys and read the screen."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.fakes.kernel_cache import share_kernels

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
LOOK_S = 0.05


class Terminal:
    """One tmux server with one window. `screen` is what a person sees; `press` what they type."""

    def __init__(self, command: Sequence[str], *, size: tuple[int, int], env: dict[str, str]) -> None:
        self._server = f"ericllm-{uuid.uuid4().hex[:8]}"
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        run = f"env -u COLUMNS -u LINES {settings} {shlex.join(command)}"
        line = f"cd {shlex.quote(str(ROOT))} && {run}; echo exit code $?; exec cat"
        self._tmux("new-session", "-d", "-s", "t", "-x", str(size[0]), "-y", str(size[1]), "bash", "-c", line)

    def screen(self) -> str:
        """The text on the screen."""
        return self._tmux("capture-pane", "-p", "-t", "t")

    def record(self, path: Path) -> None:
        """From now on, write to a file every byte that the program writes to its terminal."""
        self._tmux("pipe-pane", "-t", "t", f"cat > {shlex.quote(str(path))}")

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names, one after the other."""
        for key in keys:
            self._tmux("send-keys", "-t", "t", key)

    def type(self, text: str) -> None:
        """Type text as it stands."""
        self._tmux("send-keys", "-t", "t", "-l", text)

    def wait_for(self, *texts: str) -> str:
        """Wait until all of `texts` are on the screen; returns the screen."""
        return self.wait(lambda screen: all(text in screen for text in texts), f"{texts} on the screen")

    def wait(self, met: Callable[[str], bool], what: str) -> str:
        """Wait until `met(screen)`; fails with the screen as it was last."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            screen = self.screen()
            if met(screen):
                return screen
            if time.monotonic() > deadline:
                raise AssertionError(f"not seen in {PATIENCE_S:.0f} s: {what}. The screen:\n{screen}")
            time.sleep(LOOK_S)

    def processes(self) -> list[psutil.Process]:
        """The console and everything it started."""
        pane = int(self._tmux("display-message", "-p", "-t", "t", "#{pane_pid}"))
        return psutil.Process(pane).children(recursive=True)

    def close(self) -> None:
        """End the terminal and what runs in it."""
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True, check=False)

    def _tmux(self, *arguments: str) -> str:
        result = subprocess.run(["tmux", "-L", self._server, *arguments], capture_output=True, text=True, check=True)
        return result.stdout


@contextmanager
def console(
    *flags: str, home: Path, size: tuple[int, int] = (120, 36), env: dict[str, str] | None = None
) -> Iterator[Terminal]:
    """The real `ericllm` in a terminal, with folders of its own but for compiled kernels."""
    settings = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    share_kernels(home / "cache")
    settings |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    terminal = Terminal([sys.executable, "-m", "console", *flags], size=size, env=settings | (env or {}))
    try:
        yield terminal
    finally:
        terminal.close()
