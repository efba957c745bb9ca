"""Paged attention over a mixed batch: which rows attend together is planned once per step, then run per layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.torch.kv import KvPool
from engine.backends.torch.step_plan import KeyView, QueryGroup, StepPlan


def attend(layer: int, window: int | None, qkv: Tensor, plan: StepPlan, kv: KvPool, heads: int) -> Tensor:
    """Attention outputs [T, heads * head_dim] of rows `qkv` [T, heads + 2 * kv_heads, head_dim].

    The rows' keys and values must already be in `kv`. Rows of one chunk see the tokens before them and themselves,
    at most `window` of them.
    """
    parts = []
    for group in plan.groups:
        view = group.views[window]
        rows = qkv[group.first_row : group.end_row]
        if view.own_rows:
            keys_values = rows[:, heads:].unsqueeze(0)
        else:
            keys_values = kv.read(layer, view.pages, group.sequences)[:, view.skip : view.skip + view.tokens]
        run = _one_chunk if group.sequences == 1 and group.width > 1 else _many_chunks
        parts.append(run(rows[:, :heads], keys_values, group, view))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_chunk(queries: Tensor, keys_values: Tensor, group: QueryGroup, view: KeyView) -> Tensor:
    """queries [n, H, d] over keys_values [1, L, 2K, d]. Grouped heads share their keys through a zero stride."""
    rows, heads, size = queries.shape
    kv_heads = keys_values.shape[2] // 2
    shared = heads // kv_heads
    q = queries.view(rows, kv_heads, shared, size).permute(1, 2, 0, 3)
    k = keys_values[0, :, :kv_heads].transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
    v = keys_values[0, :, kv_heads:].transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask, is_causal=view.causal)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * size)


def _many_chunks(queries: Tensor, keys_values: Tensor, group: QueryGroup, view: KeyView) -> Tensor:
    """queries [rows, H, d] of B chunks over keys_values [B, L, 2K, d], padded to the group's width and longest.

    Heads that share keys are folded into the query axis, which is several times faster than repeating the keys.
    """
    heads, size = queries.shape[1:]
    kv_heads = keys_values.shape[2] // 2
    shared = heads // kv_heads
    padded = queries if group.pad_rows is None else queries.index_select(0, group.pad_rows)
    q = padded.view(group.sequences, group.width, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(group.sequences, kv_heads, shared * group.width, size)
    k, v = keys_values.transpose(1, 2).split(kv_heads, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask)
    out = out.view(group.sequences, kv_heads, shared, group.width, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(group.sequences * group.width, heads * size)
    return out if group.real_rows is None else out.index_select(0, group.real_rows)
