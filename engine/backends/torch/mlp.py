"""The second half of a block: a gated MLP (Shazeer 2020), or whatever stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.torch.linear import Linear, sum_onto
from engine.backends.torch.lora import AdaptedRows, add_adapters
from engine.backends.torch.model_config import Activation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


class Mlp(Protocol):
    """What a block does with each row by itself."""

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        """x [T, hidden], normed -> [T, hidden] fresh, with what the adapters change of `layer` in it."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)). gate_up: both in one, gate first.

    fused: activation(gate(x)) * up(x) in one call, where there is such a kernel.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"
    fused: Linear | None = None

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[AdaptedRows] = ()) -> Tensor:
        gated = self.gated(x, layer, adapted)
        return add_adapters(self.down(gated), gated, layer, "down", adapted)

    def onto(self, residual: Tensor, x: Tensor, layer: int) -> Tensor:
        """residual + what it makes of x, without adapters."""
        return sum_onto(residual, self.down, self.gated(x, layer))

    def gated(self, x: Tensor, layer: int, adapted: Iterable[AdaptedRows] = ()) -> Tensor:
        """activation(gate(x)) * up(x), adapted."""
        if self.fused is None:
            return self.opened(add_adapters(self.gate_up(x), x, layer, "gate_up", adapted))
        return self.adapt_(self.fused(x), lambda rows: x[rows], layer, adapted)

    def opened(self, both: Tensor) -> Tensor:
        """activation(gate) * up, of both side by side."""
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up

    def adapt_(
        self,
        gated: Tensor,
        rows_of_x: Callable[[slice | Tensor], Tensor],
        layer: int,
        adapted: Iterable[AdaptedRows],
    ) -> Tensor:
        """`gated`, made of x without adapters, with its adapted rows made anew. rows_of_x: gives some rows of x."""
        for part in adapted:
            added = part.adapter.layers[layer].get("gate_up")
            if added is not None:
                x = rows_of_x(part.rows)
                both = self.gate_up(x)
                added.add_(both, x, slice(None))
                gated[part.rows] = self.opened(both)
        return gated
