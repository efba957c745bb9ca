"""Memory that is read in no order, or faster than the processor finds its 4 KiB pages: backed by larger ones."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from functools import cache

from torch import Tensor

LARGE_PAGE_BYTES = 2 << 20

_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1, which Python has no name for."""

_NO_ACCESS, _FIXED, _NORESERVE = 0, 0x10, 0x4000
"""PROT_NONE, MAP_FIXED and MAP_NORESERVE."""

_FAILED = ctypes.c_void_p(-1).value


class FileMapping:
    """Bytes of a file of RAM, mapped where large pages can back them: whoever else maps them so shares those.

    fd: opened for reading alone.  offset: a multiple of LARGE_PAGE_BYTES.  writer: a descriptor of the same file that
    can write, through which kernels may write here until `end_writing`.  view: all of them, for reading. They stay
    mapped, and the file open, as long as it, or a part of it, is used. Linux only; raises OSError where they cannot be
    mapped.
    """

    def __init__(self, fd: int, size_bytes: int, offset: int = 0, *, writer: int | None = None) -> None:
        room_bytes = size_bytes + LARGE_PAGE_BYTES
        room = _mapped(room_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._address, self._offset = -(-room // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, offset
        try:
            self._map(size_bytes, fd, writer)
            self._fd = held = os.dup(fd)
        except OSError:
            _system().munmap(room, room_bytes)
            raise
        memory = (ctypes.c_char * size_bytes).from_address(self._address)
        weakref.finalize(memory, _release, room, room_bytes, held).atexit = False  # threads may still compute with it
        self.view = memoryview(memory).toreadonly()

    def end_writing(self) -> None:
        """Map the same bytes at the same place for reading alone, as a seal demands. Raises OSError."""
        self._map(len(self.view), self._fd)

    def enlarge_pages(self, end: int) -> threading.Thread | None:
        """Have what lies before `end` backed by large pages, as far as the system can.

        That takes longer than copying it, so a thread sees to it while the bytes are used already; None where there is
        not a single page to make.
        """
        size_bytes = min(end, len(self.view)) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        if size_bytes <= 0:
            return None
        enlarging = threading.Thread(target=self._enlarge, args=(size_bytes,), name="large pages", daemon=True)
        enlarging.start()
        return enlarging

    def _map(self, size_bytes: int, fd: int, writer: int | None = None) -> None:
        fd, access = (fd, mmap.PROT_READ) if writer is None else (writer, mmap.PROT_READ | mmap.PROT_WRITE)
        _mapped(size_bytes, access, mmap.MAP_SHARED | _FIXED, fd, self._offset, at=self._address)

    def _enlarge(self, size_bytes: int) -> None:
        _system().madvise(self._address, size_bytes, _COLLAPSE)


def advise_huge_pages(memory: Tensor) -> Tensor:
    """`memory` itself, newly made in RAM and not yet touched, which Linux is asked to back with pages of 2 MiB.

    That the system keeps them off changes nothing but speed.
    """
    if sys.platform == "linux" and memory.device.type == "cpu":
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.data_ptr() + memory.numel() * memory.itemsize - start
        if size > 0:
            _system().madvise(start, size, mmap.MADV_HUGEPAGE)
    return memory


def _release(address: int, size_bytes: int, fd: int) -> None:
    _system().munmap(address, size_bytes)
    os.close(fd)


def _mapped(size_bytes: int, access: int, flags: int, fd: int = -1, offset: int = 0, *, at: int | None = None) -> int:
    address: int = _system().mmap(at, size_bytes, access, flags, fd, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def _system() -> ctypes.CDLL:
    system = ctypes.CDLL(None, use_errno=True)
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    system.mmap.argtypes, system.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    system.munmap.argtypes, system.munmap.restype = (address, size), number
    system.madvise.argtypes, system.madvise.restype = (address, size, number), number
    return system
