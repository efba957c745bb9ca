"""The native kernels for each instruction set that this machine can run, and those for AMX on tiles in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest

from engine.backends.torch.native import build
from engine.backends.torch.native.build import InstructionSet, build_library, cache_folder, find_compiler
from engine.backends.torch.native.library import NativeLibrary

LibraryName = Literal["avx512-bf16", "avx2", "amx-bf16", "amx-bf16 emulated"]
LIBRARIES: tuple[LibraryName, ...] = ("avx512-bf16", "avx2", "amx-bf16", "amx-bf16 emulated")

_NEEDS: dict[InstructionSet, set[str]] = {
    "amx-bf16": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512vl", "avx512bw"},
    "avx512-bf16": {"avx512_bf16", "avx512vl", "avx512bw"},
    "avx2": {"avx2", "fma"},
}
_TILES = Path(__file__).with_name("amx_tiles.h")


def cpu_runs(isa: InstructionSet) -> bool:
    """Whether this machine's CPU has all that the kernels for `isa` use."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return _NEEDS[isa] <= set(flags)


def native_or_skip(name: LibraryName) -> NativeLibrary:
    """The library of that name; where there cannot be one here, the test is skipped."""
    isa: InstructionSet = "amx-bf16" if name == "amx-bf16 emulated" else name
    below: InstructionSet = "avx512-bf16" if cpu_runs("avx512-bf16") else "avx2"
    emulated = name == "amx-bf16 emulated"
    if not find_compiler() or not cpu_runs(below if emulated else isa):
        pytest.skip(f"no compiler, or a CPU without {isa}")
    if not emulated:
        return NativeLibrary(isa, build_library(isa, cache_folder()))
    version = hashlib.sha256(_TILES.read_bytes()).hexdigest()[:16]
    flags = (*build.ISA_FLAGS[below], "-DERICLLM_AMX", f'-DERICLLM_TILES="{_TILES}"', f"-DTILES_VERSION=0x{version}")
    with mock.patch.object(build, "ISA_FLAGS", {**build.ISA_FLAGS, isa: flags}):
        return NativeLibrary(isa, build_library(isa, cache_folder()))
