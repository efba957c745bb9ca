"""The native kernels for each instruction set that this machine can run, and those for AMX and for bfloat16 where their
instructions are written out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal
from unittest import mock

from engine.backends.common import native_build
from engine.backends.common.native_build import InstructionSet, build_library, cache_folder, find_compiler
from engine.backends.torch.native.library import NativeLibrary

LibraryName = InstructionSet | Literal["amx-bf16 emulated", "avx512-bf16 emulated"]
EMULATED: LibraryName = "amx-bf16 emulated"
EMULATED_BFLOAT16: LibraryName = "avx512-bf16 emulated"

_NEEDS: dict[InstructionSet, set[str]] = {
    "amx-bf16": {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"},
    "avx512-bf16": {"avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"},
    "avx512": {"avx512_vnni", "avx512vl", "avx512bw"},
    "avx2": {"avx2", "fma"},
}
_TILES = Path(__file__).with_name("amx_tiles.h")
_BFLOAT16 = Path(__file__).with_name("bfloat16_instructions.h")


def cpu_runs(isa: InstructionSet) -> bool:
    """Whether this machine's CPU has all that the kernels for `isa` use."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return _NEEDS[isa] <= set(flags)


_WITHOUT_TILES: tuple[InstructionSet, ...] = ("avx512-bf16", "avx512", "avx2")

SETS: tuple[InstructionSet, ...] = tuple(isa for isa in _WITHOUT_TILES if find_compiler() and cpu_runs(isa))
"""What can be made and run on this machine, but for AMX, widest first."""

MACHINE_SETS: tuple[InstructionSet, ...] = (*(("amx-bf16",) if SETS and cpu_runs("amx-bf16") else ()), *SETS)
"""The same with AMX, where the CPU has it."""

LIBRARIES: tuple[LibraryName, ...] = (*MACHINE_SETS, *((EMULATED,) if SETS else ()))
"""The same with AMX on tiles in memory too."""

ATTENDING: tuple[LibraryName, ...] = (
    *MACHINE_SETS,
    *((EMULATED_BFLOAT16,) if "avx512" in SETS and "avx512-bf16" not in SETS else ()),
    *((EMULATED,) if SETS else ()),
)
"""Those whose attention multiplies in different ways, by instructions written out where the CPU lacks them."""


def native_set(isa: InstructionSet) -> NativeLibrary:
    """The library for `isa`, made if it is not there yet."""
    return NativeLibrary(isa, build_library(isa, cache_folder()))


def native(name: LibraryName) -> NativeLibrary:
    """The library of that name, which is one of LIBRARIES."""
    if name == "amx-bf16 emulated":
        return _emulated("amx-bf16", SETS[0], _TILES, "-DERICLLM_AMX", f'-DERICLLM_TILES="{_TILES}"')
    if name == "avx512-bf16 emulated":
        return _emulated("avx512-bf16", "avx512", _BFLOAT16, "-include", str(_BFLOAT16))
    return native_set(name)


def _emulated(isa: InstructionSet, runs: InstructionSet, header: Path, *flags: str) -> NativeLibrary:
    """The kernels for `isa`, of instructions that `runs` has and others that `header` writes out."""
    version = f"-DHEADER_VERSION=0x{hashlib.sha256(header.read_bytes()).hexdigest()[:16]}"
    emulating = (*native_build.ISA_FLAGS[runs], *flags, version, "-O1")  # compiled in two thirds of the time
    with mock.patch.object(native_build, "ISA_FLAGS", {**native_build.ISA_FLAGS, isa: emulating}):
        return NativeLibrary(isa, build_library(isa, cache_folder()))
