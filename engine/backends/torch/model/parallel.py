"""Layers of a model of which each rank has a part (Shoeybi et al. 2019): what they exchange, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, dtype

from engine.backends.common.model_config import Shard
from engine.backends.torch.model.linear import Linear


class Group(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order."""

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up each rank's contiguous `x` in place, and return it: the same bits on all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' contiguous `x` [rows, n], equal in shape, side by side: [rows, ranks * n]."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite each rank's contiguous `x` by that of rank 0."""


@dataclass(frozen=True, slots=True)
class ReducedLinear:
    """A linear layer of which each rank has some inputs: the sum of the ranks' products."""

    part: Linear
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(x))


@dataclass(frozen=True, slots=True)
class ParallelEmbedding:
    """An embedding of which each rank has the rows of the ids from `first` on."""

    table: Tensor
    first: int
    group: Group

    @property
    def dtype(self) -> dtype:
        """Of what it returns."""
        return self.table.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        elsewhere = (own < 0) | (own >= len(self.table))
        rows = F.embedding(own.masked_fill_(elsewhere, 0), self.table)
        return self.group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))


@dataclass(frozen=True, slots=True, eq=False)
class ParallelProjectionNorm:
    """RMS norm of all query heads as one vector, and of all key heads as another, of [T, heads, head_dim]: the heads of
    this rank, `queries` weights and `keys` weights, flat. A key head of several ranks counts for each of them."""

    queries: Tensor
    keys: Tensor
    eps: float
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.flatten(1).float(), len(self.queries)
        parts = rows[:, :width], rows[:, width:]
        means = torch.stack([part.square().sum(-1) / part.shape[1] for part in parts], dim=-1)
        scales = (self.group.all_reduce(means) / self.group.shard.size + self.eps).rsqrt().unsqueeze(-1)
        normed = [part * scales[:, at] for at, part in enumerate(parts)]
        weighted = [part.to(x.dtype) * weight for part, weight in zip(normed, (self.queries, self.keys), strict=True)]
        return torch.cat(weighted, dim=1).view_as(x)


@dataclass(frozen=True, slots=True)
class ParallelHead:
    """A head of which each rank has the logits of some tokens, `width` or, the last one, fewer. Only rank 0 has all
    logits to compute with; `call` has the other ranks make the same call of `gather`, for that many rows."""

    part: Linear
    width: int
    vocab_size: int
    group: Group
    call: CallHead

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.vocab_size)
        self.call(len(x))
        return self.gather(x.contiguous())

    def gather(self, x: Tensor) -> Tensor:
        """Return logits [rows, vocab] of rank 0's normed states `x` [rows, hidden], which the other ranks receive."""
        self.group.broadcast(x)
        logits = self.part(x)
        padded = F.pad(logits, (0, self.width - logits.shape[1]))
        return self.group.all_gather(padded)[:, : self.vocab_size]


class CallHead(Protocol):
    """Has the other ranks compute their logits of that many rows."""

    def __call__(self, rows: int) -> None: ...
