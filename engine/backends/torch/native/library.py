"""The compiled kernels as Python calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.backends.torch.native.build import CannotBuild, InstructionSet, library_key
from engine.backends.torch.native.rows import Room, Rows, aligned, described, shape_of, without_gaps

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
