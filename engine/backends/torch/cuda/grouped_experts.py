"""GroupedExperts: all experts of a layer that a step needs, in few launches of Triton kernels, from plain weights or
from the codes of their files. Nothing waits for the device, so all of it can be recorded as CUDA graphs. Not yet run on
a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.backends.common.families.experts import Experts
from engine.backends.common.model_config import Activation
from engine.backends.torch.cuda.coded_linear import TILES, CodedKernels, CodedLinear, CodedMatrix, tile_for
from engine.backends.torch.cuda.layer_ops import LayerOps, differ, gated
from engine.backends.triton_launch import cdiv, kernels_problem, power_of_two

_MIX_BLOCK = 512
_ORDER_BLOCK = 1024


class SortedRows(NamedTuple):
    """The rows of each expert. order: int32 [assignments], see `moe_kernels`.  ends: int32 [experts].  block_m: rows of
    a block."""

    order: Tensor
    ends: Tensor
    per_token: int
    block_m: int

    @property
    def blocks(self) -> int:
        """The most blocks that there can be."""
        return max_blocks(len(self.order), len(self.ends), self.block_m)


def block_size(assignments: int, experts: int, sizes: Sequence[int]) -> int:
    """Return the rows of a block, one of `sizes`: about as many as an expert's share of the assignments."""
    return next((size for size in sizes if size * experts >= assignments), sizes[-1])


def max_blocks(assignments: int, experts: int, block_m: int) -> int:
    """Return the most blocks that sorted assignments can have, however they fall to the experts."""
    used = min(assignments, experts)
    return used + (assignments - used) // block_m


class ExpertWeights(Protocol):
    """Weights of the experts of a layer on one device. hidden: numbers of a row of x.  block_sizes: rows of one expert
    that a program can multiply, ascending."""

    hidden: int

    @property
    def block_sizes(self) -> Sequence[int]: ...

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        """Return down(activation(gate(x)) * up(x)) [assignments, hidden], by number, for dense x [rows, hidden]."""


