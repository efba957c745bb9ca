"""Paged attention through torch's own FlashAttention 2: torch.nn.attention.varlen, from torch 2.12 on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.backends.paged_attention.gathered import append
from engine.backends.paged_attention.interface import CallShape, VarlenChunks


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
    chunks: VarlenChunks | None = None,
) -> Tensor:
    """See `interface.PagedAttention`. Pages of a multiple of 256 tokens, half precision, no soft-cap."""
    if softcap:
        raise ValueError("torch's varlen_attn has no soft-cap")
    rows, totals = q, lengths
    if chunks is not None:
        starts, key_starts, q_len = chunks.starts, chunks.key_starts, max(chunks.q_lens)
    else:
        shape = CallShape.of(q, k_new, v_new, k_pages, block_table)
        if k_new is not None and v_new is not None:
            append(k_new, v_new, k_pages, v_pages, lengths, block_table)
            totals = lengths + shape.q_len
        rows, q_len = q.flatten(0, 1), shape.q_len
        starts = torch.arange(0, len(rows) + 1, q_len, dtype=torch.int32, device=q.device)
        key_starts = torch.nn.functional.pad(totals.cumsum(0, dtype=torch.int32), (1, 0))
    out = varlen_attn(
        rows,
        k_pages,
        v_pages,
        starts,
        key_starts,
        q_len,
        block_table.shape[1] * k_pages.shape[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=totals,
        block_table=block_table,
    )
    assert isinstance(out, Tensor)
    return out.view(q.shape).contiguous()
