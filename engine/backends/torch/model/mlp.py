"""The MLP of a block: a gated MLP (Shazeer 2020), or a mixture of experts."""

from __future__ import annotations

import logging
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
from engine.backends.torch.cuda.coded_linear import CodedLinear
from engine.backends.torch.cuda.grouped_experts import CodedExperts, GroupedExperts, PlainExperts, groups_codes
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.torch.model.linear import Linear, PlainLinear, add_product
from engine.backends.torch.model.lora import Adapted, AdaptedRows, add_adapters
from engine.backends.torch.model.norms import identity

_logger = logging.getLogger(__name__)

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


class Mlp(Protocol):
    """The part of a block that computes each row separately."""

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[Adapted]) -> Tensor:
        """Return a new [T, hidden] for normed x [T, hidden], with the adapters' updates of `layer`."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)). gate_up: both in one layer, gate first.

    fused: activation(gate(x)) * up(x) in one call, where there is such a kernel.
    ops: the Triton kernels, where they multiply gate and up.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"
    fused: Linear | None = None
    ops: LayerOps | None = None

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[Adapted] = ()) -> Tensor:
        gated = self.gated(x, layer, adapted)
        return add_adapters(self.down(gated), gated, layer, "down", adapted)

    def add_to(self, residual: Tensor, x: Tensor, layer: int) -> Tensor:
        """Return residual + its output for x, without adapters."""
        return add_product(residual, self.down, self.gated(x, layer))

    def gated(self, x: Tensor, layer: int, adapted: Iterable[Adapted] = ()) -> Tensor:
        """Return activation(gate(x)) * up(x), with adapters."""
        if self.fused is None:
            return self.activate_gate(add_adapters(self.gate_up(x), x, layer, "gate_up", adapted))
        return self.adapt_(self.fused(x), lambda rows: x[rows], layer, adapted)

    def activate_gate(self, both: Tensor) -> Tensor:
        """Return activation(gate) * up, of both concatenated."""
        if self.ops is not None:
            return self.ops.activate_gate(both, self.activation)
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up

    def adapt_(
        self,
        gated: Tensor,
        rows_of_x: Callable[[slice | Tensor], Tensor],
        layer: int,
        adapted: Iterable[Adapted],
    ) -> Tensor:
        """Recompute the adapted rows of `gated`, and return it. rows_of_x: returns some rows of x."""
        for part in adapted:
            assert isinstance(part, AdaptedRows), "fused blocks are not recorded"
            added = part.adapter.layers[layer].get("gate_up")
            if added is not None:
                x = rows_of_x(part.rows)
                both = self.gate_up(x)
                added.add_(both, x, slice(None))
                gated[part.rows] = self.activate_gate(both)
        return gated


# A mixture of experts (Shazeer et al. 2017; Fedus et al. 2022): every row uses the few experts that the router picks.


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert of every row, weighted by the sigmoid of `gate`, [hidden] -> [1]."""

    gate: Linear
    mlp: GatedMlp


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """sum over a row's experts of weight * expert(row). Adapters do not apply to it.

    An expert computes all its rows at once. A row's sum runs over its experts in a fixed order, in float32, so that it
    does not depend on the other rows.

    grouped: the experts in few launches, which the host does not wait for; else None, and the host reads which experts
    a step needs.
    reduce: adds up what the ranks of tensor parallelism computed, each with a part of every expert.
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    per_token: int
    normalised: bool
    shared: SharedExpert | None = None
    grouped: GroupedExperts | None = None
    reduce: Callable[[Tensor], Tensor] = identity

    def __call__(self, x: Tensor, layer: int, adapted: Iterable[Adapted] = ()) -> Tensor:
        if not len(x):  # no row is sampled in this step
            return x
        logits = self.router(x)
        if self.grouped is None:
            mixed = self._mix(x, *self._route(logits), layer)
        else:
            mixed = self.grouped(x, *self.grouped.route(logits, self.per_token, normalised=self.normalised))
        if self.shared is None:
            return self.reduce(mixed)
        return self.reduce(mixed + torch.sigmoid(self.shared.gate(x)) * self.shared.mlp(x, layer))

    def _mix(self, x: Tensor, chosen: Tensor, weights: Tensor, layer: int) -> Tensor:
        assignments = chosen.flatten()
        order = assignments.argsort(stable=True)
        rows = x.index_select(0, order // self.per_token)
        counts = torch.bincount(assignments, minlength=len(self.experts)).tolist()
        parts = zip(self.experts, rows.split(counts), strict=True)
        outputs = torch.cat([expert(part, layer) for expert, part in parts if len(part)])
        positions = order.argsort().view_as(chosen)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for each, weight in zip(positions.unbind(1), weights.unbind(1), strict=True):
            mixed += outputs.index_select(0, each) * weight.unsqueeze(1)
        return mixed.to(x.dtype)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's experts, ascending, and their weights in float32, both [T, per_token]."""
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen, order = chosen.sort(dim=-1)
        return chosen, weights.gather(-1, order)


