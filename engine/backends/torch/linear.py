"""Linear layers whose weights are packed once, for our own kernel or for oneDNN, and plain where neither is faster."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.torch.half_linear import HalfLinear, halves_available, kept_by_float16
from engine.backends.torch.native.layer import NativeLinear
from engine.backends.torch.native.library import NativeLibrary
from engine.backends.torch.native.quantised import INTEGER_SETS, bits_of, is_like, quantised
from engine.backends.torch.native.rows import Room, Rows, aligned, joined, shape_of
from engine.backends.torch.opaque import pack_weight
from engine.backends.torch.quantised_size import PACK_FLOAT32_MIN_ELEMENTS, Bits
from engine.errors import ModelLoadFailed

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
        self._may_halve = halves and device.type == "cpu" and halves_available()
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
        if not kept_by_float16(weight):
            return None
        try:
            half = HalfLinear(weight, bias)
            key = (weight.shape, bias is not None)
            if key not in self._halves_trusted:
                self._may_halve = _agree(half, weight.half().float(), bias)
                self._halves_trusted.add(key)
        except (RuntimeError, TypeError, AttributeError):  # of operators that are torch's own affair
            self._may_halve = False
        return half if self._may_halve else None


def sum_onto(residual: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """residual [T, out] + linear(x), in one call where the layer has one."""
    if isinstance(linear, PackedLinear | HalfLinear):
        return linear.onto(residual, x)
    return residual + linear(x)


def packing_pays(weight: Tensor) -> bool:
    """Whether torch multiplies by a packed copy of it faster."""
    return weight.dtype != torch.float32 or weight.numel() >= PACK_FLOAT32_MIN_ELEMENTS


def kind_of(linear: Linear) -> str:
    """What multiplies: "native" with its instruction set and the bits of quantised weights, "fbgemm float16", "onednn"
    or "plain"."""
    match linear:
        case NativeLinear() if bits := bits_of(linear.form):
            return f"native {INTEGER_SETS[linear.library.isa]} int{bits}"
        case NativeLinear():
            return f"native {linear.library.isa}"
        case PackedLinear():
            return "onednn"
        case HalfLinear():
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
