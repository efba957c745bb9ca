"""Memory that is read in no order, or faster than the processor finds its 4 KiB pages: backed by larger ones."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor


def advise_huge_pages(memory: Tensor) -> Tensor:
    """`memory` itself, newly made in RAM and not yet touched, which Linux is asked to back with pages of 2 MiB.

    That the system keeps them off changes nothing but speed.
    """
    advise = _madvise()
    if advise is not None and memory.device.type == "cpu":
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.data_ptr() + memory.numel() * memory.itemsize - start
        if size > 0:
            advise(start, size, mmap.MADV_HUGEPAGE)
    return memory


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise
