"""The norms of a block: what scales its rows to one size, before a layer reads them or after it wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.families.base import NormKind

Norm = Callable[[Tensor], Tensor]
"""x [T, width] -> [T, width], or x itself."""


def unchanged(x: Tensor) -> Tensor:
    """In place of a norm that a block has not."""
    return x


class RmsNorm:
    """x / rms(x) * weight (Zhang and Sennrich 2019).

    On a CPU, for which torch has no kernel of it, with fewer operations than torch's own way takes: x over its length,
    to which that of a vector of epsilons is added at a right angle, times weight * sqrt(width); in float32.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._on_cpu = weight.device.type == "cpu"
        self._scaled = weight.float() * math.sqrt(len(weight))
        self._least = torch.tensor(math.sqrt(eps * len(weight)), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._on_cpu:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._least)
        ours = x.dtype != torch.float32  # a copy: may be written to
        weighed = wide.mul_(self._scaled) if ours else torch.mul(wide, self._scaled)
        return weighed.div_(length).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class WideRmsNorm:
    """The same with a weight in float32, in which it is computed: that of Gemma is 1 + what is stored, which fewer bits
    would round away."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias (Ba et al. 2016)."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def unweighted(kind: NormKind, width: int, eps: float) -> Norm:
    """A norm of that kind that leaves the weighing to others; over the last dimension, of `width`."""
    match kind:
        case "rms":
            return partial(F.rms_norm, normalized_shape=(width,), eps=eps)
        case "rms_plus_one":
            return lambda x: F.rms_norm(x.float(), (width,), eps=eps)
        case "layer":
            return partial(F.layer_norm, normalized_shape=(width,), eps=eps)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Each head of [T, heads, head_dim] by itself: `norm` without a weight, then the head's own, [heads, head_dim].

    rms_epsilon: that of an RMS norm; None where it is of another kind.
    """

    norm: Norm
    weight: Tensor
    rms_epsilon: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return (self.norm(x) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionNorm:
    """All query heads of [T, heads, head_dim] as one vector, and all key heads after them as another."""

    queries: Norm
    keys: Norm
    heads: int

    def __call__(self, x: Tensor) -> Tensor:
        queries, keys = x[:, : self.heads], x[:, self.heads :]
        normed = self.queries(queries.flatten(1)).view_as(queries), self.keys(keys.flatten(1)).view_as(keys)
        return torch.cat(normed, dim=1)
