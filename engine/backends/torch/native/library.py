"""The compiled kernels as Python calls them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.torch.native.build import CannotBuild, InstructionSet, library_key

BLOCK, PAD_INPUTS = 16, 32
_ALIGNMENT = 64


class NativeLibrary:
    """The kernels for one instruction set, loaded from `path`. Raises CannotBuild where they cannot be.

    They run on the threads of torch's own OpenMP, as many as torch was told to use: two pools of threads on the same
    cores would spin against each other.
    """

    def __init__(self, isa: InstructionSet, path: Path) -> None:
        self.isa, self.key = isa, library_key(isa)
        try:
            loaded = ctypes.CDLL(str(path))
            self._pack, self._linear = loaded.ericllm_pack, loaded.ericllm_linear
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"the compiled library cannot be loaded: {error}") from error
        address, size = ctypes.c_void_p, ctypes.c_int64
        self._pack.argtypes = (address, size, size, size, address)
        self._linear.argtypes = (
            *(address, ctypes.c_uint),
            *(address, size, size, size),
            *(address, size, address, address, ctypes.c_int32),
        )
        self._pack.restype = self._linear.restype = None
        self._parallel = _torch_parallel()

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` [out, in] of bfloat16 as the kernels read it: [out/16, in/2, 16, 2], padded with zeros."""
        outputs, inputs = weight.shape
        shape = (-(-outputs // BLOCK), -(-inputs // PAD_INPUTS) * PAD_INPUTS // 2, BLOCK, 2)
        packed = _aligned(shape)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._pack(weight.data_ptr(), weight.stride(0), outputs, inputs, packed.data_ptr())
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Put x @ weight.T + bias into `out` [rows, out], contiguous, of bfloat16 or float32. x [rows, in] is of
        bfloat16 and its rows are without gaps."""
        self._linear(
            self._parallel,
            torch.get_num_threads(),
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            packed.data_ptr(),
            out.shape[1],
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.dtype == torch.float32,
        )


@cache
def _torch_parallel() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded: every such runtime has it, whichever
    compiler built it. Raises CannotBuild."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address = ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"torch's OpenMP threads cannot be used: {error}") from error
    assert address is not None, "a symbol that was found has an address"
    return address


def _aligned(shape: tuple[int, ...]) -> Tensor:
    """A new tensor of bfloat16 whose blocks each lie in one line of the cache."""
    elements = torch.Size(shape).numel()
    spare = _ALIGNMENT // torch.bfloat16.itemsize
    memory = torch.empty(elements + spare, dtype=torch.bfloat16)
    start = -memory.data_ptr() % _ALIGNMENT // torch.bfloat16.itemsize
    return memory[start : start + elements].view(shape)
