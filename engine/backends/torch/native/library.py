"""NativeLibrary: the compiled kernels and their Python interface."""

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
from engine.backends.common.gguf_codes import Codes, place_blocks
from engine.backends.common.native_build import (
    SWITCH,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
    library_key,
)
from engine.backends.common.native_kernels import instruction_set
from engine.errors import LoadCancelled, ModelLoadFailed
from engine.system.processor import cpu_flags

# A weight to be packed: its rows in one tensor, or in several.

Rows = Tensor | tuple[Tensor, ...]
"""A weight [out, in], or consecutive parts of its rows."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates an uninitialised tensor of that shape and dtype, aligned to a cache line."""

_ALIGNMENT = 64


class Part(ctypes.Structure):
    """Some rows of a weight: `Part` of packing.h."""

    _fields_ = (("rows", ctypes.c_void_p), ("count", ctypes.c_int64), ("stride", ctypes.c_int64))


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return the tensors of the rows."""
    return (rows,) if isinstance(rows, Tensor) else rows


def shape_of(rows: Rows) -> torch.Size:
    """Return the shape of the weight: out, in."""
    parts = parts_of(rows)
    return torch.Size((sum(map(len, parts)), parts[0].shape[1]))


def concatenate(rows: Rows) -> Tensor:
    """Return the weight as one tensor."""
    parts = parts_of(rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def contiguous_rows(rows: Rows) -> tuple[Tensor, ...]:
    """Return the parts with the elements of each row contiguous."""
    return tuple(part if part.stride(1) == 1 else part.contiguous() for part in parts_of(rows))


def describe_parts(parts: Sequence[Tensor]) -> ctypes.Array[Part]:
    """Return the addresses of the parts for a kernel; valid while the parts are."""
    return (Part * len(parts))(*(Part(part.data_ptr(), len(part), part.stride(0)) for part in parts))


def allocate_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate in this process's own memory."""
    elements, spare = torch.Size(shape).numel(), _ALIGNMENT // dtype.itemsize
    memory = torch.empty(elements + spare, dtype=dtype)
    start = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[start : start + elements].view(shape)


BLOCK, PAD_INPUTS = 16, 32
DTYPES: Final = MappingProxyType({torch.bfloat16: "bfloat16", torch.float32: "float32"})
"""Dtypes of the linear kernels' weights."""

Product = Callable[[int, int, int, int, int, int, int | None], None]
"""A kernel of products. Arguments: number of threads, addresses of a Layer and of x, elements between rows of x, number
of rows, address of the output, and of the residual if there is one."""

