"""Whether this process can use the native kernels: found in the cache, or compiled in the background."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

import torch

from engine.backends.torch.native.build import (
    SWITCH,
    TIMEOUT_S,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
    kept_library,
)
from engine.backends.torch.native.library import DTYPES, NativeLibrary
from engine.config import WeightsName
from engine.errors import InvalidRequest, LoadCancelled

WAIT_S = 10.0
"""How long a load waits for the compiler. Later loads find what it has made."""

PATIENT_S = 120.0
"""How long one waits that cannot go on without."""

_POLL_S = 0.02

_logger = logging.getLogger(__name__)


class Kernels:
    """The kernels for one instruction set: ready at once where they were compiled before, else when a thread of their
    own has compiled them.

    problem: why there are none, as a clause.
    """

    def __init__(self, isa: InstructionSet) -> None:
        self._isa, self._folder = isa, cache_folder()
        self._library: NativeLibrary | None = None
        self.problem = ""
        self._done = threading.Event()
        kept = kept_library(isa, self._folder)
        if kept is not None and self._loaded(lambda: NativeLibrary(isa, kept)):
            self._done.set()
            return
        threading.Thread(target=self._build, name="native kernels", daemon=True).start()

    def wait(self, cancelled: Callable[[], bool], timeout_s: float = WAIT_S) -> NativeLibrary | None:
        """The library; None where there can be none, or where it takes longer or `cancelled()` turns true."""
        until = time.monotonic() + timeout_s
        while not self._done.wait(_POLL_S) and time.monotonic() < until and not cancelled():
            pass
        return self._library

    def _build(self) -> None:
        self._loaded(lambda: NativeLibrary(self._isa, build_library(self._isa, self._folder)))
        self._done.set()

    def _loaded(self, load: Callable[[], NativeLibrary]) -> bool:
        try:
            self._library = load()
        except CannotBuild as error:
            self.problem = str(error)
            _logger.warning("the model computes with torch's kernels, as ours cannot be used: %s", error)
        return self._library is not None


def native_library(
    dtype: torch.dtype, device: torch.device, cancelled: Callable[[], bool], timeout_s: float = WAIT_S
) -> NativeLibrary | None:
    """What computes linear layers and attention of `dtype` on `device`; None where torch does, as where compiling takes
    longer. What is not the kernels' is not waited for."""
    isa = native_isa()
    if isa is None or dtype not in DTYPES or device.type != "cpu":
        return None
    return _kernels(isa).wait(cancelled, timeout_s)


def quantised_library(
    weights: WeightsName, dtype: torch.dtype, device: torch.device, cancelled: Callable[[], bool]
) -> NativeLibrary:
    """What computes with weights made into fewer bits, compiled first if need be.

    Raises InvalidRequest where there is no such thing here, LoadCancelled.
    """

    def refused(why: str) -> InvalidRequest:
        return InvalidRequest(f"weights is {weights}: {why}", param="weights", value=weights)

    if dtype not in DTYPES or device.type != "cpu":
        dtype_name = str(dtype).removeprefix("torch.")
        raise refused(f"they are for bfloat16 or float32 on a CPU, not for {dtype_name} on {device.type}")
    isa = native_isa()
    if isa is None:
        raise refused("their kernels need Linux, a CPU with AVX2, and that ERICLLM_NATIVE is not 0")
    kernels = _kernels(isa)
    library = kernels.wait(cancelled, timeout_s=2 * TIMEOUT_S)
    if library is None:
        if cancelled():
            raise LoadCancelled("the load was cancelled")
        raise refused(f"their kernels cannot be used: {kernels.problem or 'the compiler does not end'}")
    return library


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


@cache
def _kernels(isa: InstructionSet) -> Kernels:
    """Those of this process, started at their first use."""
    return Kernels(isa)
