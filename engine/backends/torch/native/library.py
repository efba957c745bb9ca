"""The compiled kernels as Python calls them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.backends.torch.native.build import CannotBuild, InstructionSet, library_key

BLOCK, PAD_INPUTS = 16, 32
_ALIGNMENT = 64

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
        ("scales", _ADDRESS),
        ("group", _SIZE),
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
            self._pack, self._linear = self.functions.ericllm_pack, self.functions.ericllm_linear
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"the compiled library cannot be loaded: {error}") from error
        self._pack.argtypes = (_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS)
        self._linear.argtypes = (_ADDRESS, _FLAG, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
        self._pack.restype = self._linear.restype = None
        self._threads = _torch_threads()
        self.threads: Final = ctypes.addressof(self._threads)

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` [out, in] of bfloat16 as the kernels read it: [out/16, in/2, 16, 2], padded with zeros."""
        outputs, inputs = weight.shape
        packed = aligned((-(-outputs // BLOCK), -(-inputs // PAD_INPUTS) * PAD_INPUTS // 2, BLOCK, 2), torch.bfloat16)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._pack(weight.data_ptr(), weight.stride(0), outputs, inputs, packed.data_ptr())
        return packed

    def linear(self, layer: int, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Put the product of the Layer at that address into `out`, contiguous. x [rows, in], its rows without gaps.
        residual: as `out`, which it may be."""
        self._linear(
            self.threads,
            torch.get_num_threads(),
            layer,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            out.data_ptr(),
            None if residual is None else residual.data_ptr(),
        )


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


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor that begins on a line of the cache."""
    elements, spare = torch.Size(shape).numel(), _ALIGNMENT // dtype.itemsize
    memory = torch.empty(elements + spare, dtype=dtype)
    start = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[start : start + elements].view(shape)