_ADDRESS, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Layer(ctypes.Structure):
    """Constant arguments of products with a weight: `Layer` of linear.h, which documents the fields."""

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
    """The kernels for one instruction set, loaded from `path`. Raises CannotBuild.

    They run on threads of their own, as many as torch uses (see threads.h): a call is over when its tasks are, while
    OpenMP would wait for threads that have none.

    functions: the library itself.
    """

    def __init__(self, isa: InstructionSet, path: Path) -> None:
        self.isa: Final = isa
        self.key: Final = library_key(isa)
        try:
            self.functions: Final = ctypes.CDLL(str(path))
            self._packs = {dtype: self.functions[f"ericllm_pack_{name}"] for dtype, name in DTYPES.items()}
            self._quantise = self.functions.ericllm_quantise
            self._pack_codes = self.functions.ericllm_pack_gguf
            self._look_ups = {dtype: self.functions[f"ericllm_look_up_gguf_{name}"] for dtype, name in DTYPES.items()}
            for name in DTYPES.values():
                for kernel in (name, f"int8_{name}", f"int4_{name}", f"gguf_{name}"):
                    self.product(kernel)
            self._best_tokens = self.functions.ericllm_best_tokens
            permitted = bool(self.functions.ericllm_permit())
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"the compiled library cannot be loaded: {error}") from error
        if not permitted:
            raise CannotBuild(f"the system does not allow this process to use {isa}")
        for pack in self._packs.values():
            pack.argtypes, pack.restype = (_FLAG, _ADDRESS, _ADDRESS, _ADDRESS), None
        self._quantise.argtypes = (_FLAG, _ADDRESS, _ADDRESS, _FLAG, _FLAG, _ADDRESS)
        self._quantise.restype = None
        self._pack_codes.argtypes, self._pack_codes.restype = (_FLAG, _ADDRESS, _ADDRESS, _ADDRESS), None
        self._best_tokens.argtypes, self._best_tokens.restype = (_FLAG, _ADDRESS, _SIZE, _SIZE, _ADDRESS), None
        for look_up in self._look_ups.values():
            look_up.argtypes, look_up.restype = (_FLAG, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS), ctypes.c_bool

    def pack(self, weight: Rows, *, interleaved: bool = False, allocate: Allocate = allocate_aligned) -> Tensor:
        """Return `weight` [out, in] packed for the kernels, padded with zeros: [out/16, in/2, 16, 2] of bfloat16, or
        [out/16, in, 16] of float32. interleaved: blocks of 16 alternate between its upper and lower half."""
        outputs, inputs = shape_of(weight)
        parts = contiguous_rows(weight)
        dtype = parts[0].dtype
        blocks = 2 * -(-outputs // 2 // BLOCK) if interleaved else -(-outputs // BLOCK)
        pairs = -(-inputs // PAD_INPUTS) * PAD_INPUTS // 2
        packed = allocate((blocks, inputs, BLOCK) if dtype is torch.float32 else (blocks, pairs, BLOCK, 2), dtype)
        layer = Layer(inputs=inputs, outputs=outputs, interleaved=interleaved)
        to, threads = packed.data_ptr(), torch.get_num_threads()
        self._packs[dtype](threads, ctypes.byref(layer), describe_parts(parts), to)
        return packed

    def quantise(self, weight: Rows, packed: Tensor, bits: int, *, interleaved: bool = False) -> None:
        """Quantise `weight` to `bits` bits into `packed`, which has the right size."""
        outputs, inputs = shape_of(weight)
        parts = contiguous_rows(weight)
        layer = Layer(inputs=inputs, outputs=outputs, interleaved=interleaved)
        to, threads, is_float = packed.data_ptr(), torch.get_num_threads(), parts[0].dtype is torch.float32
        self._quantise(threads, ctypes.byref(layer), describe_parts(parts), is_float, bits, to)

    def pack_codes(
        self,
        rows: Sequence[Tensor],
        parts: Sequence[Codes],
        *,
        interleaved: bool = False,
        allocate: Allocate = allocate_aligned,
    ) -> Tensor:
        """Return the weight whose rows are those of `parts` in a GGUF file, uint8 [rows, bytes of a row] each, laid out
        for the kernel, uint8. Its blocks must each be of one format."""
        places = place_blocks(parts, gates=interleaved)
        assert places is not None, "a block has outputs of one format"
        packed = allocate((places.num_bytes,), torch.uint8)
        table = torch.tensor(places.blocks, dtype=torch.int64)
        packed[: table.nbytes] = table.view(torch.uint8).flatten()
        raw = tuple(part.contiguous() for part in rows)
        layer = Layer(inputs=parts[0].inputs, outputs=sum(part.rows for part in parts), interleaved=interleaved)
        to, threads = packed.data_ptr(), torch.get_num_threads()
        self._pack_codes(threads, ctypes.byref(layer), describe_parts(raw), to)
        return packed

    def look_up(self, layer: Layer, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids`, int64 [N], of a weight that `pack_codes` laid out: [N, in]. Raises IndexError."""
        ids = ids.contiguous()
        found = torch.empty((len(ids), layer.inputs), dtype=dtype)
        threads, to = torch.get_num_threads(), found.data_ptr()
        if not self._look_ups[dtype](threads, ctypes.byref(layer), ids.data_ptr(), len(ids), to):
            raise IndexError(f"an id is not one of {layer.outputs}")
        return found

    def best_tokens(self, logits: Tensor) -> Tensor:
        """Return the id of the highest of each row of float32 logits [R, V], int64 [R], the lowest id among equals; -1
        where that is not finite, or a logit is NaN."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._best_tokens(torch.get_num_threads(), logits.data_ptr(), rows, vocab, ids.data_ptr())
        return ids

    def product(self, kernel: str) -> Product:
        """Return the kernel of that name. Raises AttributeError where there is none."""
        function = self.functions[f"ericllm_linear_{kernel}"]
        function.argtypes = (_FLAG, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
        function.restype = None
        return function

    def look_up_address(self, dtype: torch.dtype) -> int | None:
        """Return the address of the kernel of `look_up`."""
        return ctypes.cast(self._look_ups[dtype], ctypes.c_void_p).value

    def address(self, kernel: str) -> int | None:
        """Return the address of the kernel of that name."""
        return ctypes.cast(self.functions[f"ericllm_linear_{kernel}"], ctypes.c_void_p).value


# The native kernels of a load: cached, or compiled first.

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The native kernels of a model, or the reason why torch computes instead, as a clause.

    apply: False if they are not for its device at all.
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
    """Return the kernels for a model of `dtype` on `device`. Compiling them first is reported as the phase "kernels";
    where that fails, a warning is logged with the reason.

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
            return Kernels(_load_or_build(isa, report, cancelled))
        except CannotBuild as error:
            problem = str(error)
            _logger.warning("the model computes without the native kernels, as they cannot be used: %s", problem)
    if native:
        raise ModelLoadFailed(
            f"the other workers of this model compute with the native kernels, which cannot be used here: {problem}"
        )
    return Kernels(problem=f"the native kernels cannot be used: {problem}")


def native_isa() -> InstructionSet | None:
    """Return the instruction set of the kernels in this process; None where they do not run. It is bounded by what
    torch itself may use, as ATEN_CPU_CAPABILITY says or it was built for."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return None
    return instruction_set(platform.machine(), cpu_flags(), torch.backends.cpu.get_cpu_capability().lower())


def _load_or_build(
    isa: InstructionSet, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]
) -> NativeLibrary:
    """Return the library for `isa`, compiled if need be. Raises CannotBuild, LoadCancelled."""

    started = False

    def watch(done: int, total: int) -> None:
        nonlocal started
        if cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled")
        if not started:
            started = True
            _logger.info("compiling the native kernels for %s, once per machine: up to a minute of one core", isa)
        report(LoadProgress(phase="kernels", done=done, total=total, unit="files"))

    return _open_library(isa, build_library(isa, cache_folder(), watch=watch))


@cache
def _open_library(isa: InstructionSet, path: Path) -> NativeLibrary:
    """Open a library, once per process."""
    return NativeLibrary(isa, path)
