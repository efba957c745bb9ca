"""Large pages for memory whose reads would be slowed down by address translation of 4 KiB pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import warnings
import weakref
from functools import cache

import torch
from torch import Tensor

LARGE_PAGE_BYTES = 2 << 20

_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1, which Python does not name."""

_NO_ACCESS, _FIXED, _NORESERVE = 0, 0x10, 0x4000
"""PROT_NONE, MAP_FIXED and MAP_NORESERVE."""

_FAILED = ctypes.c_void_p(-1).value


class FileMapping:
    """A mapping of a RAM file, aligned so that large pages can back it, which other processes' mappings share.

    fd: opened read-only.  offset: a multiple of LARGE_PAGE_BYTES.  writer: a writable descriptor of the same file,
    through which kernels may write until `end_writing`.  view: read-only; while it or a slice of it is used, the
    mapping and the file stay open. Linux only; raises OSError.
    """

    def __init__(self, fd: int, size_bytes: int, offset: int = 0, *, writer: int | None = None) -> None:
        room_bytes = size_bytes + LARGE_PAGE_BYTES
        room = _mmap(room_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._address, self._offset = -(-room // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, offset
        try:
            self._map(size_bytes, fd, writer)
            self._fd = own_fd = os.dup(fd)
        except OSError:
            _libc().munmap(room, room_bytes)
            raise
        memory = (ctypes.c_char * size_bytes).from_address(self._address)
        weakref.finalize(memory, _release, room, room_bytes, own_fd).atexit = False  # threads may still read it at exit
        self.view = memoryview(memory).toreadonly()

    def end_writing(self) -> None:
        """Remap the same bytes read-only, as a seal requires. Raises OSError."""
        self._map(len(self.view), self._fd)

    def enlarge_pages(self, end: int) -> threading.Thread | None:
        """Back the bytes before `end` with large pages, as far as the system can.

        That is slower than copying them, so a thread does it while they are used already; None where there is no whole
        page.
        """
        size_bytes = min(end, len(self.view)) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        if size_bytes <= 0:
            return None
        thread = threading.Thread(target=self._enlarge, args=(size_bytes,), name="large pages", daemon=True)
        thread.start()
        return thread

    def advise_large_pages(self) -> None:
        """Have bytes that are written first from now on lie in large pages, where the system gives files those
        (shmem_enabled). Before Linux 6.1 there is no other way to them."""
        _libc().madvise(self._address, len(self.view), mmap.MADV_HUGEPAGE)

    def collapse(self) -> bool:
        """Back all bytes with large pages now, of which some must exist; return whether all are allocated by that."""
        size_bytes = len(self.view)
        return size_bytes % LARGE_PAGE_BYTES == 0 and self._enlarge(size_bytes)

    def _map(self, size_bytes: int, fd: int, writer: int | None = None) -> None:
        fd, access = (fd, mmap.PROT_READ) if writer is None else (writer, mmap.PROT_READ | mmap.PROT_WRITE)
        _mmap(size_bytes, access, mmap.MAP_SHARED | _FIXED, fd, self._offset, at=self._address)

    def _enlarge(self, size_bytes: int) -> bool:
        failed: int = _libc().madvise(self._address, size_bytes, _COLLAPSE)
        return not failed


def shared_tensor(memory: memoryview) -> Tensor:
    """Return the bytes of a mapping, which lives as long as the tensor; to be written to only where that was mapped for
    it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def advise_huge_pages(memory: Tensor) -> Tensor:
    """Ask Linux to back `memory`, newly allocated in RAM and untouched, with pages of 2 MiB, and return it.

    Where the system has none, only speed is lost.
    """
    if sys.platform == "linux" and memory.device.type == "cpu":
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.data_ptr() + memory.numel() * memory.itemsize - start
        if size > 0:
            _libc().madvise(start, size, mmap.MADV_HUGEPAGE)
    return memory


def _release(address: int, size_bytes: int, fd: int) -> None:
    _libc().munmap(address, size_bytes)
    os.close(fd)


def _mmap(size_bytes: int, access: int, flags: int, fd: int = -1, offset: int = 0, *, at: int | None = None) -> int:
    address: int = _libc().mmap(at, size_bytes, access, flags, fd, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    libc.munmap.argtypes, libc.munmap.restype = (address, size), number
    libc.madvise.argtypes, libc.madvise.restype = (address, size, number), number
    return libc
