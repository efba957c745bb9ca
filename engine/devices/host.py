"""The CPU and the RAM, through psutil; what the CPU draws, where the system lets one read it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from engine.devices.rapl import PackagePower
from engine.ram import read_ram
from engine.snapshot import DeviceReading


class HostProbe:
    """The CPU and the RAM as one device, "cpu"."""

    def __init__(self) -> None:
        self._name = cpu_name()
        self._power = PackagePower()
        psutil.cpu_percent(None)

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """One reading; utilisation is that since the last call."""
        ram = read_ram()
        used = ram.total_bytes - ram.free_bytes
        ours = min(used, sum(map(held_bytes, set(pids))))
        return (
            DeviceReading(
                id="cpu",
                name=self._name,
                kind="cpu",
                utilisation=psutil.cpu_percent(None) / 100,
                total_bytes=ram.total_bytes,
                work_bytes=ours,
                others_bytes=used - ours,
                free_bytes=ram.free_bytes,
                power_w=self._power.watts(time.monotonic()),
            ),
        )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, with its number of logical cores."""
    cores = psutil.cpu_count() or 1
    name = platform.processor() or platform.machine() or "CPU"
    try:
        fields: Mapping[str, str] = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
        }
        name = fields.get("model name") or name
    except OSError:
        pass  # not Linux
    return f"{name}, {cores} cores" if cores > 1 else name


def usable_cores() -> int:
    """CPU cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def held_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """RAM that a process alone holds, its shared memory with it; where the system tells (Linux), without the files that
    it has mapped, which are cache and count as free.

    From counters that the kernel keeps: what it would have to add up page by page (smaps) holds up a process that has
    a large model for as long as that takes.
    """
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or it ended meanwhile
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
