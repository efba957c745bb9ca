"""LoRA adapters beside the weights (Hu et al. 2021): each row gets the low-rank product of its own adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput

Place = Literal["qkv", "o", "gate_up", "down"]
"""A linear layer of a block, by its name there."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear layer: x @ a.T @ b, with the adapter's scale in b.

    a [rank, in], b [rank, out]. The ranks of a fused layer's parts lie side by side, each of them reaching its own
    part of the output alone.
    """

    a: Tensor
    b: Tensor

    def add_(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> None:
        """Add it to these rows of `out` [T, out], from the same of `x` [T, in]."""
        if isinstance(rows, slice):
            out[rows].addmm_(x[rows] @ self.a.T, self.b)
        else:
            out.index_add_(0, rows, x.index_select(0, rows) @ self.a.T @ self.b)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoraAdapter:
    """An adapter in memory, per layer what it adds to which linear layer.

    key: which adapter it is, among all that ever had its name: KV pages computed with one are of no use to another.
    """

    name: str
    key: str
    layers: tuple[Mapping[Place, LowRank], ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of one step that one adapter computes on."""

    adapter: LoraAdapter
    rows: slice | Tensor


def add_adapters(out: Tensor, x: Tensor, layer: int, place: Place, adapted: Iterable[AdaptedRows]) -> Tensor:
    """`out`, a linear layer's fresh output for `x`, with what each adapter adds to its rows."""
    for part in adapted:
        added = part.adapter.layers[layer].get(place)
        if added is not None:
            added.add_(out, x, part.rows)
    return out


def adapted_rows(
    chunks: Sequence[ChunkInput], adapters: Mapping[str, LoraAdapter], device: torch.device
) -> tuple[AdaptedRows, ...]:
    """The rows of each adapter that `chunks`, which lie in the batch in this order, compute with."""
    if not any(chunk.adapter for chunk in chunks):
        return ()
    rows: dict[str, list[int]] = {}
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if chunk.adapter:
            rows.setdefault(chunk.adapter, []).extend(range(start, end))
    return tuple(AdaptedRows(adapters[key], _compact(found, device)) for key, found in rows.items())


def _compact(rows: list[int], device: torch.device) -> slice | Tensor:
    """Ascending rows as a slice where they are adjacent, which spares gathering them."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)
