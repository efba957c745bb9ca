"""What scores become before the softmax: scaled, and soft-capped where the model says so (Riviere et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.step_memory import MAX_SCORES_BYTES


@dataclass(frozen=True, slots=True)
class Scores:
    """heads: query heads.  scale: what their dot products with keys are multiplied by.  cap: scores become
    cap * tanh(score / cap); 0 for none."""

    heads: int
    scale: float
    cap: float = 0.0


def capped_(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def capped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention that SDPA does not know, in float32: q [B, H, n, d] over keys and values [B, K, L, d].

    mask: added to the scores, [n, L] or [B, 1, n, L]; None where all is seen. Returns [B, H, n, d].
    """
    batch, heads, count, size = q.shape
    kv_heads, length = keys.shape[1:3]
    keys, values = keys.float().transpose(-1, -2), values.float()
    out = torch.empty_like(q)
    rows = max(1, MAX_SCORES_BYTES // (4 * batch * heads * length))
    for first in range(0, count, rows):
        some = slice(first, first + rows)
        part = q[:, :, some].float().reshape(batch, kv_heads, -1, size) @ keys
        part = capped_(part.mul_(scores.scale), scores.cap).view(batch, heads, -1, length)
        if mask is not None:
            part += mask[..., some, :]
        weights = part.softmax(-1).view(batch, kv_heads, -1, length)
        out[:, :, some] = (weights @ values).view(batch, heads, -1, size)
    return out
