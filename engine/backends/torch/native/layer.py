"""A linear layer that multiplies with our own kernel, and what can be computed with it in the same call."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.backends.torch.model_config import Activation
from engine.backends.torch.native.library import DTYPES, Layer, NativeLibrary

_ACTIVATIONS = MappingProxyType({"silu": 1, "gelu": 2, "gelu_tanh": 3})


class NativeLinear:
    """x @ weight.T + bias over a weight that `library` packed. Accumulates in float32, every output by one sequence of
    operations: neither the threads nor the other rows of a batch change a row's result.

    dtype: of x, bias and result.  kernel: what multiplies by such weights.  scales, group: a quantised weight's, and
    how many inputs share one.  interleaved: its blocks lie so that the first half of the outputs can gate the second.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: Tensor,
        bias: Tensor | None,
        *,
        outputs: int,
        inputs: int,
        interleaved: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        kernel: str = "bfloat16",
        scales: Tensor | None = None,
        group: int = 0,
    ) -> None:
        self.library, self.weight, self.bias = library, weight, bias
        self.outputs, self.inputs, self.interleaved = outputs, inputs, interleaved
        self.dtype, self.kernel, self.scales, self.group = dtype, kernel, scales, group
        self._plain = Fused(self)

    @classmethod
    def pack(
        cls, library: NativeLibrary, weight: Tensor, bias: Tensor | None, *, interleaved: bool = False
    ) -> NativeLinear:
        """A layer for `weight` [out, in] of bfloat16 or float32, of which it keeps a packed copy."""
        outputs, inputs = weight.shape
        return cls(
            library,
            library.pack(weight, interleaved=interleaved),
            bias,
            outputs=outputs,
            inputs=inputs,
            interleaved=interleaved,
            dtype=weight.dtype,
            kernel=DTYPES[weight.dtype],
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._plain(x)


class Fused:
    """A native product with what comes before and after it in one call:

        residual + alpha * (norm(x) @ weight.T + bias)    or    activation(first half) * second half

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
        assert activation is None or linear.interleaved, "a gate and what it opens lie in neighbouring blocks"
        self.linear: Final = linear
        self._norm = norm
        self._dtype, self._inputs = linear.dtype, linear.inputs
        self._out, self._width = out or linear.dtype, linear.outputs // 2 if activation else linear.outputs
        self._product, self._threads = linear.library.product(linear.kernel), linear.library.threads
        self._layer = Layer(
            inputs=linear.inputs,
            outputs=linear.outputs,
            weight=linear.weight.data_ptr(),
            scales=None if linear.scales is None else linear.scales.data_ptr(),
            group=linear.group,
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            epsilon=epsilon,
            norm_is_float=norm is not None and norm.dtype is torch.float32,
            interleaved=linear.interleaved,
            activation=_ACTIVATIONS[activation] if activation else 0,
            alpha=alpha,
            out_is_float=self._out is torch.float32,
        )
        self._address = ctypes.addressof(self._layer)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """What it makes of x [rows, in]; with a `residual` [rows, out] without gaps, in its place."""
        rows, inputs = x.shape
        if x.dtype is not self._dtype or inputs != self._inputs:
            wanted = str(self._dtype).removeprefix("torch.")
            raise ValueError(f"a layer of {self._inputs} inputs of {wanted} got {tuple(x.shape)} of {x.dtype}")
        stride, step = x.stride()
        if step != 1:
            x, stride = x.contiguous(), inputs
        out = torch.empty((rows, self._width), dtype=self._out) if residual is None else residual
        to = out.data_ptr()
        threads, added = torch.get_num_threads(), None if residual is None else to
        self._product(self._threads, threads, self._address, x.data_ptr(), stride, rows, to, added)
        return out
