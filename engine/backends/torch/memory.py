"""How much memory a device can still give, and refusing what would not fit."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from engine.errors import InsufficientMemory

_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20


def free_bytes(device: torch.device) -> int:
    """Bytes that `device` can still give: the driver's number on CUDA, else RAM within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _reclaimable_bytes()))


@contextmanager
def room_for(needed_bytes: int, device: torch.device, purpose: str) -> Iterator[None]:
    """Allocate `needed_bytes` for `purpose` inside this. Raises InsufficientMemory with the numbers, before the block
    where `device` has less free, and in place of torch's own error where an allocation still fails."""
    available = free_bytes(device)
    if needed_bytes > available:
        raise _insufficient(needed_bytes, available, device, purpose)
    try:
        yield
    except torch.OutOfMemoryError:
        raise _insufficient(needed_bytes, free_bytes(device), device, purpose) from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise _insufficient(needed_bytes, free_bytes(device), device, purpose) from None


def give_back(device: torch.device) -> None:
    """Return freed memory to the driver or the system: both allocators keep some of it otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _insufficient(needed_bytes: int, available: int, device: torch.device, purpose: str) -> InsufficientMemory:
    short = max(0, needed_bytes - available)
    return InsufficientMemory(
        f"{purpose} need {needed_bytes // _MIB} MiB on {device}, which has {available // _MIB} MiB free"
        + (f": short by {-(-short // _MIB)} MiB" if short else ", but not in one piece"),
        device=str(device),
        needed_bytes=needed_bytes,
        free_bytes=available,
        short_bytes=short,
    )


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such controller, or "max": no limit


def _reclaimable_bytes() -> int:
    """File cache that the kernel counts as used but gives back when asked."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
