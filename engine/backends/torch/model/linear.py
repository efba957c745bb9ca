"""Linear layers: with weights packed for the native kernels or oneDNN, in the codes of their files, and plain where
none of these is faster or smaller."""

from __future__ import annotations

import ctypes
import logging
import platform
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.checkpoints.fp8 import Fp8Codes
from engine.backends.checkpoints.quantized_weight import PackedSlabs
from engine.backends.common.gguf_codes import Codes
from engine.backends.common.packed_weights import PACK_FLOAT32_MIN_ELEMENTS, Bits
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear, CodedMatrix, Layout
from engine.backends.torch.cuda.gguf_matrix import gguf_matrix
from engine.backends.torch.cuda.packed_matrix import packed_matrix
from engine.backends.torch.native.layer import (
    INTEGER_SETS,
    NativeLinear,
    bits_of,
    looks_up_codes,
    matches_codes,
    matches_weight,
    pack_codes,
    quantise_linear,
)
from engine.backends.torch.native.library import Allocate, NativeLibrary, Rows, allocate_aligned, concatenate, shape_of
from engine.errors import ModelLoadFailed

# Linear layers that compute in float32 with float16 weights, by FBGEMM, which is part of torch.
#
# For a CPU that does not multiply bfloat16 and has no native kernels: a step reads half the bytes of float32 weights.
# float16 represents bfloat16 weights exactly from 2**-17 to 65504; smaller ones are rounded to a multiple of 2**-24.

_MAX_FLOAT16 = float(torch.finfo(torch.float16).max)

_MAX_FP16_ERROR = 2.0**-11
"""Max relative error of a float16 weight: that of rounding any number in its range."""


class Fp16Linear:
    """x @ weight.T + bias in float32. Its packed weight is opaque to torch, so workers cannot share it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy of `weight` [out, in], float32. Raises RuntimeError where this torch or CPU cannot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates its quantised models, which this is not
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16.default(weight, bias)
        self._multiply = _boxed_call(torch.ops.quantized.linear_dynamic_fp16.default)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._packed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [T, out] + the product with x [T, in]."""
        return self(x).add_(residual)


