"""LogRing: the last lines of every part, for the console's log screen. Thread-safe.

The engine writes to `logging` like everybody else; the program that runs it adds a RingHandler where it wants a ring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from engine.snapshot import LogEntry
from engine.text.printable import printable, printable_lines

RING_LINES = 5000
MAX_LINE = 2000
"""Characters of a line that the ring keeps; the log file has it whole."""


class LogRing:
    """The newest `capacity` lines and how many there ever were."""

    def __init__(self, capacity: int = RING_LINES) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=capacity)
        self._total = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Lines ever appended."""
        return self._total

    def append(self, level: int, source: str, message: str) -> None:
        """Add a line. level: as in `logging`."""
        self.add(LogEntry(at=time.time(), level=level, source=source, message=message))

    def add(self, entry: LogEntry) -> None:
        """Add a line that another ring had, cut where it is too long."""
        if max(len(entry.source), len(entry.message)) > MAX_LINE:
            entry = msgspec.structs.replace(
                entry, source=entry.source[:MAX_LINE], message=entry.message[:MAX_LINE] + "…"
            )
        with self._lock:
            self._entries.append(entry)
            self._total += 1

    def after(self, seen: int) -> tuple[int, Sequence[LogEntry]]:
        """The total so far, and the lines after the first `seen` ones, as far as they are still kept."""
        with self._lock:
            new = min(max(0, self._total - seen), len(self._entries))
            return self._total, tuple(islice(self._entries, len(self._entries) - new, None))


class PrintableFormatter(logging.Formatter):
    """Writes a record as one line, a traceback's lines after it; what a terminal would obey is a visible escape."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line: a newline in what it quotes begins no other."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and those of the traceback."""
        return printable_lines(super().format(record))


class RingHandler(logging.Handler):
    """Feeds a LogRing from `logging`. The source is the record's `source` (given as `extra`) or its logger's name."""

    def __init__(self, ring: LogRing, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record's message, with its exception in one line if it carries one."""
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message = f"{message}: {record.exc_info[1]!r}"
            self._ring.append(record.levelno, getattr(record, "source", record.name), printable(message))
        except Exception:  # as logging asks: a broken record must not break its caller
            self.handleError(record)
