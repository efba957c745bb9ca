"""Paged attention through flash-attn (Dao 2023), where it is installed."""

from __future__ import annotations

from flash_attn import flash_attn_with_kvcache
from torch import Tensor

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
    """See `interface.PagedAttention`. Pages of a multiple of 256 tokens, half precision; soft-cap from 2.6 on."""
    CallShape.of(q, k_new, v_new, k_pages, block_table)
    options: dict[str, float] = {"softcap": softcap} if softcap else {}
    out: Tensor = flash_attn_with_kvcache(
        q=q,
        k=k_new,
        v=v_new,
        k_cache=k_pages,
        v_cache=v_pages,
        cache_seqlens=lengths,
        block_table=block_table,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        **options,
    )
    return out.contiguous()
