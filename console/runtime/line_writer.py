"""Lines into a file, written by a thread of its own: a slow disk or a pipe without a reader delays nothing.

A file that grows too long is put aside (FILE.1, the newest, up to FILE.4); one that another program moved away is begun
again. So it goes with logrotate and without.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from engine.system.files import make_private_folder, private_opener
from engine.system.slow_disk import writes

log = logging.getLogger(__name__)

KEPT_FILES = 4
_WAITING_LINES = 50_000
_LINES_AT_ONCE = 1_000
_STOP_S = 5.0
_END = object()
_STDOUT = 1


class LineWriter:
    """Appends to `path`, or writes to stdout where that is None. Safe from any thread.

    encode: makes a line, without its end, of what was put in; called on the writer's thread.
    lost: lines that could not be written, or would not fit in the queue any more.
    """

    def __init__(self, path: Path | None, encode: Callable[[object], bytes], *, max_bytes: int) -> None:
        self.lost = 0
        self._path = path
        self._encode = encode
        self._max_bytes = max_bytes
        self._lines: queue.Queue[object] = queue.Queue(_WAITING_LINES)
        self._file: FileIO | None = None
        self._complained = False
        self._thread = threading.Thread(target=self._work, name="lines", daemon=True)

    def open(self) -> None:
        """Begin. Raises OSError where the file cannot be written."""
        self._file = self._open_file()
        self._thread.start()

    def put(self, line: object) -> None:
        """Write a line soon."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1
            writes.lost(self._path)

    def close(self) -> None:
        """Write what is left, within seconds."""
        with suppress(queue.Full):
            self._lines.put(_END, timeout=_STOP_S)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.warning("%s cannot be written: %d lines lost", self._path or "stdout", self.lost + self._lines.qsize())
        elif self._file is not None and self._path is not None:
            self._file.close()

    def _work(self) -> None:
        lines: list[object] = []
        while _END not in lines:
            lines = [self._lines.get()]
            while len(lines) < _LINES_AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get_nowait())
            if encoded := [self._encode_line(line) for line in lines if line is not _END]:
                self._write(b"".join(encoded), len(encoded))

    def _encode_line(self, line: object) -> bytes:
        """With its end; nothing where it cannot be: one bad line does not end the writing."""
        try:
            return self._encode(line) + b"\n"
        except Exception:
            self.lost += 1
            log.exception("writing a line failed")
            return b""

    def _write(self, data: bytes, lines: int) -> None:
        try:
            with writes.timed(self._path):
                file = self._ready_for(len(data))
                while data:
                    data = data[file.write(data) :]
            self._complained = False
        except OSError as error:
            self.lost += lines
            if not self._complained:
                log.warning("%s cannot be written: %s", self._path or "stdout", error.strerror or error)
            self._complained = True

    def _ready_for(self, size: int) -> FileIO:
        """Return the file, a new one where it was moved away or would grow too long."""
        if self._path is None:
            return self._file or self._open_file()
        if self._file is not None and not _is_at(self._file, self._path):
            self._file.close()
            self._file = None
        if self._file is not None and 0 < os.fstat(self._file.fileno()).st_size > self._max_bytes - size:
            mode = stat.S_IMODE(os.fstat(self._file.fileno()).st_mode)  # readers of the old one may read the new one
            self._file.close()
            self._file = None
            _put_aside(self._path)
            self._file = self._open_file()
            os.fchmod(self._file.fileno(), mode)
        self._file = self._file or self._open_file()
        return self._file

    def _open_file(self) -> FileIO:
        if self._path is None:
            return open(_STDOUT, "wb", buffering=0, closefd=False)
        make_private_folder(self._path.parent)
        return open(self._path, "ab", buffering=0, opener=private_opener)


def _is_at(file: FileIO, path: Path) -> bool:
    """Return whether the path still leads to that file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _put_aside(path: Path) -> None:
    for number in range(KEPT_FILES, 0, -1):
        older = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number}"))
