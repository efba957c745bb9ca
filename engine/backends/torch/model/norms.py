"""The norms of a block."""

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


def identity(x: Tensor) -> Tensor:
    """Return x; in place of a norm that a block does not have."""
    return x


class RmsNorm:
    """x / rms(x) * weight (Zhang and Sennrich 2019).

    On a CPU, where torch has no kernel of it, with fewer operations than torch's own: x divided by
    hypot(length, sqrt(eps * width)), times weight * sqrt(width); in float32.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._on_cpu = weight.device.type == "cpu"
        self._scaled = weight.float() * math.sqrt(len(weight))
        self._epsilon = torch.tensor(math.sqrt(eps * len(weight)), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._on_cpu:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        x32 = x.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).hypot_(self._epsilon)
        is_copy = x.dtype != torch.float32  # may be overwritten
        weighted = x32.mul_(self._scaled) if is_copy else torch.mul(x32, self._scaled)
        return weighted.div_(length).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class WideRmsNorm:
    """RmsNorm computed in float32 with a float32 weight: Gemma's is 1 + the stored value, which fewer bits would
    round."""

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


def norm_without_weight(kind: NormKind, width: int, eps: float) -> Norm:
    """Return a norm of that kind without a weight, over the last dimension, of `width`."""
    match kind:
        case "rms":
            return partial(F.rms_norm, normalized_shape=(width,), eps=eps)
        case "rms_plus_one":
            return lambda x: F.rms_norm(x.float(), (width,), eps=eps)
        case "layer":
            return partial(F.layer_norm, normalized_shape=(width,), eps=eps)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Norm per head of [T, heads, head_dim]: `norm` without a weight, then the head's own weight, [heads, head_dim].

    rms_epsilon: of an RMS norm; None for another kind.
    """

    norm: Norm
    weight: Tensor
    rms_epsilon: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return (self.norm(x) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionNorm:
    """Norm of all query heads of [T, heads, head_dim] as one vector, and of all key heads as another."""

    queries: Norm
    keys: Norm
    heads: int

    def __call__(self, x: Tensor) -> Tensor:
        queries, keys = x[:, : self.heads], x[:, self.heads :]
        normed = self.queries(queries.flatten(1)).view_as(queries), self.keys(keys.flatten(1)).view_as(keys)
        return torch.cat(normed, dim=1)
