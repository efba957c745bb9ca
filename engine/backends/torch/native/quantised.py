"""Linear layers whose weights are made into 8 or 4 bits as they are loaded, and that multiply by them as they are.

A weight is a code times the scale that it shares with its group: 64 inputs of one output for int8, 32 for int4, whose
codes are sixteen values that suit normally distributed weights. A row of x is rounded to 8 bits too, group by group,
so that a group is summed in whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from engine.backends.torch.native.build import InstructionSet
from engine.backends.torch.native.layer import Form, NativeLinear
from engine.backends.torch.native.library import DTYPES, NativeLibrary
from engine.backends.torch.native.rows import Room, Rows, aligned, parts_of, shape_of
from engine.backends.torch.quantised_size import Bits, packed_bytes

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
