# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `triton_attention` is the typed way in.
"""The Triton kernels of paged attention over equally many new tokens of each sequence: append, attend, combine.

Attention follows FlashAttention-2 (Dao 2023): blocks of keys with a running maximum and sum in float32. The keys of a
long context are split over programs and put together after (flash-decoding, Dao et al. 2023). The query heads that
share a key head are rows of one block. Scores are in powers of two. Only features that Triton has had since 2.3.

How many parts a sequence has is decided from its length on the device. So a launch fits every context that its block
table can hold, and programs beyond a short one end at once. Strides of pages are constants, as a model has one set of
them. Those from one row of new heads to the next are numbers of heads (`q_heads`, ...): a single row has any.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split(total, q_len, splits, window: tl.constexpr, block_n: tl.constexpr, min_blocks: tl.constexpr):
    """Return, for a sequence of `total` tokens, the first block of keys that its rows see, the blocks of a part, and
    the number of parts, 1 to `splits`."""
    first = 0
    if window > 0:
        first = tl.maximum(total - q_len - window + 1, 0) // block_n
    blocks = tl.maximum(tl.cdiv(total, block_n) - first, 1)
    share = tl.maximum(tl.cdiv(blocks, splits), min_blocks)
    return first, share, tl.cdiv(blocks, share)


@triton.jit(do_not_specialize=["table_stride", "q_len", "k_new_heads", "v_new_heads"])
def append_kernel(
    k_new,
    v_new,
    k_pages,
    v_pages,
    lengths,
    block_table,
    table_stride,
    q_len,
    k_new_heads,
    v_new_heads,
    k_page: tl.constexpr,
    k_token: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_token: tl.constexpr,
    v_head: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per new token (B * q_len): all its key and value heads into their page."""
    row = tl.program_id(0)
    sequence = row // q_len
    position = tl.load(lengths + sequence) + row % q_len
    page = tl.load(block_table + sequence * table_stride + position // page_tokens).to(tl.int64)
    slot = position % page_tokens
    heads = tl.arange(0, block_h)[:, None]
    dims = tl.arange(0, block_d)[None, :]
    inside = (heads < kv_heads) & (dims < head_dim)
    new_row = row.to(tl.int64)
    k = tl.load(k_new + (new_row * k_new_heads + heads) * head_dim + dims, mask=inside)
    tl.store(k_pages + page * k_page + slot * k_token + heads * k_head + dims, k, mask=inside)
    v = tl.load(v_new + (new_row * v_new_heads + heads) * head_dim + dims, mask=inside)
    tl.store(v_pages + page * v_page + slot * v_token + heads * v_head + dims, v, mask=inside)


@triton.jit
def _load_heads(
    base,
    at,
    dims,
    inside,
    scales,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    apart: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Return heads [n, D] that begin at `base + at` [n, 1]: 16 bits as they are, or codes of 8 or 4 bits times the
    scale of their `group`, float16 after the codes; `common.kv_format.HeadFormat` has the layout. apart: codes and
    scales lie as `common.kv_format.ApartCodes` says, those of the head that begins at `base` from `scales` on."""
    if bits == 16:
        heads = tl.load(base + at + dims, mask=inside, other=0.0)
    else:
        if bits == 8:
            codes = tl.load(base + at + dims, mask=inside, other=0).to(tl.int32)
            if apart:
                codes = (codes & 255) - 128
        else:
            # Byte i has element i in its lower half and i + D / 2 in its upper; both are the upper halves of an int8.
            half: tl.constexpr = head_dim // 2
            both = tl.load(base + at + dims % half, mask=inside, other=0).to(tl.int32)
            if apart:
                codes = ((both >> tl.where(dims < half, 0, 4)) & 15) - 8
            else:
                codes = tl.where(dims < half, (both << 28) >> 24, both & -16)
        if apart:
            group_bytes: tl.constexpr = group * bits // 8
            head_bytes: tl.constexpr = head_dim * bits // 8
            scale_at = scales + at // group_bytes + dims % head_bytes // group_bytes
        else:
            first_scale = (base + at + head_dim * bits // 8).to(tl.pointer_type(tl.float16), bitcast=True)
            scale_at = first_scale + dims // group
        factors = tl.load(scale_at, mask=inside, other=0.0)
        heads = (codes.to(tl.float32) * factors.to(dtype).to(tl.float32)).to(dtype)
    return heads


@triton.jit
def _attend(
    q_tile,
    k,
    v_base,
    v_at,
    v_scales,
    dims,
    inside,
    seen,
    acc,
    high,
    weight,
    inner,
    outer,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    code_group: tl.constexpr,
    apart: tl.constexpr,
    head_dim: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    masked: tl.constexpr,
):
    """Return the sums of values and of weights, and the largest scores, after one more block of keys. Its values are
    loaded once the scores need no more registers. seen: which keys each row sees, where some are masked."""
    if upcast:
        k = k.to(tl.float32)
    scores = tl.dot(q_tile, tl.trans(k))
    if capped:  # noqa: SIM108 - decided when compiling
        # tanh(x) = 1 - 2 / (exp(2x) + 1); `inner` holds the 2 and the change of base, `outer` the cap.
        scores = (1.0 - 2.0 / (tl.math.exp2(scores * inner) + 1.0)) * outer
    else:
        scores = scores * inner
    if masked:
        scores = tl.where(seen, scores, float("-inf"))
    new_high = tl.maximum(high, tl.max(scores, 1))
    base = new_high
    if masked:
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_high == float("-inf"), 0.0, new_high)
    probabilities = tl.math.exp2(scores - base[:, None])
    fade = tl.math.exp2(high - base)
    weight = weight * fade + tl.sum(probabilities, 1)
    v = _load_heads(v_base, v_at, dims, inside, v_scales, dtype, bits, code_group, apart, head_dim)
    probabilities = probabilities.to(v.dtype)
    if upcast:
        v = v.to(tl.float32)
        probabilities = probabilities.to(tl.float32)
    acc = acc * fade[:, None] + tl.dot(probabilities, v)
    return acc, new_high, weight


@triton.jit
def attend_pages(
    q_tile,
    positions,
    first_position,
    first,
    last,
    limit,
    table_row,
    k_base,
    v_base,
    k_scales,
    v_scales,
    dims,
    inner,
    outer,
    k_page: tl.constexpr,
    k_token: tl.constexpr,
    v_page: tl.constexpr,
    v_token: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    bits: tl.constexpr,
    v_bits: tl.constexpr,
    code_group: tl.constexpr,
    apart: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    append: tl.constexpr,
    dtype: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Return the sums of values and of weights, and the largest scores, of rows at `positions`, the first of them at
    `first_position`, over the blocks of keys from `first` to `last`, of which keys from `limit` on are none. k_scales,
    v_scales: of codes that lie `apart` from theirs."""
    # Blocks that every row sees whole need no mask.
    whole = first
    if window > 0:
        first = tl.maximum(first, tl.maximum(first_position - window + 1, 0) // block_n)
    else:
        whole = tl.maximum(tl.minimum(tl.minimum(first_position + 1, limit) // block_n, last), first)
    acc = tl.zeros([block_m, block_d], dtype=tl.float32)
    high = tl.full([block_m], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([block_m], dtype=tl.float32)
    # masked: some row may not see some key, or keys end within a block.
    for masked in tl.static_range(window > 0, 2):
        for block in range(whole if masked and window == 0 else first, last if masked else whole):
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
            k = _load_heads(k_base, k_at, dims, inside, k_scales, dtype, bits, code_group, apart, head_dim)
            seen = keys[None, :] <= positions[:, None]
            if append:
                seen = seen & (keys < limit)[None, :]
            if window > 0:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            acc, high, weight = _attend(
                q_tile,
                k,
                v_base,
                v_at,
                v_scales,
                dims,
                inside,
                seen,
                acc,
                high,
                weight,
                inner,
                outer,
                dtype,
                v_bits,
                code_group,
                apart,
                head_dim,
                capped,
                upcast,
                masked,
            )
    return acc, high, weight


@triton.jit(do_not_specialize=["table_stride", "q_len", "added", "splits", "q_heads", "k_new_heads", "v_new_heads"])
def attend_kernel(
    q,
    k_new,
    v_new,
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
    q_heads,
    k_new_heads,
    v_new_heads,
    inner,
    outer,
    k_page: tl.constexpr,
    k_token: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_token: tl.constexpr,
    v_head: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    bits: tl.constexpr,
    v_bits: tl.constexpr,
    code_group: tl.constexpr,
    apart: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    append: tl.constexpr,
    min_blocks: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
):
    """One program per (block of query rows, sequence, key head) x (part of its keys).

    Row r of a key head is token r // group, head r % group. window 0 is none. Writes `out` [B, q_len, Hq, D]; or, for a
    sequence of several parts, float32 `parts` [B, q_len, Hq, splits, D] and the logarithm of their sums, `part_sums`
    [..., splits].
    bits, v_bits, code_group: of codes in the pages, whose strides then are in bytes; 16 for plain heads.
    apart: the scales of keys and values, float16 [P, page_tokens, Hkv, D / code_group], are what `k_new` and `v_new`
    hold. Nothing can be appended then.
    append: one block has all rows. The program of the last part reads the new keys and values, up to `block_t` tokens,
    from `k_new` and `v_new`, and writes them into their pages, where no program reads them.
    upcast: multiply in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    row_blocks = tl.cdiv(q_len * group, block_m)
    # The last rows see the most keys: they go first, so that no long program starts late.
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    sequence = tl.program_id(0) // row_blocks // kv_heads
    kv_head = tl.program_id(0) // row_blocks % kv_heads
    part = tl.program_id(1)

    total = tl.load(lengths + sequence) + added
    first_of_all, share, num_parts = _split(total, q_len, splits, window, block_n, min_blocks)
    if part >= num_parts:
        return
    start = total - q_len
    rows = row_block * block_m + tl.arange(0, block_m)
    tokens = rows // group
    heads = kv_head * group + rows % group
    positions = start + tokens
    dims = tl.arange(0, block_d)[None, :]
    live = (tokens < q_len)[:, None] & (dims < head_dim)
    new_row = sequence.to(tl.int64) * q_len
    q_base = q + new_row * q_heads * head_dim
    q_tile = tl.load(q_base + ((tokens * q_heads + heads) * head_dim)[:, None] + dims, mask=live, other=0.0)
    if upcast:
        q_tile = q_tile.to(tl.float32)

    first_position = start + row_block * block_m // group
    limit = start
    if not append:
        last_token = tl.minimum((row_block * block_m + block_m - 1) // group, q_len - 1)
        limit = tl.maximum(start + last_token + 1, 0)
    first = first_of_all + part * share
    last = tl.minimum(first + share, tl.cdiv(limit, block_n))
    k_base = k_pages + kv_head * k_head
    v_base = v_pages + kv_head * v_head
    table_row = block_table + sequence * table_stride
    dtype: tl.constexpr = out.dtype.element_ty
    acc, high, weight = attend_pages(
        q_tile,
        positions,
        first_position,
        first,
        last,
        limit,
        table_row,
        k_base,
        v_base,
        k_new + kv_head * (head_dim // code_group) if apart else k_new,
        v_new + kv_head * (head_dim // code_group) if apart else v_new,
        dims,
        inner,
        outer,
        k_page,
        k_token,
        v_page,
        v_token,
        head_dim,
        page_tokens,
        bits,
        v_bits,
        code_group,
        apart,
        window,
        capped,
        upcast,
        append,
        dtype,
        block_m,
        block_n,
        block_d,
    )
    if append and part == num_parts - 1:
        added_tokens = tl.arange(0, block_t)
        keys = start + added_tokens
        is_new = added_tokens < q_len
        inside = is_new[:, None] & (dims < head_dim)
        k_from = k_new + (new_row * k_new_heads + kv_head) * head_dim
        v_from = v_new + (new_row * v_new_heads + kv_head) * head_dim
        k = tl.load(k_from + (added_tokens * k_new_heads * head_dim)[:, None] + dims, mask=inside, other=0.0)
        v = tl.load(v_from + (added_tokens * v_new_heads * head_dim)[:, None] + dims, mask=inside, other=0.0)
        pages = tl.load(table_row + keys // page_tokens, mask=is_new, other=0).to(tl.int64)
        tl.store(k_base + (pages * k_page + (keys % page_tokens) * k_token)[:, None] + dims, k, mask=inside)
        tl.store(v_base + (pages * v_page + (keys % page_tokens) * v_token)[:, None] + dims, v, mask=inside)
        seen = is_new[None, :] & (added_tokens[None, :] <= tokens[:, None])
        if window > 0:
            seen = seen & (added_tokens[None, :] > tokens[:, None] - window)
        acc, high, weight = _attend(
            q_tile,
            k,
            v_from,
            added_tokens[:, None] * v_new_heads * head_dim,
            v_new,
            dims,
            inside,
            seen,
            acc,
            high,
            weight,
            inner,
            outer,
            dtype,
            16,
            code_group,
            False,
            head_dim,
            capped,
            upcast,
            True,
        )
    some = weight > 0.0
    acc = acc / tl.where(some, weight, 1.0)[:, None]
    # Offsets within a sequence fit 32 bits; those of 64 would take registers that a large block lacks.
    first_row = new_row * (kv_heads * group)
    out_rows = tokens * (kv_heads * group) + heads
    if num_parts > 1:
        part_rows = out_rows * splits + part
        parts_base, sums_base = parts + first_row * splits * head_dim, part_sums + first_row * splits
        tl.store(parts_base + part_rows[:, None] * head_dim + dims, acc, mask=live)
        sums = tl.where(some, high + tl.math.log2(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(sums_base + part_rows, sums, mask=tokens < q_len)
    else:
        out_base = out + first_row * head_dim
        tl.store(out_base + out_rows[:, None] * head_dim + dims, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def combined(
    parts,
    part_sums,
    first,
    stride,
    num_parts,
    head_dim: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
):
    """Return [D] of one row: its parts, `stride` rows of `parts` apart, weighted by their sums."""
    part = tl.arange(0, block_s)
    dims = tl.arange(0, block_d)
    at = first + part * stride
    sums = tl.load(part_sums + at, mask=part < num_parts, other=float("-inf"))
    high = tl.max(sums, 0)
    weights = tl.math.exp2(sums - tl.where(high == float("-inf"), 0.0, high))
    total_weight = tl.sum(weights, 0)
    inside = (part < num_parts)[:, None] & (dims < head_dim)[None, :]
    values = tl.load(parts + at[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    return tl.sum(values * weights[:, None], 0) / tl.where(total_weight > 0.0, total_weight, 1.0)


@triton.jit(do_not_specialize=["q_len", "added", "splits"])
def combine_kernel(
    parts,
    part_sums,
    out,
    lengths,
    q_len,
    added,
    splits,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    min_blocks: tl.constexpr,
    block_n: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per row of `out` [B * q_len * Hq, D]: the parts of its sequence, weighted by their sums. A row of one
    part was written by `attend_kernel`."""
    row = tl.program_id(0)
    total = tl.load(lengths + row // heads // q_len) + added
    _first, _share, num_parts = _split(total, q_len, splits, window, block_n, min_blocks)
    if num_parts == 1:
        return
    row = row.to(tl.int64)
    result = combined(parts, part_sums, row * splits, 1, num_parts, head_dim, block_s, block_d)
    dims = tl.arange(0, block_d)
    tl.store(out + row * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
