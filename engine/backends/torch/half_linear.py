"""Linear layers that compute in float32 over weights kept as float16, by FBGEMM, which torch brings along.

For a CPU that multiplies no bfloat16 and has none of our kernels: a step reads half of what float32 weights would be.
Of a weight that was stored in bfloat16, float16 keeps all bits from 2**-17 to 65504; what is smaller is rounded to a
multiple of 2**-24.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LARGEST = float(torch.finfo(torch.float16).max)

_LARGEST_ERROR = 2.0**-11
"""Of a weight kept as float16, against its size: what rounding to float16 makes of any number in its range."""


class HalfLinear:
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


def halves_available() -> bool:
    """Whether this torch has such layers. Whether they compute as they must is for who makes one to see."""
    return all(hasattr(torch.ops.quantized, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16"))


def _caller(operator: Any) -> Callable[[Tensor, Any], Tensor]:
    """What calls `operator`. Given something opaque, torch first looks for what stands in for that while it compiles,
    for 13 us, more than a small layer takes. Its dispatcher does not."""
    call = getattr(torch._C, "_dispatch_call_boxed", None)
    return operator if call is None else partial(call, operator._handle)


def kept_by_float16(weight: Tensor) -> bool:
    """Whether float16 has the numbers of `weight`, float32, but for what is lost of very small ones."""
    least, most = torch.aminmax(weight)
    if max(-float(least), float(most)) > _LARGEST:
        return False
    error = torch.linalg.vector_norm(weight - weight.half().float())
    return float(error) <= _LARGEST_ERROR * float(torch.linalg.vector_norm(weight))