def fp16_linear_available() -> bool:
    """Return whether this torch has the operators. LinearFactory verifies their results."""
    return all(hasattr(torch.ops.quantized, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16"))


def _boxed_call(operator: Any) -> Callable[[Tensor, Any], Tensor]:
    """Return a faster call of `operator`: for opaque arguments torch looks up compile-time stand-ins first, which takes
    13 us, more than a small layer. Its dispatcher does not."""
    call = getattr(torch._C, "_dispatch_call_boxed", None)
    return operator if call is None else partial(call, operator._handle)


def fits_float16(weight: Tensor) -> bool:
    """Return whether float16 represents `weight`, float32, except for rounding of very small numbers."""
    least, most = torch.aminmax(weight)
    if max(-float(least), float(most)) > _MAX_FLOAT16:
        return False
    error = torch.linalg.vector_norm(weight - weight.half().float())
    return float(error) <= _MAX_FP16_ERROR * float(torch.linalg.vector_norm(weight))


# Serialization of tensors packed by oneDNN. A packed tensor is opaque to torch: its bytes are valid only together with
# oneDNN's description of their layout. torch's ahead-of-time compiler stores both in a file and maps them back
# (torch/_inductor/codecache.py); these are the functions that it uses, of torch's stable C interface.

_LIBRARY = "libtorch_cpu.so"
_CHECK_SHAPE = (96, 64)


class PackedWeight(NamedTuple):
    """Address and size of a tensor's bytes, and oneDNN's description of their layout."""

    address: int
    size_bytes: int
    layout: bytes

    def view(self) -> memoryview:
        """Return the bytes; valid while the tensor lives."""
        return memoryview((ctypes.c_ubyte * self.size_bytes).from_address(self.address)).cast("B")


def pack_weight(weight: Tensor) -> Tensor:
    """Pack `weight` [out, in] in oneDNN's layout for this machine. Raises RuntimeError where it cannot."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def serialize_packed(tensor: Tensor) -> PackedWeight:
    """Return the bytes and layout of a packed tensor, which must outlive their use."""
    layout: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor)
    return PackedWeight(torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor), bytes(layout.tolist()))


def deserialize_packed(address: int, shape: Sequence[int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """Return a packed tensor [out, in] over the bytes at `address`, which must outlive it.

    Raises RuntimeError where torch refuses.
    """
    library = _library()
    rows, columns = shape
    handle = ctypes.c_void_p()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(rows, columns),
        (ctypes.c_int64 * 2)(columns, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype_name(dtype)}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        layout,
        ctypes.c_int64(len(layout)),
    )
    if status:
        raise RuntimeError("torch refused a packed tensor over existing memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    (tensor,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(handle, None, None)])
    return tensor


@cache
def can_deserialize(dtype: torch.dtype) -> bool:
    """Return whether serialization works for `dtype`, tested on a small weight: products must be bitwise equal."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_CHECK_SHAPE, generator=generator).to(dtype)
        packed = pack_weight(weight)
        serialized = serialize_packed(packed)
        memory = ctypes.create_string_buffer(serialized.size_bytes + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(address, serialized.address, serialized.size_bytes)
        rebuilt = deserialize_packed(address, weight.shape, dtype, serialized.layout)
        x = torch.randn(3, _CHECK_SHAPE[1], generator=generator).to(dtype)
        return bool(torch.equal(_product(x, packed), _product(x, rebuilt)))
    except (RuntimeError, AttributeError, OSError):
        return False


@cache
def _library() -> ctypes.CDLL:
    """Return the library that torch has loaded. Raises OSError where it has another name."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name as in ModelSpec.dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _product(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return product


Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""

_CHECK_ROWS = 38
"""One is computed separately, the others together, which is several tiles."""

_logger = logging.getLogger(__name__)


class PlainLinear:
    """x @ weight.T + bias, with an unpacked weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product with a weight packed once by `pack_weight`, not on every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._add_product = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self.weight, self.bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [T, out] + the product with x [T, in], rounded once."""
        total: Tensor = self._add_product(x, residual, self.weight, self.bias, "add")
        return total


class LinearFactory:
    """Makes linear layers, packed where that is faster. The native kernels and torch's private operators are verified:
    their results are compared with the plain product once per weight shape, and a difference switches them off.

    native: the native kernels, if they are available for this `dtype`.  allocate: returns memory for their weights.
    keep_fp16: True if float32 weights may be stored as float16 without them.
    coded: the Triton kernels, if weights are computed from the codes of their files with them.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        native: NativeLibrary | None = None,
        allocate: Allocate = allocate_aligned,
        *,
        keep_fp16: bool = False,
        coded: CodedKernels | None = None,
    ) -> None:
        self._native, self._allocate = native if device.type == "cpu" else None, allocate
        self._coded = coded
        self._dtype, self._coding = dtype, self._native
        self._coded_verified: set[tuple[tuple[Codes, ...], bool, bool]] = set()
        self._compiled: set[tuple[tuple[tuple[Layout, int, int], ...], bool]] = set()
        self._fp16_enabled = keep_fp16 and device.type == "cpu" and fp16_linear_available()
        self._fp16_verified: set[tuple[torch.Size, bool]] = set()
        self._native_verified: set[tuple[torch.Size, bool, bool]] = set()
        self._quantised_verified: set[tuple[Bits, torch.Size, bool, bool]] = set()
        self._onednn_enabled = device.type == "cpu" and _packing_available(dtype)
        self._onednn_matches: dict[tuple[torch.Size, bool], bool] = {}

    def make(
        self,
        weight: Rows,
        bias: Tensor | None = None,
        *,
        pack: bool = True,
        interleave: bool = False,
        bits: Bits | None = None,
    ) -> Linear:
        """Return a layer for `weight` [out, in] and `bias` [out], packed unless `pack` is False.

        A packed weight is a copy; the original is freed once the caller drops it. interleave: True if the first half of
        the outputs gates the second, so that a native layer stores them alternately.  bits: quantise the weight, which
        needs `native`; raises ModelLoadFailed where its kernel gives wrong results.
        """
        if bits is not None:
            return self._make_quantised(weight, bias, bits, interleave)
        if pack and self._native is not None:
            layer = self._make_native(self._native, weight, bias, interleave)
            if layer is not None:
                return layer
        return self._make_torch(concatenate(weight), bias, pack=pack)

    def make_coded(
        self, rows: Sequence[Tensor], parts: Sequence[Codes], bias: Tensor | None = None, *, interleave: bool = False
    ) -> NativeLinear | CodedLinear:
        """Return a layer that computes from the codes of a GGUF file, which needs `native` or `coded`: rows uint8
        [rows, bytes of a row] of each of `parts`. Raises ModelLoadFailed where a native kernel gives wrong results."""
        if self._coded is not None:
            matrices = [gguf_matrix(raw, part, self._coded.device) for raw, part in zip(rows, parts, strict=True)]
            return self._make_triton(self._coded, matrices, bias)
        return self._make_native_coded(rows, parts, bias, interleave=interleave)

    def make_packed(
        self, stored: Sequence[PackedSlabs | Fp8Codes], parts: Sequence[Codes], bias: Tensor | None = None
    ) -> CodedLinear | None:
        """Return a layer that computes from the codes of a model folder, which needs `coded`: the weights of `parts`
        as they are stored; None for weights that `packed_matrix` does not take."""
        assert self._coded is not None, "a load with codes has the kernels"
        matrices = [packed_matrix(each, part, self._coded.device) for each, part in zip(stored, parts, strict=True)]
        found = [matrix for matrix in matrices if matrix is not None]
        return self._make_triton(self._coded, found, bias) if len(found) == len(matrices) else None

    def _make_triton(self, kernels: CodedKernels, matrices: Sequence[CodedMatrix], bias: Tensor | None) -> CodedLinear:
        layer = CodedLinear(kernels, matrices, self._dtype, bias)
        key = (tuple((each.layout, each.rows, each.inputs) for each in matrices), bias is not None)
        if key not in self._compiled:
            layer.compile_kernels()
            self._compiled.add(key)
        return layer

    def _make_native_coded(
        self, rows: Sequence[Tensor], parts: Sequence[Codes], bias: Tensor | None = None, *, interleave: bool = False
    ) -> NativeLinear:
        assert self._coding is not None, "a load with codes has the kernels"
        layer = pack_codes(
            self._coding, rows, parts, self._dtype, bias, interleaved=interleave, allocate=self._allocate
        )
        key = (tuple(parts), bias is not None, interleave)
        if key not in self._coded_verified:
            if not matches_codes(layer, rows, parts):
                formats = ", ".join(dict.fromkeys(part.format for part in parts))
                raise ModelLoadFailed(
                    f"products with {formats} weights of {parts[0].inputs} inputs are not finite, or differ from "
                    "torch's; with ERICLLM_NATIVE=0 in the environment, the weights are decoded"
                )
            self._coded_verified.add(key)
        return layer

    def make_embedding(self, rows: Tensor, part: Codes) -> NativeLinear | CodedLinear:
        """Return what `make_coded` does, to be looked up. Raises ModelLoadFailed where that gives wrong results."""
        if self._coded is not None:
            return self.make_coded([rows], [part])
        layer = self._make_native_coded([rows], [part])
        if not looks_up_codes(layer, rows, part):
            raise ModelLoadFailed(
                f"the kernel that looks up an embedding in {part.format} gives other numbers than torch; with "
                "ERICLLM_NATIVE=0 in the environment, the weights are decoded"
            )
        return layer

    def _make_native(
        self, library: NativeLibrary, weight: Rows, bias: Tensor | None, interleave: bool
    ) -> Linear | None:
        layer = NativeLinear.pack(library, weight, bias, interleaved=interleave, allocate=self._allocate)
        key = (shape_of(weight), bias is not None, interleave)
        if key in self._native_verified or _products_agree(layer, concatenate(weight), bias):
            self._native_verified.add(key)
            return layer
        self._native = None
        rows, columns = shape_of(weight)
        _logger.warning(
            "the native %s kernel is off, as its products with %d x %d weights differ from torch's",
            library.isa,
            rows,
            columns,
        )
        return None

    def _make_quantised(self, weight: Rows, bias: Tensor | None, bits: Bits, interleave: bool) -> Linear:
        assert self._native is not None, "a load with quantised weights has the kernels"
        layer = quantise_linear(self._native, weight, bias, bits, interleaved=interleave, allocate=self._allocate)
        key = (shape_of(weight), bias is not None, interleave)
        if (bits, *key) not in self._quantised_verified:
            if not matches_weight(layer, concatenate(weight), bits):
                rows, columns = shape_of(weight)
                if not bool(concatenate(weight).isfinite().all()):
                    raise ModelLoadFailed(f"a weight of {rows} x {columns} has numbers that are not finite")
                raise ModelLoadFailed(
                    f"products of the native int{bits} kernel with {rows} x {columns} weights differ from torch's; "
                    "load without --weights",
                    bits=bits,
                )
            self._quantised_verified.add((bits, *key))
        return layer

    def _make_torch(self, weight: Tensor, bias: Tensor | None, *, pack: bool) -> Linear:
        if not (pack and packing_pays(weight)):
            return PlainLinear(weight, bias)
        if self._fp16_enabled and (fp16 := self._make_fp16(weight, bias)) is not None:
            return fp16
        if not self._onednn_enabled:
            return PlainLinear(weight, bias)
        try:
            packed = PackedLinear(pack_weight(weight), bias)
            key = (weight.shape, bias is not None)
            if key not in self._onednn_matches:
                self._onednn_matches[key] = _products_agree(packed, weight, bias) and _sums_agree(packed, weight)
        except RuntimeError:
            self._onednn_enabled = False
            return PlainLinear(weight, bias)
        return packed if self._onednn_matches[key] else PlainLinear(weight, bias)

    def _make_fp16(self, weight: Tensor, bias: Tensor | None) -> Linear | None:
        """Return a layer with `weight` as float16; None where that is inexact or does not work here."""
        if not fits_float16(weight):
            return None
        try:
            fp16 = Fp16Linear(weight, bias)
            key = (weight.shape, bias is not None)
            if key not in self._fp16_verified:
                self._fp16_enabled = _products_agree(fp16, weight.half().float(), bias)
                self._fp16_verified.add(key)
        except (RuntimeError, TypeError, AttributeError):  # private operators of torch
            self._fp16_enabled = False
        return fp16 if self._fp16_enabled else None


def add_product(residual: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """Return residual [T, out] + linear(x), in one call where the layer supports it."""
    if isinstance(linear, PackedLinear | Fp16Linear):
        return linear.add_to(residual, x)
    return residual + linear(x)


def packing_pays(weight: Tensor) -> bool:
    """Return whether torch is faster with a packed copy of it."""
    return weight.dtype != torch.float32 or weight.numel() >= PACK_FLOAT32_MIN_ELEMENTS


def linear_kind(linear: Linear) -> str:
    """Return the kind of a layer: "native" with its instruction set and bits of quantised weights or that they are a
    GGUF file's codes, "fbgemm float16", "onednn" or "plain"."""
    match linear:
        case CodedLinear():
            return "triton from the file's codes"
        case NativeLinear() if linear.format.kernel.startswith("gguf"):
            return f"native {INTEGER_SETS[linear.library.isa]} from the file's codes"
        case NativeLinear() if bits := bits_of(linear.format):
            return f"native {INTEGER_SETS[linear.library.isa]} int{bits}"
        case NativeLinear():
            return f"native {linear.library.isa}"
        case PackedLinear():
            return "onednn"
        case Fp16Linear():
            return "fbgemm float16"
        case _:
            return "plain"


def native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or ARM's BF16)."""
    if not _mkldnn_flag("_is_mkldnn_bf16_supported"):
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None)


def _packing_available(dtype: torch.dtype) -> bool:
    match dtype:
        case torch.bfloat16:
            return _mkldnn_flag("_is_mkldnn_bf16_supported")
        case torch.float16:
            return _mkldnn_flag("_is_mkldnn_fp16_supported")
        case _:
            return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _mkldnn_flag(name: str) -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, name)
        and bool(getattr(torch.ops.mkldnn, name)())
    )


def _products_agree(packed: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECK_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    return close_enough(torch.cat((packed(x[:1]), packed(x[1:]))), PlainLinear(weight, bias)(x), weight.dtype)


def _sums_agree(packed: PackedLinear, weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(_CHECK_ROWS, size, generator=generator).to(weight.dtype) for size in weight.shape[::-1])
    sums = torch.cat((packed.add_to(residual[:1], x[:1]), packed.add_to(residual[1:], x[1:])))
    return close_enough(sums, packed(x) + residual, weight.dtype)


def close_enough(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two computations in `dtype` differ only by rounding."""
    actual, expected = actual.float(), expected.float()
    allowed = (1e-4 if dtype == torch.float32 else 2e-2) * max(float(expected.abs().max()), 1e-6)
    return bool((expected - actual).abs().max() <= allowed)
