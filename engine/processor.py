"""What this machine's processor can do, asked without torch."""

from __future__ import annotations

from pathlib import Path


def native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether torch's CPU kernels will multiply bfloat16 in hardware (AVX512-BF16, AMX, or ARM's BF16). False where
    nothing tells, which errs on the side of the wider float32."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return False
    for line in text.splitlines():
        key, _, values = line.partition(":")
        if key.strip() == "flags":  # x86
            flags = set(values.split())
            return "avx512bw" in flags and bool(flags & {"avx512_bf16", "amx_tile"})
        if key.strip() == "Features":  # ARM
            return "bf16" in values.split()
    return False
