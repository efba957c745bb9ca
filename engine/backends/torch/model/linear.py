"""Linear layers whose weights are packed once, for our own kernel or for oneDNN, and plain where neither is faster."""

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

from engine.backends.common.packed_weights import PACK_FLOAT32_MIN_ELEMENTS, Bits
from engine.backends.torch.native.layer import INTEGER_SETS, NativeLinear, bits_of, is_like, quantised
from engine.backends.torch.native.library import NativeLibrary, Room, Rows, aligned, joined, shape_of
from engine.errors import ModelLoadFailed

# Linear layers that compute in float32 over weights kept as float16, by FBGEMM, which torch brings along.
#
# For a CPU that multiplies no bfloat16 and has none of our kernels: a step reads half of what float32 weights would be.
# Of a weight that was stored in bfloat16, float16 keeps all bits from 2**-17 to 65504; what is smaller is rounded to a
# multiple of 2**-24.

_LARGEST = float(torch.finfo(torch.float16).max)

_LARGEST_FP16_ERROR = 2.0**-11
"""Of a weight kept as float16, against its size: what rounding to float16 makes of any number in its range."""


class Fp16Linear:
    """x @ weight.T + bias in float32. Its packed weight is opaque to torch, so no other worker can share it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Packs a copy of `weight` [out, in], float32; raises RuntimeError where this torch or CPU cannot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that what makes quantised models has moved, which this is not
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16.default(weight, bias)
        self._multiply = _caller(torch.ops.quantized.linear_dynamic_fp16.default)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._packed)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, out] + the product with x [T, in]."""
        return self(x).add_(residual)


