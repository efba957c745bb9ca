# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `triton_kernel` is the typed way in.
"""The Triton kernels of paged attention: append, attend, combine.

Attention follows FlashAttention-2 (Dao 2023): blocks of keys with a running maximum and sum in float32. The keys of a
long context are split over programs and put together after (flash-decoding, Dao et al. 2023). The query heads that
share a key head are rows of one block. Scores are in powers of two. Only features that Triton has had since 2.3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "q_len"])
def append_kernel(
    k_new,
    v_new,
    k_pages,
    v_pages,
    lengths,
    block_table,
    table_stride,
    q_len,
    k_new_b,
    k_new_t,
    k_new_h,
    v_new_b,
    v_new_t,
    v_new_h,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per new token (B * q_len): all its key and value heads into their page."""
    row = tl.program_id(0)
    sequence = row // q_len
    token = row % q_len
    position = tl.load(lengths + sequence) + token
    page = tl.load(block_table + sequence * table_stride + position // page_tokens).to(tl.int64)
    slot = position % page_tokens
    heads = tl.arange(0, block_h)[:, None]
    dims = tl.arange(0, block_d)[None, :]
    inside = (heads < kv_heads) & (dims < head_dim)
    k = tl.load(k_new + sequence * k_new_b + token * k_new_t + heads * k_new_h + dims, mask=inside)
    tl.store(k_pages + page * k_page + slot * k_token + heads * k_head + dims, k, mask=inside)
    v = tl.load(v_new + sequence * v_new_b + token * v_new_t + heads * v_new_h + dims, mask=inside)
    tl.store(v_pages + page * v_page + slot * v_token + heads * v_head + dims, v, mask=inside)


@triton.jit(do_not_specialize=["table_stride", "q_len", "added", "splits"])
def attend_kernel(
    q,
    k_pages,
    v_pages,
    out,
    parts,
    part_sums,
    lengths,
    block_table,
    table_stride,
    q_len,
    added,
    splits,
    inner,
    outer,
    q_b,
    q_t,
    q_h,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    split: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per (block of query rows, sequence, key head) x (part of its keys).

    Row r of a key head is token r // group, head r % group. window 0 is none. Writes `out` [B, q_len, Hq, D]; or,
    split, float32 `parts` [B, q_len, Hq, splits, D] and the logarithm of their sums, `part_sums` [..., splits].
    upcast: multiply in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    row_blocks = tl.cdiv(q_len * group, block_m)
    # The last rows see the most keys: they go first, so that no long program starts late.
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    sequence = tl.program_id(0) // row_blocks // kv_heads
    kv_head = tl.program_id(0) // row_blocks % kv_heads
    part = tl.program_id(1)

    total = tl.load(lengths + sequence) + added
    start = total - q_len
    rows = row_block * block_m + tl.arange(0, block_m)
    tokens = rows // group
    heads = kv_head * group + rows % group
    positions = start + tokens
    dims = tl.arange(0, block_d)[None, :]
    live = (tokens < q_len)[:, None] & (dims < head_dim)
    q_at = sequence.to(tl.int64) * q_b + (tokens * q_t + heads * q_h)[:, None]
    q_tile = tl.load(q + q_at + dims, mask=live, other=0.0)
    if upcast:
        q_tile = q_tile.to(tl.float32)

    first_position = start + row_block * block_m // group
    last_token = tl.minimum((row_block * block_m + block_m - 1) // group, q_len - 1)
    limit = tl.maximum(start + last_token + 1, 0)
    first_block = 0
    if window > 0:
        first_block = tl.maximum(first_position - window + 1, 0) // block_n
    end_block = tl.cdiv(limit, block_n)
    share = tl.cdiv(tl.maximum(end_block - first_block, 0), splits)
    first = first_block + part * share
    last = tl.minimum(first + share, end_block)
    # Blocks that every row sees whole need no mask.
    whole = first
    if window == 0:
        whole = tl.maximum(tl.minimum((first_position + 1) // block_n, last), first)

    acc = tl.zeros([block_m, block_d], dtype=tl.float32)
    high = tl.full([block_m], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([block_m], dtype=tl.float32)
    k_base = k_pages + kv_head * k_head
    v_base = v_pages + kv_head * v_head
    table_row = block_table + sequence * table_stride
    # masked: some row may not see some key, or keys end within a block.
    for masked in tl.static_range(window > 0, 2):
        for block in range(whole if masked else first, last if masked else whole):
            keys = block * block_n + tl.arange(0, block_n)
            inside = dims < head_dim
            if masked:
                inside = inside & (keys < limit)[:, None]
            if page_tokens % block_n == 0:
                # The whole block lies in one page.
                page = tl.load(table_row + block * block_n // page_tokens).to(tl.int64)
                k_at = page * k_page + (keys % page_tokens)[:, None] * k_token
                v_at = page * v_page + (keys % page_tokens)[:, None] * v_token
            else:
                pages = tl.load(table_row + keys // page_tokens, mask=keys < limit, other=0).to(tl.int64)
                k_at = (pages * k_page + (keys % page_tokens) * k_token)[:, None]
                v_at = (pages * v_page + (keys % page_tokens) * v_token)[:, None]
            k = tl.load(k_base + k_at + dims, mask=inside, other=0.0)
            if upcast:
                k = k.to(tl.float32)
            scores = tl.dot(q_tile, tl.trans(k))
            if capped:  # noqa: SIM108 - decided when compiling
                # tanh(x) = 1 - 2 / (exp(2x) + 1); `inner` holds the 2 and the change of base, `outer` the cap.
                scores = (1.0 - 2.0 / (tl.math.exp2(scores * inner) + 1.0)) * outer
            else:
                scores = scores * inner
            if masked:
                seen = keys[None, :] <= positions[:, None]
                if window > 0:
                    seen = seen & (keys[None, :] > positions[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            new_high = tl.maximum(high, tl.max(scores, 1))
            base = new_high
            if masked:
                # A row that has seen nothing yet: -inf - -inf would be NaN.
                base = tl.where(new_high == float("-inf"), 0.0, new_high)
            probabilities = tl.math.exp2(scores - base[:, None])
            fade = tl.math.exp2(high - base)
            weight = weight * fade + tl.sum(probabilities, 1)
            v = tl.load(v_base + v_at + dims, mask=inside, other=0.0)
            probabilities = probabilities.to(v.dtype)
            if upcast:
                v = v.to(tl.float32)
                probabilities = probabilities.to(tl.float32)
            acc = acc * fade[:, None] + tl.dot(probabilities, v)
            high = new_high
    some = weight > 0.0
    acc = acc / tl.where(some, weight, 1.0)[:, None]
    out_rows = (sequence * q_len + tokens).to(tl.int64) * (kv_heads * group) + heads
    if split:
        part_rows = out_rows * splits + part
        tl.store(parts + part_rows[:, None] * head_dim + dims, acc, mask=live)
        sums = tl.where(some, high + tl.math.log2(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(part_sums + part_rows, sums, mask=tokens < q_len)
    else:
        tl.store(out + out_rows[:, None] * head_dim + dims, acc.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts,
    part_sums,
    out,
    splits,
    head_dim: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per row of `out` [rows, D]: the parts, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_s)
    dims = tl.arange(0, block_d)
    sums = tl.load(part_sums + row * splits + part, mask=part < splits, other=float("-inf"))
    high = tl.max(sums, 0)
    weights = tl.math.exp2(sums - tl.where(high == float("-inf"), 0.0, high))
    total = tl.sum(weights, 0)
    inside = (part < splits)[:, None] & (dims < head_dim)[None, :]
    values = tl.load(parts + (row * splits + part)[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
