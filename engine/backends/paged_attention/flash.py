"""Paged attention through flash-attn (Dao 2023), where it is installed."""

from __future__ import annotations

from typing import Any

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

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
    """See `interface.PagedAttention`. Pages of a multiple of 256 tokens, half precision; soft-cap from 2.6 on."""
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True, "block_table": block_table}
    options["window_size"] = (-1, -1) if window is None else (window - 1, 0)
    if softcap:
        options["softcap"] = softcap
    out: Tensor
    if chunks is not None:
        max_tokens = block_table.shape[1] * k_pages.shape[1]
        out = flash_attn_varlen_func(
            *(q, k_pages, v_pages, chunks.starts, chunks.key_starts, max(chunks.q_lens), max_tokens), **options
        )
        return out.contiguous()
    CallShape.of(q, k_new, v_new, k_pages, block_table)
    out = flash_attn_with_kvcache(
        q=q, k=k_new, v=v_new, k_cache=k_pages, v_cache=v_pages, cache_seqlens=lengths, **options
    )
    return out.contiguous()
