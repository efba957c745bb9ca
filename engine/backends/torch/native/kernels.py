"""The native kernels as a load finds them: kept from before, or compiled for it, which it waits for."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.backends.base import LoadProgress
from engine.backends.torch.native.build import (
    SWITCH,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
)
from engine.backends.torch.native.library import DTYPES, NativeLibrary
from engine.errors import LoadCancelled, ModelLoadFailed

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes linear layers and attention of a model, or the clause that says why torch does.

    apply: whether they are for such a device at all.
    """

    library: NativeLibrary | None = None
    problem: str = ""
    apply: bool = True


def find_kernels(
    dtype: torch.dtype,
    device: torch.device,
    *,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    native: bool | None = None,
) -> Kernels:
    """The kernels for a model of `dtype` on `device`. Where they have to be compiled first, that is waited for and
    reported as the phase "kernels"; where that fails, a warning in the log has the reason.

    native: as in ModelSpec. Raises LoadCancelled, and ModelLoadFailed where `native` is true and there are none.
    """
    if device.type != "cpu":
        return Kernels(problem="the native kernels are for a CPU", apply=False)
    if dtype not in DTYPES:
        dtype_name = str(dtype).removeprefix("torch.")
        return Kernels(problem=f"the native kernels are for bfloat16 or float32 on a CPU, not for {dtype_name}")
    if native is False:
        return Kernels(problem="the other workers of this model compute without the native kernels")
    isa = native_isa()
    if isa is None:
        problem = f"they need Linux on x86-64, a CPU with AVX2, and that {SWITCH} is not 0"
    else:
        try:
            return Kernels(_find(isa, report, cancelled))
        except CannotBuild as error:
            problem = str(error)
            _logger.warning("the model computes without the native kernels, as they cannot be used: %s", problem)
    if native:
        raise ModelLoadFailed(
            f"the other workers of this model compute with the native kernels, which cannot be used here: {problem}"
        )
    return Kernels(problem=f"the native kernels cannot be used: {problem}")


def native_isa() -> InstructionSet | None:
    """The instruction set that the kernels would use in this process; None where they do not run. ATEN_CPU_CAPABILITY,
    which bounds torch's, bounds it too."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    match torch.backends.cpu.get_cpu_capability():
        case "AVX512" if torch.cpu._is_vnni_supported():
            if not torch.cpu._is_avx512_bf16_supported():
                return "avx512"
            return "amx-bf16" if torch.cpu._is_amx_tile_supported() else "avx512-bf16"
        case "AVX512" | "AVX2":
            return "avx2"
        case _:
            return None


def _find(isa: InstructionSet, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]) -> NativeLibrary:
    """The library for `isa`. Raises CannotBuild, LoadCancelled."""

    begun = False

    def watch(done: int, total: int) -> None:
        nonlocal begun
        if cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled")
        if not begun:
            begun = True
            _logger.info("compiling the native kernels for %s, once for this machine: 16 s of a core or so", isa)
        report(LoadProgress(phase="kernels", done=done, total=total, unit="files"))

    return _opened(isa, build_library(isa, cache_folder(), watch=watch))


@cache
def _opened(isa: InstructionSet, path: Path) -> NativeLibrary:
    """That of this process, which is opened once."""
    return NativeLibrary(isa, path)
