"""A CUDA driver that computes nothing, under Triton's own launcher: launches are counted, and their arguments recorded.

`activate` compiles it (it needs gcc) and makes it Triton's driver; tensors on the CPU then pass for a GPU's. For a
process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton.backends.nvidia import driver as nvidia

MAX_RECORDED = 64
MAX_ARGUMENTS = 32

_SOURCE = """
#include "cuda.h"
#include <string.h>

typedef struct { char name[64]; unsigned count, sizes[32]; } Kernel;
Kernel kernels[16];
unsigned long long launches, arguments[64][32];
unsigned grids[64][3], recorded_kernels[64];
static int context;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    unsigned long long at = launches++ % 64;
    Kernel *kernel = (Kernel *)function;
    grids[at][0] = config->gridDimX; grids[at][1] = config->gridDimY; grids[at][2] = config->gridDimZ;
    recorded_kernels[at] = kernel - kernels;
    memset(arguments[at], 0, sizeof arguments[at]);
    for (unsigned i = 0; i < kernel->count; i++) memcpy(&arguments[at][i], parameters[i], kernel->sizes[i]);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    unsigned at = 0;
    while (at < 15 && kernels[at].name[0] && strcmp(kernels[at].name, name)) at++;
    strncpy(kernels[at].name, name, 63);
    *function = (CUfunction)&kernels[at];
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { *current = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *current, CUdevice device) { return cuCtxGetCurrent(current); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : 232448;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)&context; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **data, CUdeviceptr pointer) {
    return CUDA_SUCCESS;
}
"""


class StubDriver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's driver for one device of the given compute capability, on stream 7."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 7
        self.get_device_capability = lambda device=0: capability


class _Kernel(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 64), ("count", ctypes.c_uint), ("sizes", ctypes.c_uint * MAX_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as the driver got it. arguments: their bits, of those whose sizes were given."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[int, ...]


class Driver:
    """What the driver got. sizes: bytes of a kernel's first arguments, by its name."""

    def __init__(self, library: ctypes.CDLL, sizes: Mapping[str, Sequence[int]]) -> None:
        self._library = library
        self._kernels = (_Kernel * 16).in_dll(library, "kernels")
        for kernel, (name, each) in zip(self._kernels, sizes.items(), strict=False):
            kernel.name, kernel.count = name.encode(), len(each)
            kernel.sizes[: len(each)] = each

    @property
    def launches(self) -> int:
        """Launches since the start."""
        return ctypes.c_ulonglong.in_dll(self._library, "launches").value

    def last(self, count: int) -> list[Launch]:
        """Return the last launches, max 64, in order."""
        grids: Any = ((ctypes.c_uint * 3) * MAX_RECORDED).in_dll(self._library, "grids")
        rows: Any = ((ctypes.c_ulonglong * MAX_ARGUMENTS) * MAX_RECORDED).in_dll(self._library, "arguments")
        kernels: Any = (ctypes.c_uint * MAX_RECORDED).in_dll(self._library, "recorded_kernels")
        found = []
        for at in range(self.launches - count, self.launches):
            kernel = self._kernels[kernels[at % MAX_RECORDED]]
            arguments = tuple(rows[at % MAX_RECORDED][: kernel.count])
            found.append(Launch(kernel.name.decode(), tuple(grids[at % MAX_RECORDED]), arguments))
        return found


def activate(
    folder: Path, capability: tuple[int, int] = (9, 0), sizes: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> Driver:
    """Compile the driver into `folder` and have Triton use it. Raises subprocess.CalledProcessError, or OSError without
    gcc."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    include = Path(nvidia.__file__).parent / "include"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, capture_output=True, text=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    triton.runtime.driver.set_active(StubDriver(capability))
    return Driver(loaded, sizes)
