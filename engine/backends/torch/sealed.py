"""Memory that one process fills and others map: nameless files in RAM, found through /proc, sealed once complete.

Nothing of it is on any disk, so nothing is left behind however its users end: the kernel frees such a file with the
last process that has it open or mapped. A seal makes it unchangeable for everybody, its writer included, and is what
tells a complete file from one whose writer is still at it or was killed. Linux alone has them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.backends.torch.huge_pages import LARGE_PAGE_BYTES, FileMapping

_PROCESSES = Path("/proc")
_WINDOW_BYTES = 1 << 30
_ALIGNMENT = 64
_POLL_S = 0.02


class SealedFile:
    """A file of RAM, open for reading, that nobody can change any more."""

    def __init__(self, fd: int) -> None:
        self._mapping = FileMapping(fd, os.fstat(fd).st_size)

    @classmethod
    def find(cls, name: str) -> SealedFile | None:
        """The complete file of that name that some process of this user holds, or None."""
        for path in _open_files(f"/memfd:{name} (deleted)"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # its holder has just ended
                continue
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _is_sealed(fd):
                    return cls(fd)
            finally:
                os.close(fd)
        return None

    @property
    def memory(self) -> memoryview:
        """All of it, mapped read-only. It stays mapped, and can be found by others, while this is used."""
        return self._mapping.view

    def enlarge_pages(self) -> None:
        """Have it backed by large pages: its writer had them made, now this process's table says so."""
        self._mapping.enlarge_pages(len(self._mapping.view))


class UnsealedFile:
    """A file of RAM that is being written, piece by piece, each of which can be read at once.

    Its methods raise OSError where the system has no such files or no memory.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._window: FileMapping | None = None
        self._window_start = self._window_end = self._end = 0
        self._small: list[tuple[FileMapping, int]] = []

    def append(self, piece: memoryview) -> tuple[memoryview, int, int]:
        """Add a piece. Returns a mapping in which it lies, where in that, and where in the file."""
        window, start = self._room(piece.nbytes)
        written = 0
        while written < piece.nbytes:
            written += os.pwrite(self._fd, piece[written:], start + written)
        self._end = start + piece.nbytes
        return window.view, start - self._window_start, start

    def reserve(self, size_bytes: int) -> tuple[memoryview, int, int]:
        """Add a piece that is yet to be written, by kernels, where it lies; the same of it. It has its memory already:
        to find none while writing would be fatal."""
        window, start = self._room(size_bytes)
        os.posix_fallocate(self._fd, start, size_bytes)
        self._end = start + size_bytes
        return window.view, start - self._window_start, start

    def seal(self) -> None:
        """Let nothing be changed from now on, and others find it."""
        os.truncate(self._fd, self._end)
        self._close_window()
        fcntl.fcntl(
            self._fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
        )

    def enlarge_pages(self) -> None:
        """Have what was mapped so far, but for the window that is open, backed by large pages."""
        for mapping, size_bytes in self._small:
            mapping.enlarge_pages(size_bytes)
        self._small.clear()

    def close(self) -> None:
        """Write no more. What was mapped stays, and can be found if it was sealed. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _room(self, size_bytes: int) -> tuple[FileMapping, int]:
        """A mapping with so much room at the end, and where in the file that is."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._window is None or start + size_bytes > self._window_end:
            start = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
            self._open_window(start, max(_WINDOW_BYTES, size_bytes))
        assert self._window is not None
        return self._window, start

    def _open_window(self, start: int, size_bytes: int) -> None:
        """Map ahead of the end, which costs nothing, so that many pieces share a mapping."""
        self._close_window()
        reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.truncate(self._fd, max(start + size_bytes, os.fstat(self._fd).st_size))
            self._window = FileMapping(reader, size_bytes, start, writer=self._fd)
        finally:
            os.close(reader)
        self._window_start, self._window_end = start, start + size_bytes

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.end_writing()
            self._small.append((self._window, self._end - self._window_start))
            self._window = None


@contextmanager
def alone(folder: Path, cancelled: Callable[[], bool], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be the only process inside this for that folder; returns early, not alone, once `cancelled()` is true. `waiting`
    is called several times a second while another process is inside.

    The kernel lets go of the lock when its holder dies. On a file system without locks, all are let in.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not cancelled():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted


def _open_files(target: str) -> Iterator[Path]:
    """Every descriptor of this user's processes that leads to `target`, as a path that opens the same file."""
    for process in _PROCESSES.iterdir():
        try:
            if not process.name.isdecimal() or process.stat().st_uid != os.geteuid():
                continue
            descriptors = list((process / "fd").iterdir())
        except OSError:  # it has just ended, or is none of ours
            continue
        for descriptor in descriptors:
            try:
                found = str(descriptor.readlink()) == target
            except OSError:
                continue
            if found:
                yield descriptor
