"""Attention of a layer over the KV pages, for the groups of rows that the step's plan made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.step_memory import MAX_SCORES_BYTES
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.step_plan import KeyView, PagedPlan, QueryGroup, StepPlan

# Scaling and soft-capping of scores (Riviere et al. 2024).


@dataclass(frozen=True, slots=True)
class Scores:
    """heads: query heads.  scale: factor of dot products.  cap: softcap, cap * tanh(score / cap); 0 for none."""

    heads: int
    scale: float
    cap: float = 0.0


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Apply the softcap, cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def softcapped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention with a softcap, which SDPA lacks, in float32: q [B, H, n, d] over keys and values [B, K, L, d].

    mask: added to the scores, [n, L] or [B, 1, n, L], or None. Returns [B, H, n, d].
    """
    batch, heads, count, size = q.shape
    kv_heads, length = keys.shape[1:3]
    keys, values = keys.float().transpose(-1, -2), values.float()
    out = torch.empty_like(q)
    rows = max(1, MAX_SCORES_BYTES // (4 * batch * heads * length))
    for first in range(0, count, rows):
        some = slice(first, first + rows)
        part = q[:, :, some].float().reshape(batch, kv_heads, -1, size) @ keys
        part = softcap_(part.mul_(scores.scale), scores.cap).view(batch, heads, -1, length)
        if mask is not None:
            part += mask[..., some, :]
        weights = part.softmax(-1).view(batch, kv_heads, -1, length)
        out[:, :, some] = (weights @ values).view(batch, heads, -1, size)
    return out


def attend(layer: int, window: int | None, qkv: Tensor, plan: StepPlan, kv: KvPool, scores: Scores) -> Tensor:
    """Return attention outputs [T, heads * head_dim] of rows `qkv` [T, heads + 2 * kv_heads, head_dim].

    The rows' keys and values must already be in `kv`. A row attends to the last `window` tokens of its sequence, itself
    included.
    """
    heads = scores.heads
    queries, keys_values = qkv[:, :heads], qkv[:, heads:]
    if kv.codec is not None:
        queries = kv.codec.rotate(queries)
    if plan.paged is not None:
        attended = _over_pages(layer, window, queries, plan.paged, kv, scores)
    else:
        attended = _attend_gathered(layer, window, queries, keys_values, plan, kv, scores)
    if kv.codec is not None:
        attended = kv.codec.rotate(attended.unflatten(1, (heads, -1))).flatten(1)
    return attended


def _attend_gathered(
    layer: int,
    window: int | None,
    queries: Tensor,
    keys_values: Tensor,
    plan: StepPlan,
    kv: KvPool,
    scores: Scores,
) -> Tensor:
    """Attend over copies of the pages, staged ones first, one call per group. keys_values: those of the rows."""
    parts = plan.staged.attend(layer, queries, keys_values, scores.scale) if plan.staged is not None else []
    parts += [_group(layer, queries, keys_values, group, group.views[window], kv, scores) for group in plan.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _group(
    layer: int,
    queries: Tensor,
    own_keys_values: Tensor,
    group: QueryGroup,
    view: KeyView,
    kv: KvPool,
    scores: Scores,
) -> Tensor:
    rows = slice(group.first_row, group.end_row)
    if view.own_rows:
        keys_values = own_keys_values[rows].unsqueeze(0)
    else:
        keys_values = kv.read(layer, view.pages, group.sequences)
        if view.stale is not None:  # of the page's previous sequence: a mask does not hide NaN
            keys_values.flatten(0, 1).index_fill_(0, view.stale, 0)
        keys_values = keys_values[:, view.skip : view.skip + view.tokens]
    if group.sequences == 1 and group.width > 1:
        return _one_chunk(queries[rows], keys_values, view, scores)
    return _many_chunks(queries[rows], keys_values, group, view, scores)


def _over_pages(layer: int, window: int | None, queries: Tensor, plan: PagedPlan, kv: KvPool, scores: Scores) -> Tensor:
    """Attend over the pages in place, in one call."""
    keys, values = kv.pages(layer)
    attended = plan.attention(
        queries.unsqueeze(1) if plan.chunks is None else queries,
        None,
        None,
        keys,
        values,
        plan.lengths,
        plan.block_table,
        scale=scores.scale,
        window=window,
        softcap=scores.cap,
        chunks=plan.chunks,
    )
    return attended.view(len(queries), -1)


def _one_chunk(queries: Tensor, keys_values: Tensor, view: KeyView, scores: Scores) -> Tensor:
    """Attend with queries [n, H, d] of one long chunk over keys_values [1, L, 2K, d]."""
    k, v = keys_values.transpose(1, 2).chunk(2, dim=1)
    q = queries.transpose(0, 1).unsqueeze(0)
    if scores.cap:
        return softcapped_attention(q, k, v, view.mask, scores)[0].transpose(0, 1).flatten(1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=view.mask, is_causal=view.causal, scale=scores.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


def _many_chunks(queries: Tensor, keys_values: Tensor, group: QueryGroup, view: KeyView, scores: Scores) -> Tensor:
    """Attend with queries [rows, H, d] of B chunks over keys_values [B, L, 2K, d], padded to the group's width and
    length.

    Heads that share keys are folded into the query axis, which is several times faster than repeating the keys.
    """
    heads, size = queries.shape[1:]
    kv_heads = keys_values.shape[2] // 2
    shared = heads // kv_heads
    padded = queries if group.pad_rows is None else queries.index_select(0, group.pad_rows)
    q = padded.view(group.sequences, group.width, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(group.sequences, kv_heads, shared * group.width, size)
    k, v = keys_values.transpose(1, 2).chunk(2, dim=1)
    if scores.cap:
        out = softcapped_attention(q, k, v, view.mask, scores)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask, scale=scores.scale)
    out = out.view(group.sequences, kv_heads, shared, group.width, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(group.sequences * group.width, heads * size)
    return out if group.real_rows is None else out.index_select(0, group.real_rows)
