"""Where log lines go: the engine's ring, which screens read, a file, and stderr where there is no screen."""

from __future__ import annotations

import fcntl
import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

from console.settings.schema import LogLevel, log_dir
from engine.system.files import make_private_folder, private_opener
from engine.system.log import LogRing, PrintableFormatter, RingHandler
from engine.system.slow_disk import writes
from engine.text.printable import printable

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_WAITING_LINES = 10_000
_LAST_LINES_S = 2.0
_MAX_INSTANCES = 100
_QUIET = ("asyncio", "aiohttp.access", "httpx", "huggingface_hub", "filelock", "urllib3")


@contextmanager
def own_log_folder() -> Iterator[Path]:
    """A folder for the logs of this program and its workers, which no other that runs writes to: `log_dir()`, or next
    to it log-2, log-3, ... while others have those before. The first, where none can be locked."""
    first = log_dir()
    with ExitStack() as stack:
        for folder in (first, *(first.with_name(f"{first.name}-{number}") for number in range(2, _MAX_INSTANCES))):
            try:
                make_private_folder(folder)
                lock = stack.enter_context(open(folder / "lock", "wb", opener=private_opener))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                break
            yield folder
            return
        yield first


@contextmanager
def logging_to(
    ring: LogRing, folder: Path | None, *, level: LogLevel = "info", stderr: LogLevel | None = None
) -> Iterator[None]:
    """Send this program's log from `level` on to `ring` and to `folder`/ericllm.log where it can be written, and what
    is of the level `stderr` or above there too.

    File and stderr are written by a thread of their own: a slow disk or a pipe without a reader delays nothing.
    """
    slow = _file_handler(folder) if folder is not None else []
    if stderr is not None:
        slow.append(logging.StreamHandler(sys.stderr))
        slow[-1].setLevel(stderr.upper())
    for handler in slow:
        handler.setFormatter(logging.Formatter(_FORMAT))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING_LINES)
    listener = QueueListener(lines, *slow, respect_handler_level=True)
    root, handlers = logging.getLogger(), (RingHandler(ring), _DroppingHandler(lines))
    before = root.level
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
        _stop(listener)


class _DroppingHandler(QueueHandler):
    """Hands lines to the thread that writes them; drops them while that thread is stuck (a pipe without a reader)."""

    def __init__(self, lines: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(lines)
        self.setFormatter(PrintableFormatter())

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record for the other thread: the sentence as it is now, fit for a terminal. Every request has one:
        plain ones are not copied: handlers that come later read the same in them."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().prepare(record)  # type: ignore[no-any-return]
        record.msg, record.args = printable(record.getMessage()), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


class _PrivateFileHandler(RotatingFileHandler):
    """Makes files that no other user may read. A file that cannot be written is reported once, and not on stderr."""

    _complained = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, timed."""
        with writes.timed(Path(self.baseFilename)):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._complained:
            self._complained = True
            log.warning("%s cannot be written: %s", self.baseFilename, sys.exc_info()[1])

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=private_opener)


def _stop(listener: QueueListener) -> None:
    """Write what is left, but do not wait for a reader that never comes."""
    stopping = threading.Thread(target=listener.stop, daemon=True)
    stopping.start()
    stopping.join(_LAST_LINES_S)


def _file_handler(folder: Path) -> list[logging.Handler]:
    try:
        make_private_folder(folder)
        return [_PrivateFileHandler(folder / "ericllm.log", maxBytes=4 * 2**20, backupCount=2, encoding="utf-8")]
    except OSError:
        return []
