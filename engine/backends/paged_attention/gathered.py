"""Paged attention in plain torch: pages are gathered, then go through SDPA. Any device, dtype, window and soft-cap."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.paged_attention.interface import CallShape, VarlenChunks

MAX_WORKING_BYTES = 256 << 20
"""About what one gather, and one block of masks or scores, may take; more is done in turns."""


def append(
    k_new: Tensor, v_new: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor, block_table: Tensor
) -> None:
    """Write keys and values [B, q_len, Hkv, D] into the pages, in place, after the `lengths` [B] that are there."""
    page_tokens = k_pages.shape[1]
    positions = lengths.long()[:, None] + torch.arange(k_new.shape[1], device=lengths.device)
    pages = block_table.long().gather(1, positions // page_tokens)
    slots = (pages, positions % page_tokens)
    k_pages.index_put_(slots, k_new)
    v_pages.index_put_(slots, v_new)


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
    """See `interface.PagedAttention`. Every page of the block table is read, which needs no word from the device.
    Sequences with as many new tokens are computed together."""
    if chunks is not None:
        parts, row, sequence = [], 0, 0
        for q_len, run in itertools.groupby(chunks.q_lens):
            count = len(list(run))
            rows, some = q[row : row + count * q_len].unflatten(0, (count, q_len)), slice(sequence, sequence + count)
            found = paged_attention(
                *(rows, None, None, k_pages, v_pages, lengths[some], block_table[some]),
                scale=scale,
                window=window,
                softcap=softcap,
            )
            parts.append(found.flatten(0, 1))
            row, sequence = row + count * q_len, sequence + count
        return torch.cat(parts)
    shape = CallShape.of(q, k_new, v_new, k_pages, block_table)
    totals = lengths.long()
    if k_new is not None and v_new is not None:
        append(k_new, v_new, k_pages, v_pages, lengths, block_table)
        totals = totals + shape.q_len
    sequence_bytes = 2 * shape.max_tokens * shape.kv_heads * shape.head_dim * q.element_size()
    step = max(1, MAX_WORKING_BYTES // max(1, sequence_bytes))
    parts = []
    for first in range(0, shape.batch, step):
        some = slice(first, first + step)
        keys, values = (_gather(pages, block_table[some], totals[some]) for pages in (k_pages, v_pages))
        parts.append(_attend(q[some], keys, values, totals[some], scale, window, softcap))
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _gather(pages: Tensor, block_table: Tensor, totals: Tensor) -> Tensor:
    """[B, Hkv, L, D] of each sequence's pages in order, zero after its last token: a NaN there would pass any mask."""
    found = pages[block_table.long()].flatten(1, 2)
    stale = torch.arange(found.shape[1], device=totals.device) >= totals[:, None]
    return found.masked_fill_(stale[:, :, None, None], 0).transpose(1, 2)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, totals: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    """q [B, q_len, Hq, D] over keys, values [B, Hkv, L, D], some rows at a time."""
    batch, q_len, heads, _ = q.shape
    masks = heads if softcap else heads // keys.shape[1]
    step = max(1, MAX_WORKING_BYTES // max(1, 4 * batch * masks * keys.shape[2]))
    positions = totals[:, None] - q_len + torch.arange(q_len, device=q.device)
    parts = [
        _rows(q[:, first : first + step], keys, values, positions[:, first : first + step], scale, window, softcap)
        for first in range(0, q_len, step)
    ]
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]


def _rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    """q [B, n, Hq, D] at `positions` [B, n].

    Heads that share keys are folded into the query axis: far less memory than repeating the keys.
    """
    batch, count, heads, size = q.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    folded = q.view(batch, count, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)
    key_positions = torch.arange(tokens, device=q.device)
    seen = key_positions <= positions[..., None]
    if window is not None:
        seen &= key_positions > positions[..., None] - window
    mask = seen.repeat(1, group, 1)[:, None]
    if softcap:
        out = _attend_softcapped(folded, keys, values, mask, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    out = out.reshape(batch, kv_heads, group, count, size).permute(0, 3, 1, 2, 4).reshape(q.shape).contiguous()
    return out.masked_fill_((positions < 0)[..., None, None], 0)


def _attend_softcapped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Softmax attention in float32 with capped scores, which SDPA does not know."""
    scores = (q.float() @ keys.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
    return (weights @ values.float()).to(q.dtype)
