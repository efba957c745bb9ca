"""A block whose norms, gate and residual sums are part of its native products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.linear import Linear
from engine.backends.torch.lora import AdaptedRows, Place, add_adapters
from engine.backends.torch.mlp import GatedMlp
from engine.backends.torch.native.layer import Fused
from engine.backends.torch.norms import Norm


@dataclass(frozen=True, slots=True)
class Residual:
    """hidden + alpha * norm(linear(x)), in the place of `hidden` where no norm stands between them.

    fused: both in one, where they can be.
    """

    linear: Linear
    norm: Norm
    alpha: float
    place: Place
    fused: Fused | None

    def __call__(self, x: Tensor, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        if self.fused is None:
            added = self.norm(add_adapters(self.linear(x), x, layer, self.place, adapted))
            return torch.add(hidden, added, alpha=self.alpha)
        self.fused(x, hidden)
        if adapted:
            hidden.add_(add_adapters(torch.zeros_like(hidden), x, layer, self.place, adapted), alpha=self.alpha)
        return hidden


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block of attention and a gated MLP, one after the other. What adapters change of their rows is computed apart:
    the other rows get what they would get without them."""

    input_norm: Norm
    qkv: Fused
    o: Residual
    mlp_norm: Norm
    mlp: GatedMlp
    gated: Fused
    down: Residual

    def into_attention(self, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        """Queries, keys and values of hidden states [rows, hidden]."""
        qkv = self.qkv(hidden)
        return add_adapters(qkv, self.input_norm(hidden), layer, "qkv", adapted) if adapted else qkv

    def out_of_attention(self, attended: Tensor, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        """The block's output, of what its heads made and what went into it, which is used up."""
        hidden = self.o(attended, hidden, layer, adapted)
        gated = self.mlp.adapt_(self.gated(hidden), lambda rows: self.mlp_norm(hidden[rows]), layer, adapted)
        return self.down(gated, hidden, layer, adapted)
