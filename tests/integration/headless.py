"""`ericllm` without a screen, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]


def _heed_hang_up() -> None:
    """A test run under nohup hands its ignored SIGHUP down; the server is to see what a terminal gives it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Headless:
    """A headless server; `lines` are what it said on stderr so far. stdout: where that goes, if anybody wants it."""

    def __init__(
        self,
        *flags: str,
        home: Path,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int = subprocess.PIPE,
    ) -> None:
        env = {**os.environ, "XDG_STATE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "console", *flags],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,  # with no terminal, whatever the tests are run in
            preexec_fn=_heed_hang_up,
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read stderr until a line matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"it ended without {pattern!r}: {self.lines}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it; returns its exit code once it is gone."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines()
        return self.process.wait(timeout=60)
