"""A worker's log records, as events."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from engine.system.files import make_private_folder, private_opener
from engine.system.log import PrintableFormatter
from engine.text.printable import printable_lines
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.protocol import LogLine

# The native output of a child process: kept off the screen, and in the log.

NATIVE_LOGGER = "native"
TAIL_LINES = 40
_MAX_LINE_CHARS = 2000
_READ_BYTES = 1 << 16


_logger = logging.getLogger(__name__)


class NativeOutput:
    """Stdout and stderr of a child process, read here so that they never reach the screen.

    Every line goes to `on_line` as a LogLine, into the tail and into the file at `log_path`; control sequences of a
    terminal become visible escapes, but a carriage return ends a line: progress bars are made of them. Lives on the
    asyncio loop that made it.
    """

    def __init__(self, on_line: Callable[[LogLine], None], log_path: Path | None = None) -> None:
        """Open the pipe. A file that cannot be written is no reason to stop: its lines go to `on_line` all the same."""
        self._on_line = on_line
        self._file = _opened(log_path) if log_path is not None else None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        self._read_fd, self.child_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._read)

    @property
    def tail(self) -> str:
        """The last lines, joined."""
        return "\n".join(self._tail)

    def started(self) -> None:
        """Close our copy of the child's end, once it has its own."""
        os.close(self.child_fd)

    def finish(self) -> None:
        """Read the rest of the pipe after the child's end, and close it."""
        while self._read():
            pass
        self._take_lines("\n")
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        if self._file is not None:
            self._file.close()

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            chunk = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._read_fd)
            return False
        text = printable_lines(self._decoder.decode(chunk).replace("\r", "\n"))
        if self._file is not None:
            self._keep(self._file, text)
        self._take_lines(text)
        return True

    def _keep(self, file: BinaryIO, text: str) -> None:
        """Write to the file; give it up for good where that fails (a full disk)."""
        try:
            file.write(text.encode())
        except OSError as error:
            _logger.warning("writing %s stopped: %s", file.name, error)
            file.close()
            self._file = None

    def _take_lines(self, text: str) -> None:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        if len(self._unfinished) > _MAX_LINE_CHARS:
            lines.append(self._unfinished)
            self._unfinished = ""
        for line in lines:
            if line := line.rstrip()[:_MAX_LINE_CHARS]:
                self._tail.append(line)
                self._on_line(LogLine(level=logging.INFO, logger=NATIVE_LOGGER, message=line))


def _opened(path: Path) -> BinaryIO | None:
    """The file, to append to; None, with a warning, where it cannot be written."""
    try:
        make_private_folder(path.parent)
        return open(path, "ab", buffering=0, opener=private_opener)
    except OSError as error:
        _logger.warning("%s cannot be written; native output goes to the log only: %s", path, error)
        return None


class _ChannelHandler(logging.Handler):
    """Sends records over a worker's channel, a line at a time."""

    def __init__(self, channel: WorkerChannel, thread_id: int | None) -> None:
        super().__init__()
        self._channel = channel
        self._thread_id = thread_id
        self.setFormatter(PrintableFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """logging: send the record, a traceback's lines after it."""
        if self._thread_id is None or record.thread == self._thread_id:
            for line in self.format(record).split("\n"):
                self._channel.send(LogLine(level=record.levelno, logger=record.name, message=line))


@contextlib.contextmanager
def forwarded_logs(channel: WorkerChannel, *, this_thread_only: bool = False) -> Iterator[None]:
    """While inside, log records go to the engine as LogLine events.

    this_thread_only: leave the records of other threads alone, where the worker shares its process.
    """
    handler = _ChannelHandler(channel, threading.get_ident() if this_thread_only else None)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