def fp16_linear_available() -> bool:
    """Whether this torch has such layers. Whether they compute as they must is for who makes one to see."""
    return all(hasattr(torch.ops.quantized, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16"))


def _caller(operator: Any) -> Callable[[Tensor, Any], Tensor]:
    """What calls `operator`. Given something opaque, torch first looks for what stands in for that while it compiles,
    for 13 us, more than a small layer takes. Its dispatcher does not."""
    call = getattr(torch._C, "_dispatch_call_boxed", None)
    return operator if call is None else partial(call, operator._handle)


def fits_float16(weight: Tensor) -> bool:
    """Whether float16 has the numbers of `weight`, float32, but for what is lost of very small ones."""
    least, most = torch.aminmax(weight)
    if max(-float(least), float(most)) > _LARGEST:
        return False
    error = torch.linalg.vector_norm(weight - weight.half().float())
    return float(error) <= _LARGEST_FP16_ERROR * float(torch.linalg.vector_norm(weight))


# Tensors that oneDNN packed, taken apart into plain bytes and put together again over memory of ours. A packed tensor
# is opaque to torch: its bytes mean something only together with oneDNN's description of their layout. torch's ahead-
# of-time compiler keeps both in a file and maps them back (torch/_inductor/codecache.py); the functions are those
# that it uses, of torch's stable C interface.

_LIBRARY = "libtorch_cpu.so"
_CHECK_SHAPE = (96, 64)


class PackedWeight(NamedTuple):
    """Where the bytes of a tensor lie, how many they are, and oneDNN's description of their layout."""

    address: int
    size_bytes: int
    layout: bytes

    def view(self) -> memoryview:
        """The bytes themselves, while the tensor lives."""
        return memoryview((ctypes.c_ubyte * self.size_bytes).from_address(self.address)).cast("B")


def pack_weight(weight: Tensor) -> Tensor:
    """`weight` [out, in] as oneDNN lays it out for this machine. Raises RuntimeError where it cannot."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def serialize_packed(tensor: Tensor) -> PackedWeight:
    """The parts of a packed tensor, which must outlive their use."""
    layout: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor)
    return PackedWeight(torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor), bytes(layout.tolist()))


def deserialize_packed(address: int, shape: Sequence[int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """A packed tensor [out, in] over the bytes at `address`, which must stay there for as long as it is used.

    Raises RuntimeError where torch refuses.
    """
    library = _library()
    rows, columns = shape
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
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
    if failed:
        raise RuntimeError("torch made no packed tensor over memory of ours")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    (tensor,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(handle, None, None)])
    return tensor


@cache
def can_deserialize(dtype: torch.dtype) -> bool:
    """Whether all of this works here for `dtype`, tried on a small weight: the product must be the same to the bit."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_CHECK_SHAPE, generator=generator).to(dtype)
        ours = pack_weight(weight)
        parts = serialize_packed(ours)
        memory = ctypes.create_string_buffer(parts.size_bytes + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(address, parts.address, parts.size_bytes)
        rebuilt = deserialize_packed(address, weight.shape, dtype, parts.layout)
        x = torch.randn(3, _CHECK_SHAPE[1], generator=generator).to(dtype)
        return bool(torch.equal(_product(x, ours), _product(x, rebuilt)))
    except (RuntimeError, AttributeError, OSError):
        return False


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded already. Raises OSError where it is called otherwise."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))


def dtype_name(dtype: torch.dtype) -> str:
    """As ModelSpec.dtype has it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _product(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return product


Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""

_CHECK_ROWS = 38
"""The first alone and the others together, which are of several tiles."""

_logger = logging.getLogger(__name__)


class PlainLinear:
    """x @ weight.T + bias, with the weight as the checkpoint has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product over a weight that `pack_weight` laid out for this machine, once and not on every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._add_product = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self.weight, self.bias, "none", [], "")
        return product

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, out] + the product with x [T, in], rounded once."""
        total: Tensor = self._add_product(x, residual, self.weight, self.bias, "add")
        return total


class LinearFactory:
    """Makes linear layers, packed where that pays. Neither our own kernel nor torch's private packing operators are
    taken on trust: their results are compared with the plain product once per weight shape, and a difference turns
    them off.

    native: the kernels that compute, where the process has them and they are for this `dtype`.  room: where their
    weights are to lie.  halves: whether float16 may keep weights of float32, for want of those.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        native: NativeLibrary | None = None,
        room: Room = aligned,
        *,
        halves: bool = False,
    ) -> None:
        self._native, self._room = native if device.type == "cpu" else None, room
        self._may_halve = halves and device.type == "cpu" and fp16_linear_available()
        self._halves_trusted: set[tuple[torch.Size, bool]] = set()
        self._native_trusted: set[tuple[torch.Size, bool, bool]] = set()
        self._quantised_trusted: set[tuple[Bits, torch.Size, bool, bool]] = set()
        self._may_pack = device.type == "cpu" and _packing_available(dtype)
        self._trusted: dict[tuple[torch.Size, bool], bool] = {}

    def make(
        self,
        weight: Rows,
        bias: Tensor | None = None,
        *,
        pack: bool = True,
        interleave: bool = False,
        bits: Bits | None = None,
    ) -> Linear:
        """A layer for `weight` [out, in] and `bias` [out], packed unless `pack` forbids it.

        The packed form is a copy: its plain form is freed once the caller drops `weight`. interleave: the first half of
        the outputs gates the second, so a native layer should hold them side by side.  bits: make the weight into so
        many, which needs `native`; raises ModelLoadFailed where its kernel does not multiply as it must.
        """
        if bits is not None:
            return self._make_quantised(weight, bias, bits, interleave)
        if pack and self._native is not None:
            layer = self._make_native(self._native, weight, bias, interleave)
            if layer is not None:
                return layer
        return self._make_torch(joined(weight), bias, pack=pack)

    def _make_native(
        self, library: NativeLibrary, weight: Rows, bias: Tensor | None, interleave: bool
    ) -> Linear | None:
        layer = NativeLinear.pack(library, weight, bias, interleaved=interleave, room=self._room)
        key = (shape_of(weight), bias is not None, interleave)
        if key in self._native_trusted or _agree(layer, joined(weight), bias):
            self._native_trusted.add(key)
            return layer
        self._native = None
        rows, columns = shape_of(weight)
        _logger.warning(
            "the native %s kernel is off, as it multiplies by %d x %d weights unlike torch", library.isa, rows, columns
        )
        return None

    def _make_quantised(self, weight: Rows, bias: Tensor | None, bits: Bits, interleave: bool) -> Linear:
        assert self._native is not None, "a load with quantised weights has the kernels"
        layer = quantised(self._native, weight, bias, bits, interleaved=interleave, room=self._room)
        key = (shape_of(weight), bias is not None, interleave)
        if (bits, *key) not in self._quantised_trusted:
            if not is_like(layer, joined(weight), bits):
                rows, columns = shape_of(weight)
                if not bool(joined(weight).isfinite().all()):
                    raise ModelLoadFailed(f"the weights hold numbers that are not finite, in one of {rows} x {columns}")
                raise ModelLoadFailed(
                    f"the native int{bits} kernel multiplies by {rows} x {columns} weights unlike torch; "
                    "load without --weights",
                    bits=bits,
                )
            self._quantised_trusted.add((bits, *key))
        return layer

    def _make_torch(self, weight: Tensor, bias: Tensor | None, *, pack: bool) -> Linear:
        if not (pack and packing_pays(weight)):
            return PlainLinear(weight, bias)
        if self._may_halve and (half := self._make_half(weight, bias)) is not None:
            return half
        if not self._may_pack:
            return PlainLinear(weight, bias)
        try:
            packed = PackedLinear(pack_weight(weight), bias)
            key = (weight.shape, bias is not None)
            if key not in self._trusted:
                self._trusted[key] = _agree(packed, weight, bias) and _sums_agree(packed, weight)
        except RuntimeError:
            self._may_pack = False
            return PlainLinear(weight, bias)
        return packed if self._trusted[key] else PlainLinear(weight, bias)

    def _make_half(self, weight: Tensor, bias: Tensor | None) -> Linear | None:
        """A layer that keeps `weight` as float16; None where that loses some of it, or does not work here."""
        if not fits_float16(weight):
            return None
        try:
            half = Fp16Linear(weight, bias)
            key = (weight.shape, bias is not None)
            if key not in self._halves_trusted:
                self._may_halve = _agree(half, weight.half().float(), bias)
                self._halves_trusted.add(key)
        except (RuntimeError, TypeError, AttributeError):  # of operators that are torch's own affair
            self._may_halve = False
        return half if self._may_halve else None


