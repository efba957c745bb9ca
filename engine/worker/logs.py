"""A worker's log records, as events."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from engine.log import PrintableFormatter
from engine.worker.channel import WorkerChannel
from engine.worker.protocol import LogLine


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
