"""The machine that was measured, and what it can at most."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from engine.snapshot import DeviceLimits

_SHOWN_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8")


class Machine(msgspec.Struct, frozen=True):
    """flags: those that engines choose their kernels by.  cores: those that this process may run on."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    system: str
    python: str

    @property
    def line(self) -> str:
        """In one sentence's worth of words."""
        flags = ", ".join(self.flags) or "none that matters"
        return (
            f"{self.cpu}, {self.cores} cores ({flags}), {self.memory_bytes / 2**30:.1f} GiB, {self.system}, "
            f"Python {self.python}"
        )


def this_machine() -> Machine:
    """Return the fields of /proc/cpuinfo, where there is one."""
    cpu, flags = _cpu(Path("/proc/cpuinfo"))
    return Machine(
        cpu=cpu or platform.processor() or platform.machine(),
        flags=flags,
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def measured_limits() -> DeviceLimits:
    """Operations per second of products of matrices with bfloat16 (with float32 where that is faster) and with
    float32, and bytes read per second, of all cores, as the console measures them. It takes some ten seconds.

    Raises CalledProcessError and OSError.
    """
    command = [sys.executable, "-m", "engine.devices.measure", str(usable_cores())]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).resolve().parents[2])
    return msgspec.json.decode(found.stdout, type=DeviceLimits)


def most_of(some: DeviceLimits, others: DeviceLimits) -> DeviceLimits:
    """The higher of each limit: what else uses the machine can only lower one."""
    names = DeviceLimits.__struct_fields__
    return DeviceLimits(
        **{name: max(getattr(some, name) or 0.0, getattr(others, name) or 0.0) or None for name in names}
    )


def usable_cores() -> int:
    """As many threads as every engine gets."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu(file: Path) -> tuple[str, tuple[str, ...]]:
    if not file.is_file():
        return "", ()
    fields: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    name = f"{fields.get('model name', '')} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return name, tuple(flag for flag in _SHOWN_FLAGS if flag in flags)
