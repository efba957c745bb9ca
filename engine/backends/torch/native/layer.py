"""A linear layer that multiplies with our own kernel, and what can be computed with it in the same call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.backends.common.model_config import Activation
from engine.backends.common.native_build import InstructionSet
from engine.backends.common.packed_weights import Bits, packed_bytes
from engine.backends.torch.native.library import DTYPES, Layer, NativeLibrary, Room, Rows, aligned, parts_of, shape_of

_ACTIVATIONS = MappingProxyType({"silu": 1, "gelu": 2, "gelu_tanh": 3})


@dataclass(frozen=True, slots=True)
class Form:
    """What a native layer's weight is. kernel: what multiplies by it.  dtype: of x, bias and result, by its name.

    interleaved: its blocks lie so that the first half of the outputs can gate the second.
    """

    outputs: int
    inputs: int
    kernel: str = "bfloat16"
    dtype: str = "bfloat16"
    interleaved: bool = False


class NativeLinear:
    """x @ weight.T + bias over a weight that `library` packed. Accumulates in float32, every output by one sequence of
    operations: neither the threads nor the other rows of a batch change a row's result."""

    def __init__(self, library: NativeLibrary, form: Form, weight: Tensor, bias: Tensor | None) -> None:
        self.library, self.form = library, form
        self.weight, self.bias = weight, bias
        self._plain = Fused(self)

    @classmethod
    def pack(
        cls,
        library: NativeLibrary,
        weight: Rows,
        bias: Tensor | None,
        *,
        interleaved: bool = False,
        room: Room = aligned,
    ) -> NativeLinear:
        """A layer for `weight` [out, in] of bfloat16 or float32, of which it keeps a packed copy in some `room`."""
        outputs, inputs = shape_of(weight)
        name = DTYPES[parts_of(weight)[0].dtype]
        form = Form(outputs, inputs, kernel=name, dtype=name, interleaved=interleaved)
        return cls(library, form, library.pack(weight, interleaved=interleaved, room=room), bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of x, bias and result."""
        return getattr(torch, self.form.dtype)  # type: ignore[no-any-return]

    def __call__(self, x: Tensor) -> Tensor:
        return self._plain(x)


class Fused:
    """A native product with what comes before and after it in one call:

        residual + alpha * (norm(x) @ weight.T + bias)    or    activation(first half) * second half of it

    norm: the weight of an RMSNorm over x, of the layer's dtype or float32; computed in float32 and rounded once.
    activation: needs an interleaved weight.  out: the result's dtype, the layer's own if not told, or float32.
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
        form = linear.form
        assert activation is None or form.interleaved, "a gate and what it opens lie in neighbouring blocks"
        self.form: Final = form
        self._kept = linear.library, linear.weight, linear.bias, norm  # not the layer, which keeps this
        self._dtype, self._inputs = linear.dtype, form.inputs
        self._out, self._width = out or linear.dtype, form.outputs // 2 if activation else form.outputs
        self._product, self._threads = linear.library.product(form.kernel), linear.library.threads
        self._layer = Layer(
            inputs=form.inputs,
            outputs=form.outputs,
            weight=linear.weight.data_ptr(),
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            epsilon=epsilon,
            norm_is_float=norm is not None and norm.dtype is torch.float32,
            interleaved=form.interleaved,
            activation=_ACTIVATIONS[activation] if activation else 0,
            alpha=alpha,
            out_is_float=self._out is torch.float32,
        )
        self._address = ctypes.addressof(self._layer)

    @property
    def address(self) -> int:
        """That of the Layer which its kernel is given."""
        return self._address

    @property
    def product(self) -> int | None:
        """The address of its kernel."""
        return self._kept[0].address(self.form.kernel)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """What it makes of x [rows, in]; with a `residual` [rows, out] without gaps, in its place."""
        rows, inputs = x.shape
        if x.dtype is not self._dtype or inputs != self._inputs:
            form = self.form
            raise ValueError(f"a layer of {form.inputs} inputs of {form.dtype} got {tuple(x.shape)} of {x.dtype}")
        stride, step = x.stride()
        if step != 1:
            x, stride = x.contiguous(), inputs
        out = torch.empty((rows, self._width), dtype=self._out) if residual is None else residual
        to = out.data_ptr()
        threads, added = torch.get_num_threads(), None if residual is None else to
        self._product(self._threads, threads, self._address, x.data_ptr(), stride, rows, to, added)
        return out


# Linear layers whose weights are made into 8 or 4 bits as they are loaded, and that multiply by them as they are.
#
# A weight is a code times the scale that it shares with its group: 64 inputs of one output for int8, 32 for int4, whose
# codes are sixteen values that suit normally distributed weights. A row of x is rounded to 8 bits too, group by group,
# so that a group is summed in whole numbers.

INTEGER_SETS: Mapping[InstructionSet, str] = MappingProxyType(
    {"amx-bf16": "avx512-vnni", "avx512-bf16": "avx512-vnni", "avx512": "avx512-vnni", "avx2": "avx2"}
)
"""What multiplies whole numbers in the library of an instruction set."""

_LARGEST_ERROR: Mapping[Bits, float] = MappingProxyType({8: 0.05, 4: 0.3})
"""Of products with random rows, against their size: several times what rounding makes of common weights."""

_CHECK_ROWS = 3


def quantised(
    library: NativeLibrary,
    weight: Rows,
    bias: Tensor | None,
    bits: Bits,
    *,
    interleaved: bool = False,
    room: Room = aligned,
) -> NativeLinear:
    """A layer for `weight` [out, in] of bfloat16 or float32 in so many bits, which lie in some `room`."""
    outputs, inputs = shape_of(weight)
    dtype = DTYPES[parts_of(weight)[0].dtype]
    form = Form(outputs, inputs, kernel=f"int{bits}_{dtype}", dtype=dtype, interleaved=interleaved)
    packed = room((packed_bytes(bits, outputs, inputs, gates=interleaved),), torch.uint8)
    library.quantise(weight, packed, bits, interleaved=interleaved)
    return NativeLinear(library, form, packed, bias)


def bits_of(form: Form) -> Bits | None:
    """In how many bits a weight of that form is; None for one that is not quantised."""
    match form.kernel.partition("_")[0]:
        case "int8":
            return 8
        case "int4":
            return 4
        case _:
            return None


def is_like(layer: NativeLinear, weight: Tensor, bits: Bits) -> bool:
    """Whether `layer` multiplies about as `weight` does that it was made of."""
    x = torch.randn(_CHECK_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    expected = x.float() @ weight.float().T
    found = layer(x).float() - (0 if layer.bias is None else layer.bias.float())
    return float((found - expected).norm()) <= _LARGEST_ERROR[bits] * float(expected.norm()) + 1e-6
