"""What libraries write to stderr past Python while a screen is drawn there."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.worker.native import NATIVE_LOGGER

_STDERR = 2
_MAX_LINE = 2000
_LAST_LINES_S = 1.0


@contextmanager
def native_stderr_logged() -> Iterator[None]:
    """Send to the log what libraries and child processes write to this process's stderr, such as a panic: it would
    garble the screen, unfiltered. Python's own stderr stays the terminal, which the screen is drawn in."""
    terminal = os.dup(_STDERR)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)  # who writes may hold what the reader waits for: what finds no room is lost
    os.dup2(write_fd, _STDERR)
    os.close(write_fd)
    reader = threading.Thread(target=_log_lines, args=(read_fd,), name="native-stderr", daemon=True)
    reader.start()
    before = sys.stderr, sys.__stderr__
    encoding = getattr(sys.__stderr__, "encoding", None)
    with open(terminal, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False) as stream:
        sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
        try:
            yield
        finally:
            sys.stderr, sys.__stderr__ = before  # type: ignore[misc]
            os.dup2(terminal, _STDERR)
    os.close(terminal)
    reader.join(_LAST_LINES_S)  # a child process may still have the pipe


def _log_lines(read_fd: int) -> None:
    log = logging.getLogger(NATIVE_LOGGER)
    with open(read_fd, encoding="utf-8", errors="replace") as stream:
        while line := stream.readline(_MAX_LINE):
            if line := line.strip():
                log.warning("%s", line)
