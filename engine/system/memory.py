"""The machine's RAM as this process may use it: a container's limit (cgroup v2) counts as all there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

_CGROUP = Path("/sys/fs/cgroup")


class Ram(msgspec.Struct, frozen=True, kw_only=True):
    """free_bytes: what new allocations can get, file cache that can be given back included."""

    total_bytes: int
    free_bytes: int


def read_ram(cgroup: Path = _CGROUP) -> Ram:
    """RAM now."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        total = limit
        free = min(free, max(0, limit - used + _reclaimable_bytes(cgroup)))
    return Ram(total_bytes=total, free_bytes=min(free, total))


def _number(file: Path) -> int | None:
    """The number in a control file; None where there is no such file, or it says "max" (no limit)."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable_bytes(cgroup: Path) -> int:
    """File cache that the kernel counts as used but gives back when asked."""
    try:
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