def sum_onto(residual: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """residual [T, out] + linear(x), in one call where the layer has one."""
    if isinstance(linear, PackedLinear | Fp16Linear):
        return linear.onto(residual, x)
    return residual + linear(x)


def packing_pays(weight: Tensor) -> bool:
    """Whether torch multiplies by a packed copy of it faster."""
    return weight.dtype != torch.float32 or weight.numel() >= PACK_FLOAT32_MIN_ELEMENTS


def linear_kind(linear: Linear) -> str:
    """What multiplies: "native" with its instruction set and the bits of quantised weights, "fbgemm float16", "onednn"
    or "plain"."""
    match linear:
        case NativeLinear() if bits := bits_of(linear.form):
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
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or ARM's BF16)."""
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


def _agree(packed: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECK_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    return close_enough(torch.cat((packed(x[:1]), packed(x[1:]))), PlainLinear(weight, bias)(x), weight.dtype)


def _sums_agree(packed: PackedLinear, weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(_CHECK_ROWS, size, generator=generator).to(weight.dtype) for size in weight.shape[::-1])
    sums = torch.cat((packed.onto(residual[:1], x[:1]), packed.onto(residual[1:], x[1:])))
    return close_enough(sums, packed(x) + residual, weight.dtype)


def close_enough(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways to compute the same in `dtype` differ by no more than their roundings."""
    found, expected = found.float(), expected.float()
    allowed = (1e-4 if dtype == torch.float32 else 2e-2) * max(float(expected.abs().max()), 1e-6)
    return bool((expected - found).abs().max() <= allowed)