class MakeLinear(Protocol):
    """Makes one linear layer of the named weights of a block, concatenated. gates: True if the first half of the
    outputs gates the second.  exact: True if the weights must not be quantised."""

    def __call__(self, *parts: str, bias: bool, gates: bool = False, exact: bool = False) -> Linear: ...


def make_mixture(
    names: ExpertNames,
    experts: Experts,
    linear: MakeLinear,
    gated: Callable[[Linear, Linear], GatedMlp],
    ops: LayerOps | None = None,
    reduce: Callable[[Tensor], Tensor] = identity,
) -> MixtureMlp:
    """Return the mixture of one layer. gated: makes an MLP from its gate_up and its down.  ops: the Triton kernels, for
    experts that those can compute.  reduce: see MixtureMlp."""

    def expert(stem: str) -> GatedMlp:
        gate_up = linear(f"{stem}.{names.gate}", f"{stem}.{names.up}", bias=False, gates=True)
        return gated(gate_up, linear(f"{stem}.{names.down}", bias=False))

    shared = None
    if experts.shared_inner:
        shared = SharedExpert(linear(names.shared_gate, bias=False, exact=True), expert(names.shared))
    mlps = tuple(expert(names.expert.format(number)) for number in range(experts.count))
    return MixtureMlp(
        router=linear(names.router, bias=False, exact=True),
        experts=mlps,
        per_token=experts.per_token,
        normalised=experts.normalised,
        shared=shared,
        grouped=_group(mlps, experts.per_token, ops) if ops is not None else None,
        reduce=reduce,
    )


def _group(experts: tuple[GatedMlp, ...], per_token: int, ops: LayerOps) -> GroupedExperts | None:
    """Return the experts for few launches; None where their weights are of no kind that can be, or of several."""
    activation = experts[0].activation
    gate_ups = [each.gate_up.weight for each in experts if isinstance(each.gate_up, PlainLinear)]
    downs = [each.down.weight for each in experts if isinstance(each.down, PlainLinear)]
    if len(gate_ups) == len(downs) == len(experts):
        return GroupedExperts(ops, PlainExperts(ops, gate_ups, downs, activation), len(experts))
    coded_ups = [each.gate_up for each in experts if isinstance(each.gate_up, CodedLinear)]
    coded_downs = [each.down for each in experts if isinstance(each.down, CodedLinear)]
    if not len(coded_ups) == len(coded_downs) == len(experts):
        return None
    if not (groups_codes(coded_ups) and groups_codes(coded_downs)):
        return None
    grouped = GroupedExperts(ops, CodedExperts(ops, coded_ups, coded_downs, activation), len(experts))
    if grouped.matches([partial(each, layer=0) for each in experts], per_token, coded_ups[0].dtype):
        return grouped
    _logger.warning("experts are computed from their codes one by one: their grouped products differ")
    return None
