"""The second half of a block: a gated MLP (Shazeer 2020), or whatever stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.families.experts import ExpertNames, Experts
from engine.backends.common.model_config import Activation
from engine.backends.torch.model.linear import Linear, sum_onto
from engine.backends.torch.model.lora import AdaptedRows, add_adapters

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


# A mixture of experts (Shazeer et al. 2017; Fedus et al. 2022): every row goes to the few that its router picks.


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every row goes through, weighted by the sigmoid of `gate`, [hidden] -> [1]."""

    gate: Linear
    mlp: GatedMlp


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """sum over a row's experts of weight * expert(row). No adapter changes it.

    An expert multiplies all its rows at once. A row's sum runs over its experts in their order, in float32, so that it
    does not depend on which other rows there are.
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    per_token: int
    normalised: bool
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[AdaptedRows] = ()) -> Tensor:
        if not len(x):  # nothing is drawn from in this step
            return x
        chosen, weights = self._route(x)
        places = chosen.flatten()
        order = places.argsort(stable=True)
        rows = x.index_select(0, order // self.per_token)
        counts = torch.bincount(places, minlength=len(self.experts)).tolist()
        parts = zip(self.experts, rows.split(counts), strict=True)
        outputs = torch.cat([expert(part, layer) for expert, part in parts if len(part)])
        where = order.argsort().view_as(chosen)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for each, weight in zip(where.unbind(1), weights.unbind(1), strict=True):
            mixed += outputs.index_select(0, each) * weight.unsqueeze(1)
        if self.shared is None:
            return mixed.to(x.dtype)
        return mixed.to(x.dtype) + torch.sigmoid(self.shared.gate(x)) * self.shared.mlp(x, layer)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's experts, ascending, and their weights in float32, both [T, per_token]."""
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen, order = chosen.sort(dim=-1)
        return chosen, weights.gather(-1, order)


class MakeLinear(Protocol):
    """Makes one linear layer of the named weights of a block, one below the other. gates: the first half of the outputs
    gates the second.  exact: they stay as they are however weights are made."""

    def __call__(self, *parts: str, bias: bool, gates: bool = False, exact: bool = False) -> Linear: ...


def make_mixture(
    names: ExpertNames, experts: Experts, linear: MakeLinear, gated: Callable[[Linear, Linear], GatedMlp]
) -> MixtureMlp:
    """The mixture of one layer. gated: makes an MLP of its fused gate and up, and its down."""

    def expert(stem: str) -> GatedMlp:
        gate_up = linear(f"{stem}.{names.gate}", f"{stem}.{names.up}", bias=False, gates=True)
        return gated(gate_up, linear(f"{stem}.{names.down}", bias=False))

    shared = None
    if experts.shared_inner:
        shared = SharedExpert(linear(names.shared_gate, bias=False, exact=True), expert(names.shared))
    return MixtureMlp(
        router=linear(names.router, bias=False, exact=True),
        experts=tuple(expert(names.expert.format(number)) for number in range(experts.count)),
        per_token=experts.per_token,
        normalised=experts.normalised,
        shared=shared,
    )
