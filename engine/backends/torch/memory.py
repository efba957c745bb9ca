"""How much memory a device can still give, and refusing what would not fit."""

from __future__ import annotations

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


def require(needed_bytes: int, device: torch.device, purpose: str) -> None:
    """Raise InsufficientMemory with the numbers unless `device` has `needed_bytes` free for `purpose`."""
    available = free_bytes(device)
    if needed_bytes > available:
        short = needed_bytes - available
        raise InsufficientMemory(
            f"{purpose} need {needed_bytes // _MIB} MiB on {device}, which has {available // _MIB} MiB free: "
            f"short by {-(-short // _MIB)} MiB",
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
