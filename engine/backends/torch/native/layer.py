"""NativeLinear: a linear layer with a native kernel; FusedLinear: with norm, gate or residual sum in the same call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.gguf_codes import Codes
from engine.backends.common.model_config import Activation
from engine.backends.common.native_build import InstructionSet
from engine.backends.common.packed_weights import Bits, packed_bytes
from engine.backends.torch.native.library import (
    DTYPES,
    Allocate,
    Layer,
    NativeLibrary,
    Rows,
    allocate_aligned,
    parts_of,
    shape_of,
)

_ACTIVATIONS = MappingProxyType({"silu": 1, "gelu": 2, "gelu_tanh": 3})


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of a native layer's weight. kernel: name of its kernel.  dtype: name of the dtype of x, bias and result.

    interleaved: True if its blocks alternate, so that the first half of the outputs can gate the second.
    """

    outputs: int
    inputs: int
    kernel: str = "bfloat16"
    dtype: str = "bfloat16"
    interleaved: bool = False


class NativeLinear:
    """x @ weight.T + bias with a weight packed by `library`. Accumulates in float32, every output by a fixed sequence
    of operations: neither the number of threads nor the other rows of a batch change a row's result."""

    def __init__(self, library: NativeLibrary, format: WeightFormat, weight: Tensor, bias: Tensor | None) -> None:
        self.library, self.format = library, format
        self.weight, self.bias = weight, bias
        self._plain = FusedLinear(self)

    @classmethod
    def pack(
        cls,
        library: NativeLibrary,
        weight: Rows,
        bias: Tensor | None,
        *,
        interleaved: bool = False,
        allocate: Allocate = allocate_aligned,
    ) -> NativeLinear:
        """Return a layer with a packed copy of `weight` [out, in], of bfloat16 or float32, in memory from
        `allocate`."""
        outputs, inputs = shape_of(weight)
        name = DTYPES[parts_of(weight)[0].dtype]
        format = WeightFormat(outputs, inputs, kernel=name, dtype=name, interleaved=interleaved)
        return cls(library, format, library.pack(weight, interleaved=interleaved, allocate=allocate), bias)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of x, bias and result."""
        return getattr(torch, self.format.dtype)  # type: ignore[no-any-return]

    def __call__(self, x: Tensor) -> Tensor:
        return self._plain(x)


class CodedEmbedding:
    """Rows of a layer in the codes of a GGUF file, by their numbers: the embedding, which may be the head too."""

    def __init__(self, layer: NativeLinear) -> None:
        self.layer: Final = layer
        self.dtype: Final = layer.dtype
        format = layer.format
        self._table = Layer(inputs=format.inputs, outputs=format.outputs, weight=layer.weight.data_ptr())

    @property
    def address(self) -> int:
        """Address of the kernel's Layer."""
        return ctypes.addressof(self._table)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return [N, in] for ids, int64 [N]. Raises IndexError for one that there is not."""
        return self.layer.library.look_up(self._table, ids, self.dtype)


class FusedLinear:
    """A native product fused with what comes before and after it:

        residual + alpha * (norm(x) @ weight.T + bias)    or    activation(first half) * second half of it

    norm: the weight of an RMSNorm over x, of the layer's dtype or float32; computed in float32 and rounded once.
    activation: needs an interleaved weight.  out: dtype of the result, by default the layer's, or float32.
    """

    def __init__(
        self,
        linear: NativeLinear,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        activation: Activation | None = None,
        alpha: float = 1.0,
        out: torch.dtype | None = None,
    ) -> None:
        format = linear.format
        assert activation is None or format.interleaved, "a gate and its values are in neighbouring blocks"
        self.format: Final = format
        self._references = (
            linear.library,
            linear.weight,
            linear.bias,
            norm,
        )  # kept alive; not the layer, which refers to this
        self._dtype, self._inputs = linear.dtype, format.inputs
        self._out, self._width = out or linear.dtype, format.outputs // 2 if activation else format.outputs
        self._product = linear.library.product(format.kernel)
        self._layer = Layer(
            inputs=format.inputs,
            outputs=format.outputs,
            weight=linear.weight.data_ptr(),
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            epsilon=epsilon,
            norm_is_float=norm is not None and norm.dtype is torch.float32,
            interleaved=format.interleaved,
            activation=_ACTIVATIONS[activation] if activation else 0,
            alpha=alpha,
            out_is_float=self._out is torch.float32,
        )
        self._address = ctypes.addressof(self._layer)

    @property
    def address(self) -> int:
        """Address of the kernel's Layer."""
        return self._address

    @property
    def product(self) -> int | None:
        """Address of its kernel."""
        return self._references[0].address(self.format.kernel)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the result for x [rows, in]; in place of a contiguous `residual` [rows, out] if given."""
        rows, inputs = x.shape
        if x.dtype is not self._dtype or inputs != self._inputs:
            format = self.format
            raise ValueError(f"a layer of {format.inputs} inputs of {format.dtype} got {tuple(x.shape)} of {x.dtype}")
        stride, step = x.stride()
        if step != 1:
            x, stride = x.contiguous(), inputs
        out = torch.empty((rows, self._width), dtype=self._out) if residual is None else residual
        out_address = out.data_ptr()
        threads, residual_address = torch.get_num_threads(), None if residual is None else out_address
        self._product(threads, self._address, x.data_ptr(), stride, rows, out_address, residual_address)
        return out


# Linear layers whose weights are quantised to 8 or 4 bits at load, with integer products.
#
# A weight is a code times the scale of its group: 64 inputs of one output for int8, 32 for int4, whose codes are
# sixteen values for normally distributed weights. A row of x is rounded to 8 bits too, group by group, so that groups
# are summed in integers.

INTEGER_SETS: Mapping[InstructionSet, str] = MappingProxyType(
    {"amx-bf16": "amx-int8", "avx512-bf16": "avx512-vnni", "avx512": "avx512-vnni", "avx2": "avx2"}
)
"""Instruction set of integer products of many rows, by that of the library."""

_MAX_ERROR: Mapping[Bits, float] = MappingProxyType({8: 0.05, 4: 0.3})
"""Max relative error of products with random rows: several times the rounding error of common weights."""

_CHECK_ROWS = 3
_CHECK_OUTPUTS = 32
"""Of each tensor of a GGUF file: decoding all would take longer than the load."""


def quantise_linear(
    library: NativeLibrary,
    weight: Rows,
    bias: Tensor | None,
    bits: Bits,
    *,
    interleaved: bool = False,
    allocate: Allocate = allocate_aligned,
) -> NativeLinear:
    """Return a layer with `weight` [out, in], of bfloat16 or float32, quantised to `bits`, in memory from
    `allocate`."""
    outputs, inputs = shape_of(weight)
    dtype = DTYPES[parts_of(weight)[0].dtype]
    format = WeightFormat(outputs, inputs, kernel=f"int{bits}_{dtype}", dtype=dtype, interleaved=interleaved)
    packed = allocate((packed_bytes(bits, outputs, inputs, gates=interleaved),), torch.uint8)
    library.quantise(weight, packed, bits, interleaved=interleaved)
    return NativeLinear(library, format, packed, bias)


def pack_codes(
    library: NativeLibrary,
    rows: Sequence[Tensor],
    parts: Sequence[Codes],
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    interleaved: bool = False,
    allocate: Allocate = allocate_aligned,
) -> NativeLinear:
    """Return a layer that computes in `dtype` from the codes of a GGUF file: rows of `parts`, as `NativeLibrary`
    takes them."""
    name, outputs = DTYPES[dtype], sum(part.rows for part in parts)
    format = WeightFormat(outputs, parts[0].inputs, kernel=f"gguf_{name}", dtype=name, interleaved=interleaved)
    packed = library.pack_codes(rows, parts, interleaved=interleaved, allocate=allocate)
    return NativeLinear(library, format, packed, bias)


def rounds_rows(format: WeightFormat) -> bool:
    """Return whether products with a weight of that format round each row of x to 8 bits."""
    return format.kernel not in DTYPES.values()


def bits_of(format: WeightFormat) -> Bits | None:
    """Return the bits of a weight of that format; None if it is not quantised."""
    match format.kernel.partition("_")[0]:
        case "int8":
            return 8
        case "int4":
            return 4
        case _:
            return None


def matches_weight(layer: NativeLinear, weight: Tensor, bits: Bits) -> bool:
    """Return whether products of `layer` are about those of its original `weight`."""
    x = torch.randn(_CHECK_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    expected = x.float() @ weight.float().T
    actual = layer(x).float() - (0 if layer.bias is None else layer.bias.float())
    return float((actual - expected).norm()) <= _MAX_ERROR[bits] * float(expected.norm()) + 1e-6


def matches_codes(layer: NativeLinear, rows: Sequence[Tensor], parts: Sequence[Codes]) -> bool:
    """Return whether the first products of each part of `layer` are about those of the decoded numbers."""
    x = torch.randn(_CHECK_ROWS, parts[0].inputs, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
    found = layer(x).float() - (0 if layer.bias is None else layer.bias.float())
    first = 0
    for raw, part in zip(rows, parts, strict=True):
        weight = dequantise(raw[:_CHECK_OUTPUTS], part.format)
        expected = x.float() @ weight.T
        error = (found[:, first : first + len(weight)] - expected).norm()
        if not float(error) <= _MAX_ERROR[8] * float(expected.norm()) + 1e-6:  # nor where it is NaN
            return False
        first += part.rows
    return True


def looks_up_codes(layer: NativeLinear, rows: Tensor, part: Codes) -> bool:
    """Return whether the first rows of `layer` are the decoded numbers."""
    expected = dequantise(rows[:_CHECK_OUTPUTS], part.format).to(layer.dtype)
    found = CodedEmbedding(layer)(torch.arange(len(expected)))
    return torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
