"""Capabilities of this machine's processor, read without torch."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The first processor's flags; empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def native_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether torch's CPU kernels will multiply bfloat16 in hardware (AVX512-BF16, AMX, or ARM's BF16). False
    where the flags are unknown, which errs on the side of the wider float32."""
    flags = cpu_flags(cpuinfo)
    return "bf16" in flags or ("avx512bw" in flags and bool(flags & {"avx512_bf16", "amx_tile"}))
