"""LoRA adapters that are not merged (Hu et al. 2021): each row gets the low-rank product of its own adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput

LinearName = Literal["qkv", "o", "gate_up", "down"]
"""Name of a linear layer of a block."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank update of one linear layer: x @ a.T @ b, with the adapter's scale in b.

    a [rank, in], b [rank, out]. The ranks of a fused layer's parts are concatenated, each with weights only for its own
    part of the output. reduce: adds up x @ a.T over the ranks of tensor parallelism, where each has some inputs.
    """

    a: Tensor
    b: Tensor
    reduce: Callable[[Tensor], Tensor] | None = None

    def add_(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> None:
        """Add the update to rows of `out` [T, out], from the same rows of `x` [T, in]."""
        inner = (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)) @ self.a.T
        if self.reduce is not None:
            inner = self.reduce(inner)
        if isinstance(rows, slice):
            out[rows].addmm_(inner, self.b)
        else:
            out.index_add_(0, rows, inner @ self.b)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoraAdapter:
    """An adapter in memory: per layer, its updates by linear layer.

    key: identifies this version of the adapter: KV pages computed with one version are not valid for another.
    """

    name: str
    key: str
    layers: tuple[Mapping[LinearName, LowRank], ...]
    size_bytes: int


class Adapted(Protocol):
    """Rows of a step with adapters."""

    def add_(self, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        """Add the updates of a linear layer to their rows of `out` [T, out], from the same rows of `x` [T, in]."""


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows of one step that use one adapter."""

    adapter: LoraAdapter
    rows: slice | Tensor

    def add_(self, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        """See `Adapted`."""
        added = self.adapter.layers[layer].get(name)
        if added is not None:
            added.add_(out, x, self.rows)


def add_adapters(out: Tensor, x: Tensor, layer: int, name: LinearName, adapted: Iterable[Adapted]) -> Tensor:
    """Add each adapter's update to its rows of `out`, a linear layer's output for `x`; return `out`."""
    for part in adapted:
        part.add_(out, x, layer, name)
    return out


def adapted_rows(
    chunks: Sequence[ChunkInput], adapters: Mapping[str, LoraAdapter], device: torch.device
) -> tuple[AdaptedRows, ...]:
    """Return the rows of each adapter of `chunks`, which are in this order in the batch."""
    if not any(chunk.adapter for chunk in chunks):
        return ()
    rows: dict[str, list[int]] = {}
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if chunk.adapter:
            rows.setdefault(chunk.adapter, []).extend(range(start, end))
    return tuple(AdaptedRows(adapters[key], _as_slice(indices, device)) for key, indices in rows.items())


def _as_slice(rows: list[int], device: torch.device) -> slice | Tensor:
    """Return ascending rows as a slice where they are adjacent, which avoids a gather."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)
