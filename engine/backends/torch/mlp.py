"""The second half of a block: a gated MLP (Shazeer 2020), or whatever stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.torch.linear import Linear
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
    """down(activation(gate(x)) * up(x)). gate_up: both in one, gate first."""

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor] = F.silu

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[AdaptedRows] = ()) -> Tensor:
        gate, up = add_adapters(self.gate_up(x), x, layer, "gate_up", adapted).chunk(2, dim=-1)
        gated = self.activation(gate) * up
        return add_adapters(self.down(gated), gated, layer, "down", adapted)
