"""A linear layer that multiplies with our own kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.backends.torch.native.library import Layer, NativeLibrary


class NativeLinear:
    """x @ weight.T + bias over a weight that `library` packed. Accumulates in float32, every output in the order of the
    inputs: neither the threads nor the other rows of a batch change a row's result."""

    def __init__(
        self, library: NativeLibrary, weight: Tensor, bias: Tensor | None, *, outputs: int, inputs: int
    ) -> None:
        self.library, self.weight, self.bias = library, weight, bias
        self.outputs, self.inputs = outputs, inputs
        self._layer = Layer(
            inputs=inputs,
            outputs=outputs,
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._layer)

    @classmethod
    def pack(cls, library: NativeLibrary, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """A layer for `weight` [out, in] of bfloat16, of which it keeps a packed copy."""
        outputs, inputs = weight.shape
        return cls(library, library.pack(weight), bias, outputs=outputs, inputs=inputs)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[1] != self.inputs:
            raise ValueError(f"a layer of {self.inputs} inputs of bfloat16 got {tuple(x.shape)} of {x.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=torch.bfloat16)
        self.library.linear(self._address, x, out)
        return out