class GroupedExperts:
    """The experts of a layer, sorted, computed and added up by five launches, or by six from codes."""

    def __init__(self, ops: LayerOps, weights: ExpertWeights, experts: int) -> None:
        self._ops: Final = ops
        self._weights: Final = weights
        self._count: Final = experts

    def route(self, logits: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
        """Return the experts int32 [rows, per_token] with the highest softmax of the router's `logits` [rows, experts],
        dense, ascending, and their shares in float32. normalised: those add up to 1."""
        rows, experts = logits.shape
        chosen = torch.empty((rows, per_token), dtype=torch.int32, device=logits.device)
        weights = torch.empty((rows, per_token), dtype=torch.float32, device=logits.device)
        key = ("route", experts, per_token, normalised, logits.dtype)
        kernel = self._ops.kernels.get(key) or self._ops.kernels.add(
            key,
            self._ops.moe.route_kernel,
            (logits, chosen, weights),
            numbers=(experts,),
            constants={
                "per_token": per_token,
                "normalised": normalised,
                "block_e": power_of_two(experts),
                "num_warps": 1 if experts <= 256 else 4,
            },
        )
        kernel((rows, 1), logits, chosen, weights)
        return chosen, weights

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the experts `chosen` int32 [rows, per_token] for x [rows, hidden] by float32 `weights`
        [rows, per_token], added up in that order in float32; all dense."""
        return self._mix(self._weights(x, self.sort(chosen)), weights)

    def sort(self, chosen: Tensor, block_m: int = 0) -> SortedRows:
        """Return the rows of `chosen` by expert, in blocks of about an expert's share, or of `block_m`."""
        rows, per_token = chosen.shape
        assignments, experts = rows * per_token, self._count
        order = torch.empty(assignments, dtype=torch.int32, device=chosen.device)
        ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
        kernel = self._ops.kernels.get("order") or self._ops.kernels.add(
            "order",
            self._ops.moe.order_kernel,
            (chosen, order, ends),
            varying=(assignments,),
            constants={"block": _ORDER_BLOCK},
        )
        kernel((experts, 1), chosen, order, ends, varying=(assignments,))
        return SortedRows(
            order, ends, per_token, block_m or block_size(assignments, experts, self._weights.block_sizes)
        )

    def _mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        (rows, per_token), width = weights.shape, outputs.shape[1]
        mixed = torch.empty((rows, width), dtype=outputs.dtype, device=outputs.device)
        key = ("mix", width, per_token, outputs.dtype)
        kernel = self._ops.kernels.get(key) or self._ops.kernels.add(
            key,
            self._ops.moe.mix_kernel,
            (outputs, weights, mixed),
            numbers=(width,),
            constants={"per_token": per_token, "block": _MIX_BLOCK},
        )
        kernel((rows, cdiv(width, _MIX_BLOCK)), outputs, weights, mixed)
        return mixed

    def matches(self, experts: Sequence[Callable[[Tensor], Tensor]], per_token: int, dtype: torch.dtype) -> bool:
        """Return whether blocks of every size give what `experts` give one by one, which are down(gated(x)). Compiles
        all kernels that a step may need."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_TRIAL_ROWS, self._weights.hidden, generator=generator).to(self._ops.device, dtype)
        chosen = torch.stack(
            [torch.randperm(self._count, generator=generator)[:per_token].sort().values for _ in range(_TRIAL_ROWS)]
        )
        sorted_rows, numbers = [], chosen.flatten().tolist()
        for number, expert in enumerate(numbers):
            row = number // per_token
            sorted_rows.append(experts[expert](x[row : row + 1]))
        expected = torch.cat(sorted_rows).float().cpu()
        on_device = chosen.to(self._ops.device, torch.int32)
        return not any(
            differ(self._weights(x, self.sort(on_device, size)), expected) for size in self._weights.block_sizes
        )


_TRIAL_ROWS = 3


# Their weights.


class PlainExperts:
    """Weights of 16 bits.

    gate_ups: [2 * inner, hidden] of each expert, the gate's rows first.  downs: [hidden, inner]; all dense, of one of
    DTYPES. They are read where they are, at addresses that recorded graphs keep.
    """

    block_sizes = (16, 32, 64)

    def __init__(
        self, ops: LayerOps, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], activation: Activation
    ) -> None:
        self._ops: Final = ops
        self._weights: Final = (tuple(gate_ups), tuple(downs))
        self._activation: Final = activation
        self.hidden, self._inner = downs[0].shape
        self._gate_ups, self._downs = (
            torch.tensor([each.data_ptr() for each in weights], dtype=torch.int64).to(ops.device)
            for weights in self._weights
        )

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        """See `ExpertWeights`."""
        assignments, experts = len(rows.order), len(rows.ends)
        gated = torch.empty((assignments, self._inner), dtype=x.dtype, device=x.device)
        outputs = torch.empty((assignments, self.hidden), dtype=x.dtype, device=x.device)
        constants = {
            "upcast": x.dtype == torch.bfloat16 and self._ops.interpreted,
            "block_m": rows.block_m,
            "block_n": _BLOCK_N,
            "block_k": _BLOCK_K,
            "block_e": power_of_two(experts),
            "num_warps": 4,
            "num_stages": 3,
        }
        kernels, blocks = self._ops.kernels, rows.blocks
        key = ("gate_up", experts, self.hidden, self._inner, rows.per_token, rows.block_m, x.dtype, self._activation)
        tensors = x, gated, self._gate_ups, rows.order, rows.ends
        kernel = kernels.get(key) or kernels.add(
            key,
            self._ops.moe.gate_up_kernel,
            tensors,
            numbers=(experts, self._inner, self.hidden),
            constants={"per_token": rows.per_token, "activation": self._activation, **constants},
        )
        kernel((cdiv(self._inner, _BLOCK_N), blocks), *tensors)
        key = ("down", *key[1:])
        tensors = gated, outputs, self._downs, rows.order, rows.ends
        kernel = kernels.get(key) or kernels.add(
            key, self._ops.moe.down_kernel, tensors, numbers=(experts, self.hidden, self._inner), constants=constants
        )
        kernel((cdiv(self.hidden, _BLOCK_N), blocks), *tensors)
        return outputs


_BLOCK_N, _BLOCK_K = 64, 64


class CodedExperts:
    """Weights in the codes of their files.

    gate_ups, downs: of each expert, with matrices of the same layouts and sizes, without biases; see `groups_codes`.
    """

    def __init__(
        self,
        ops: LayerOps,
        gate_ups: Sequence[CodedLinear],
        downs: Sequence[CodedLinear],
        activation: Activation,
    ) -> None:
        self._ops: Final = ops
        self._activation: Final = activation
        self._gate_ups, self._downs = _CodedProducts(gate_ups), _CodedProducts(downs)
        self.hidden: int = gate_ups[0].parts[0].inputs
        max_rows = min(part.layout.max_rows for layer in (gate_ups[0], downs[0]) for part in layer.parts)
        self.block_sizes: Final = tuple(tile.block_m for tile in TILES if tile.block_m <= max_rows)

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        """See `ExpertWeights`."""
        both = self._gate_ups(x, rows, rows.per_token)
        return self._downs(self._ops.activate_gate(both, self._activation), rows, 1)


def groups_codes(layers: Sequence[CodedLinear]) -> bool:
    """Return whether the layers of all experts are of a kind that one launch computes."""
    kinds = {tuple((part.layout, part.rows, part.inputs) for part in layer.parts) for layer in layers}
    return len(kinds) == 1 and all(layer.bias is None for layer in layers)


class _CodedProducts:
    """Products with one layer of each expert. Parts of a layer that are alike are computed by one launch."""

    def __init__(self, layers: Sequence[CodedLinear]) -> None:
        self._layers: Final = tuple(layers)  # their arrays are read at addresses
        self._kernels: Final[CodedKernels] = layers[0].kernels
        self._outputs = sum(part.rows for part in layers[0].parts)
        self._runs: list[_Run] = []
        parts, at = layers[0].parts, 0
        while at < len(parts):
            kind = (parts[at].layout, parts[at].rows)
            end = next((i for i in range(at, len(parts)) if (parts[i].layout, parts[i].rows) != kind), len(parts))
            self._runs.append(_Run.of([layer.parts[at:end] for layer in layers], sum(p.rows for p in parts[:at])))
            at = end

    def __call__(self, x: Tensor, rows: SortedRows, divisor: int) -> Tensor:
        """Return [assignments, outputs] by number, of row number // divisor of x."""
        out = torch.empty((len(rows.order), self._outputs), dtype=x.dtype, device=x.device)
        for run in self._runs:
            self._kernels.multiply_experts(
                x,
                run.matrix,
                run.addresses,
                rows.order,
                rows.ends,
                out[:, run.first :] if run.first else out,
                ordered=run.ordered,
                divisor=divisor,
                tile=tile_for(rows.block_m),
                blocks=rows.blocks,
            )
        return out


class _Run(NamedTuple):
    """Adjacent matrices of a layer with one layout and size. matrix: one of them.  addresses: int64 [experts, parts,
    6], of the arrays and of the order of inputs.  first: the first output.  orders: what addresses refer to, besides
    the arrays of the layers."""

    matrix: CodedMatrix
    addresses: Tensor
    first: int
    ordered: bool
    orders: tuple[Tensor, ...]

    @classmethod
    def of(cls, parts: Sequence[Sequence[CodedMatrix]], first: int) -> _Run:
        """Return the run of these matrices of each expert."""
        matrix = parts[0][0]
        device = matrix.low.device
        ordered = any(each.order is not None for of_expert in parts for each in of_expert)
        in_order = torch.arange(matrix.inputs, dtype=torch.int32, device=device) if ordered else matrix.low
        addresses = [
            [
                [
                    *(array.data_ptr() for array in each.arrays),
                    (in_order if each.order is None else each.order).data_ptr(),
                ]
                for each in of_expert
            ]
            for of_expert in parts
        ]
        found = torch.tensor(addresses, dtype=torch.int64).to(device)
        return cls(matrix, found, first, ordered, (in_order,))


# Whether they can be used.

_TRIAL_HIDDEN, _TRIAL_INNER = 128, 80


def experts_problem(
    devices: Sequence[torch.device], dtype: torch.dtype, activation: Activation, experts: Experts
) -> str:
    """Return why the kernels cannot compute mixtures like `experts` in `dtype` on `devices`, as a clause; "" where they
    can. Every variant that a step can need is compiled and tried. Raises where a device is lost."""
    return kernels_problem(devices, "they", lambda device: _trial(LayerOps(device), dtype, activation, experts))


def _trial(ops: LayerOps, dtype: torch.dtype, activation: Activation, mixture: Experts) -> str:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    experts, per_token, width, inner = mixture.count, mixture.per_token, _TRIAL_HIDDEN, _TRIAL_INNER
    gate_ups, downs = [random(2 * inner, width) for _ in range(experts)], [random(width, inner) for _ in range(experts)]
    on_device = [[each.to(ops.device) for each in weights] for weights in (gate_ups, downs)]
    grouped = GroupedExperts(ops, PlainExperts(ops, on_device[0], on_device[1], activation), experts)
    for rows in (1, 24 * experts // per_token + 1, 40 * experts // per_token + 1):
        x = random(rows, width)
        logits = torch.stack([torch.arange(experts).roll(row) for row in range(rows)]).to(x.dtype) / 8
        shares = torch.softmax(logits.float(), dim=-1)
        weights, order = shares.topk(per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        found, found_weights = grouped.route(logits.to(ops.device), per_token, normalised=True)
        if not torch.equal(found.cpu().long(), order.sort().values) or differ(
            found_weights, weights.gather(-1, order.argsort())
        ):
            return "routing differs from torch's"
        expected = torch.zeros(rows, width)
        for expert in range(experts):
            share = (weights * (order == expert)).sum(dim=-1, keepdim=True)
            expected += share * (gated(x.float() @ gate_ups[expert].float().T, activation) @ downs[expert].float().T)
        if differ(grouped(x.to(ops.device), found, found_weights), expected):
            return "products of experts differ from torch's"
    return ""
