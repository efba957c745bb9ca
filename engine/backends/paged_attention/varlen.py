"""Paged attention through torch's own FlashAttention 2: torch.nn.attention.varlen, from torch 2.12 on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.backends.paged_attention.gathered import append
from engine.backends.paged_attention.interface import CallShape


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """See `interface.PagedAttention`. Pages of a multiple of 256 tokens, half precision, no soft-cap."""
    shape = CallShape.of(q, k_new, v_new, k_pages, block_table)
    if softcap:
        raise ValueError("torch's varlen_attn has no soft-cap")
    totals = lengths
    if k_new is not None and v_new is not None:
        append(k_new, v_new, k_pages, v_pages, lengths, block_table)
        totals = lengths + shape.q_len
    rows = shape.batch * shape.q_len
    out = varlen_attn(
        q.reshape(rows, shape.heads, shape.head_dim),
        k_pages,
        v_pages,
        torch.arange(0, rows + 1, shape.q_len, dtype=torch.int32, device=q.device),
        torch.nn.functional.pad(totals.cumsum(0, dtype=torch.int32), (1, 0)),
        shape.q_len,
        shape.max_tokens,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=totals,
        block_table=block_table,
    )
    assert isinstance(out, Tensor)
    return out.view(q.shape).contiguous()
