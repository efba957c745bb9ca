"""The compiled kernels as Python calls them."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.native_build import (
    SWITCH,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
    library_key,
)
from engine.errors import LoadCancelled, ModelLoadFailed

# A weight as it is given to be laid out for products: its rows in one tensor, or in several that lie anywhere.

Rows = Tensor | tuple[Tensor, ...]
"""A weight [out, in], or the parts that its rows lie in, one after the other."""

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a new tensor of that shape and dtype that begins on a line of the cache, with anything in it."""

_ALIGNMENT = 64


class Part(ctypes.Structure):
    """Some of a weight's rows: `Part` of packing.h."""

    _fields_ = (("rows", ctypes.c_void_p), ("count", ctypes.c_int64), ("stride", ctypes.c_int64))


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """The tensors that the rows lie in."""
    return (rows,) if isinstance(rows, Tensor) else rows


def shape_of(rows: Rows) -> torch.Size:
    """That of the weight: out, in."""
    parts = parts_of(rows)
    return torch.Size((sum(map(len, parts)), parts[0].shape[1]))


def joined(rows: Rows) -> Tensor:
    """The weight in one piece."""
    parts = parts_of(rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def without_gaps(rows: Rows) -> tuple[Tensor, ...]:
    """The same parts, the elements of each row side by side."""
    return tuple(part if part.stride(1) == 1 else part.contiguous() for part in parts_of(rows))


def described(parts: Sequence[Tensor]) -> ctypes.Array[Part]:
    """Where the parts lie, as the kernels are told; good for as long as the parts are."""
    return (Part * len(parts))(*(Part(part.data_ptr(), len(part), part.stride(0)) for part in parts))


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room in this process's own memory."""
    elements, spare = torch.Size(shape).numel(), _ALIGNMENT // dtype.itemsize
    memory = torch.empty(elements + spare, dtype=dtype)
    start = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[start : start + elements].view(shape)


BLOCK, PAD_INPUTS = 16, 32
DTYPES: Final = MappingProxyType({torch.bfloat16: "bfloat16", torch.float32: "float32"})
"""What weights the linear kernels multiply by."""

Product = Callable[[int, int, int, int, int, int, int, int | None], None]
"""A kernel that multiplies. Takes the address of Threads, how many of them, the address of a Layer, that of x, elements
from one of its rows to the next, rows, the address of the output, and that of the residual where there is one."""

_ADDRESS, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Threads(ctypes.Structure):
    """The OpenMP runtime that a kernel computes with: `Threads` of common.h."""

    _fields_ = (("parallel", _ADDRESS), ("number", _ADDRESS))


class Layer(ctypes.Structure):
    """What stays the same from one product with a weight to the next: `Layer` of linear.h, which says what each is."""

    _fields_ = (
        ("inputs", _SIZE),
        ("outputs", _SIZE),
        ("weight", _ADDRESS),
        ("bias", _ADDRESS),
        ("norm", _ADDRESS),
        ("epsilon", ctypes.c_float),
        ("norm_is_float", _FLAG),
        ("interleaved", _FLAG),
        ("activation", _FLAG),
        ("alpha", ctypes.c_float),
        ("out_is_float", _FLAG),
    )


class NativeLibrary:
    """The kernels for one instruction set, loaded from `path`. Raises CannotBuild where they cannot be.

    They run on the threads of torch's own OpenMP, as many as torch was told to use: two pools of threads on the same
    cores would spin against each other.

    functions: the library itself.  threads: the address of the Threads to run on.
    """

    def __init__(self, isa: InstructionSet, path: Path) -> None:
        self.isa: Final = isa
        self.key: Final = library_key(isa)
        try:
            self.functions: Final = ctypes.CDLL(str(path))
            self._packs = {dtype: self.functions[f"ericllm_pack_{name}"] for dtype, name in DTYPES.items()}
            self._quantise = self.functions.ericllm_quantise
            for name in DTYPES.values():
                for kernel in (name, f"int8_{name}", f"int4_{name}"):
                    self.product(kernel)
            permitted = bool(self.functions.ericllm_permit())
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"the compiled library cannot be loaded: {error}") from error
        if not permitted:
            raise CannotBuild(f"the system keeps {isa} from this process")
        for pack in self._packs.values():
            pack.argtypes, pack.restype = (_ADDRESS, _FLAG, _ADDRESS, _ADDRESS, _ADDRESS), None
        self._quantise.argtypes = (_ADDRESS, _FLAG, _ADDRESS, _ADDRESS, _FLAG, _FLAG, _ADDRESS)
        self._quantise.restype = None
        self._threads = _torch_threads()
        self.threads: Final = ctypes.addressof(self._threads)

    def pack(self, weight: Rows, *, interleaved: bool = False, room: Room = aligned) -> Tensor:
        """`weight` [out, in] as the kernels read it, padded with zeros: [out/16, in/2, 16, 2] of bfloat16, or
        [out/16, in, 16] of float32. interleaved: blocks of 16 of its upper and lower half take turns."""
        outputs, inputs = shape_of(weight)
        parts = without_gaps(weight)
        dtype = parts[0].dtype
        blocks = 2 * -(-outputs // 2 // BLOCK) if interleaved else -(-outputs // BLOCK)
        pairs = -(-inputs // PAD_INPUTS) * PAD_INPUTS // 2
        packed = room((blocks, inputs, BLOCK) if dtype is torch.float32 else (blocks, pairs, BLOCK, 2), dtype)
        layer = Layer(inputs=inputs, outputs=outputs, interleaved=interleaved)
        to, threads = packed.data_ptr(), torch.get_num_threads()
        self._packs[dtype](self.threads, threads, ctypes.byref(layer), described(parts), to)
        return packed

    def quantise(self, weight: Rows, packed: Tensor, bits: int, *, interleaved: bool = False) -> None:
        """Lay `weight` out in so many bits, in `packed`, which is as large as that takes."""
        outputs, inputs = shape_of(weight)
        parts = without_gaps(weight)
        layer = Layer(inputs=inputs, outputs=outputs, interleaved=interleaved)
        to, threads, is_float = packed.data_ptr(), torch.get_num_threads(), parts[0].dtype is torch.float32
        self._quantise(self.threads, threads, ctypes.byref(layer), described(parts), is_float, bits, to)

    def product(self, kernel: str) -> Product:
        """The kernel of that name. Raises AttributeError where there is none."""
        function = self.functions[f"ericllm_linear_{kernel}"]
        function.argtypes = (_ADDRESS, _FLAG, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
        function.restype = None
        return function

    def address(self, kernel: str) -> int | None:
        """Where the kernel of that name lies."""
        return ctypes.cast(self.functions[f"ericllm_linear_{kernel}"], ctypes.c_void_p).value


@cache
def _torch_threads() -> Threads:
    """The OpenMP runtime that torch has loaded: every such runtime has GOMP_parallel, whichever compiler built it.
    Raises CannotBuild."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        symbols = (torch_cpu.GOMP_parallel, torch_cpu.omp_get_thread_num)
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"torch's OpenMP threads cannot be used: {error}") from error
    return Threads(*(ctypes.cast(symbol, ctypes.c_void_p).value for symbol in symbols))


# The native kernels as a load finds them: kept from before, or compiled for it, which it waits for.

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
