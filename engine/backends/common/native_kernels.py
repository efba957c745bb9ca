"""Availability of the native kernels on this machine, without torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Set

import msgspec

from engine.backends.common.native_build import (
    ISA_FLAGS,
    SHIPPED,
    SWITCH,
    InstructionSet,
    cache_folder,
    cached_library,
    find_compiler,
    folder_problem,
    shipped_library,
)
from engine.system.processor import cpu_flags, native_bfloat16


class Native(msgspec.Struct, frozen=True, kw_only=True):
    """The native kernels of the torch backend. compiler: what would compile them, "" where there is none.

    compiled: the instruction sets that they were compiled for before.  shipped: those that the installed wheel has them
    for.  off: whether ERICLLM_NATIVE keeps them off.
    folder_problem: why what is compiled cannot be kept, as a clause.  capability: ATEN_CPU_CAPABILITY.
    """

    compiler: str = ""
    compiled: tuple[InstructionSet, ...] = ()
    shipped: tuple[InstructionSet, ...] = ()
    off: bool = False
    folder_problem: str = ""
    capability: str = ""


def read_native() -> Native:
    """Look for native kernels that were compiled here or came compiled, and what would compile them."""
    return Native(
        compiler=find_compiler(),
        compiled=tuple(isa for isa in ISA_FLAGS if cached_library(isa, cache_folder())),
        shipped=tuple(isa for isa in ISA_FLAGS if shipped_library(isa, SHIPPED)),
        off=_is_off(),
        folder_problem=folder_problem(cache_folder()),
        capability=_capability(),
    )


def instruction_set(machine: str, flags: Set[str], capability: str = "") -> InstructionSet | None:
    """Return the instruction set of the kernels for a CPU with such flags, None where they do not run.

    capability: ATEN_CPU_CAPABILITY, or what torch makes of it, which bounds our kernels as torch's own.
    """
    if capability == "default":
        return None
    if capability == "avx2":
        flags = flags & {"avx2", "fma"}
    if machine != "x86_64" or not flags >= {"avx2", "fma"}:
        return None
    if not flags >= {"avx512_vnni", "avx512vl", "avx512bw"}:
        return "avx2"
    if "avx512_bf16" not in flags:
        return "avx512"
    return "amx-bf16" if flags >= {"amx_tile", "amx_bf16", "amx_int8"} else "avx512-bf16"


def native_problem(machine: str, flags: Set[str], native: Native) -> str:
    """Return why the native kernels would not compute on such a CPU, as a clause; "" where they would."""
    kernels = instruction_set(machine, flags, native.capability)
    if not kernels:
        return "the native kernels need AVX2 on x86-64 Linux"
    if native.off:
        return "ERICLLM_NATIVE disables the native kernels"
    if kernels in (*native.compiled, *native.shipped):
        return ""
    return native.folder_problem if native.compiler else "no C++ compiler for the native kernels"


def instruction_set_here() -> InstructionSet | None:
    """Return the instruction set of the kernels for a load started from this process, None where they do not run."""
    if _is_off() or sys.platform != "linux":
        return None
    return instruction_set(platform.machine(), cpu_flags(), _capability())


def prefers_bfloat16() -> bool:
    """Return whether models compute in bfloat16 here by default: where the CPU multiplies it, or the kernels do,
    which read half as much of it as of float32 and multiply it about as fast."""
    return native_bfloat16() or kernels_available()


def kernels_available() -> bool:
    """Return whether a load here has the kernels: they run on this CPU, and came compiled, were compiled before or can
    be."""
    kernels = instruction_set_here()
    if kernels is None:
        return False
    return bool(find_compiler() or cached_library(kernels, cache_folder()) or shipped_library(kernels, SHIPPED))


def _is_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def _capability() -> str:
    return os.environ.get("ATEN_CPU_CAPABILITY", "")
