"""The native kernels for each instruction set that this machine can run, and those for AMX on tiles in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal
from unittest import mock

from engine.backends.torch.native import build
from engine.backends.torch.native.build import InstructionSet, build_library, cache_folder, find_compiler
from engine.backends.torch.native.library import NativeLibrary

LibraryName = InstructionSet | Literal["amx-bf16 emulated"]
EMULATED: LibraryName = "amx-bf16 emulated"

_NEEDS: dict[InstructionSet, set[str]] = {
    "amx-bf16": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"},
    "avx512-bf16": {"avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"},
    "avx512": {"avx512_vnni", "avx512vl", "avx512bw"},
    "avx2": {"avx2", "fma"},
}
_TILES = Path(__file__).with_name("amx_tiles.h")


def cpu_runs(isa: InstructionSet) -> bool:
    """Whether this machine's CPU has all that the kernels for `isa` use."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return _NEEDS[isa] <= set(flags)


_WITHOUT_TILES: tuple[InstructionSet, ...] = ("avx512-bf16", "avx512", "avx2")

SETS: tuple[InstructionSet, ...] = tuple(isa for isa in _WITHOUT_TILES if find_compiler() and cpu_runs(isa))
"""What can be made and run on this machine, but for AMX, widest first."""

LIBRARIES: tuple[LibraryName, ...] = (
    *SETS,
    *(("amx-bf16",) if SETS and cpu_runs("amx-bf16") else ()),
    *((EMULATED,) if SETS else ()),
)
"""The same with AMX, on tiles in memory too."""


def native_set(isa: InstructionSet) -> NativeLibrary:
    """The library for `isa`, made if it is not there yet."""
    return NativeLibrary(isa, build_library(isa, cache_folder()))


def native(name: LibraryName) -> NativeLibrary:
    """The library of that name, which is one of LIBRARIES."""
    if name != "amx-bf16 emulated":
        return native_set(name)
    version = hashlib.sha256(_TILES.read_bytes()).hexdigest()[:16]
    tiles = (f'-DERICLLM_TILES="{_TILES}"', f"-DTILES_VERSION=0x{version}")
    flags = (*build.ISA_FLAGS[SETS[0]], "-DERICLLM_AMX", *tiles, "-O1")  # compiled in two thirds of the time
    with mock.patch.object(build, "ISA_FLAGS", {**build.ISA_FLAGS, "amx-bf16": flags}):
        return NativeLibrary("amx-bf16", build_library("amx-bf16", cache_folder()))
