"""The CPU and the RAM, through psutil; what the CPU draws, where the system lets one read it."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from engine.snapshot import DeviceReading
from engine.system.memory import read_ram

# What the processor draws, by the energy counters of its packages (RAPL, as Linux shows them in powercap).
#
# Since 2020 only root may read them on most machines; then it is not known.

FOLDER = Path("/sys/class/powercap")


class _Counter(NamedTuple):
    """Microjoules of a package at a moment; begins at 0 again after `range_uj`."""

    energy_uj: int
    range_uj: int


class PackagePower:
    """Follows the counters of all packages; memory and the rest of the machine are left out."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _is_package(zone)]
        self._last: tuple[float, Sequence[_Counter]] | None = None

    def watts(self, now_s: float) -> float | None:
        """On average since the last call; None at the first, and where the counters cannot be read."""
        counters = [_read(zone) for zone in self._zones]
        readable = [counter for counter in counters if counter is not None]
        last, self._last = self._last, (now_s, readable) if readable and len(readable) == len(counters) else None
        if last is None or self._last is None or now_s <= last[0]:
            return None
        grown_uj = sum(
            (counter.energy_uj - before.energy_uj) % (counter.range_uj + 1)
            for before, counter in zip(last[1], readable, strict=True)
        )
        return grown_uj / 1e6 / (now_s - last[0])


def _is_package(zone: Path) -> bool:
    """Neither a part of a package, which it counts too, nor the whole platform."""
    try:
        return zone.name.count(":") == 1 and (zone / "name").read_text(encoding="ascii").startswith("package")
    except (OSError, UnicodeDecodeError):
        return False


def _read(zone: Path) -> _Counter | None:
    try:
        energy, most = ((zone / name).read_text(encoding="ascii") for name in ("energy_uj", "max_energy_range_uj"))
        return _Counter(int(energy), int(most))
    except (OSError, ValueError):
        return None


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
        ours = min(used, held_bytes(set(pids)))
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


def held_bytes(pids: Collection[int], proc: Path = Path("/proc")) -> int:
    """Return the RAM that processes hold together; on Linux, shared memory counts once, also what a process has not
    touched yet of a file in RAM that another one wrote, and mapped files on disk not at all, which are cache and count
    as free.

    From counters and lists that the kernel keeps: what it would have to add up page by page (smaps) holds up a process
    that has a large model for as long as that takes.
    """
    own = 0
    shared: dict[int, int] = {}
    for pid in pids:
        anonymous, shmem = _resident_bytes(pid, proc)
        files = _memory_files(pid, proc)
        own += anonymous + max(0, shmem - sum(files.values()))
        shared |= files
    return own + sum(shared.values())


def process_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the RAM of a process with libraries, as `ps` does, and what it has not touched yet of its files in RAM."""
    try:
        resident = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
    return resident + max(0, memory_file_bytes(pid, proc) - _resident_bytes(pid, proc)[1])


def memory_file_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the bytes of the nameless files in RAM that a process has open."""
    return sum(_memory_files(pid, proc).values())


def _resident_bytes(pid: int, proc: Path) -> tuple[int, int]:
    """Return the memory of a process that is its own and that may be shared; all is its own where the system does not
    distinguish them."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        return 1024 * int(fields["RssAnon"].split()[0]), 1024 * int(fields["RssShmem"].split()[0])
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or it ended meanwhile
    try:
        return int(psutil.Process(pid).memory_info().rss), 0
    except psutil.Error:
        return 0, 0


def _memory_files(pid: int, proc: Path) -> dict[int, int]:
    """Bytes of each nameless file in RAM that a process has open, as workers that share weights have, by inode."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:  # not Linux, or it ended meanwhile
        folder = os.open(proc / str(pid) / "fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        at_end.callback(os.close, folder)
        for descriptor in at_end.enter_context(os.scandir(folder)):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor.name, dir_fd=folder).startswith("/memfd:"):
                    status = os.stat(descriptor.name, dir_fd=folder)
                    found[status.st_ino] = status.st_blocks * 512
    return found
