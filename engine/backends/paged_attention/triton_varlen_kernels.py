# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `triton_attention` is the typed way in.
"""The Triton kernels of paged attention over sequences with any numbers of new tokens, in one launch: prompts beside
decodes.

The host knows every length when it plans a step, so it cuts the work: an item is a block of rows of one sequence with a
range of its keys, and several items with the same rows are merged after. A sequence with one new token has blocks of
`decode_m` rows, which its query heads fill, any other one blocks of `block_m`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.paged_attention.triton_kernels import attend_pages, combined


@triton.jit
def _attend_item(
    q,
    k_pages,
    v_pages,
    out,
    parts,
    part_sums,
    table_row,
    first_row,
    q_len,
    total,
    item,
    kv_head,
    q_heads,
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
    code_group: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Attend with one item's block of rows of a sequence of `total` tokens, whose `q_len` last ones are rows from
    `first_row` on."""
    row_block, first, blocks, slot = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    start = total - q_len
    rows = row_block * block_m + tl.arange(0, block_m)
    tokens = rows // group
    heads = kv_head * group + rows % group
    dims = tl.arange(0, block_d)[None, :]
    live = (tokens < q_len)[:, None] & (dims < head_dim)
    q_base = q + first_row * q_heads * head_dim
    q_tile = tl.load(q_base + ((tokens * q_heads + heads) * head_dim)[:, None] + dims, mask=live, other=0.0)
    if upcast:
        q_tile = q_tile.to(tl.float32)
    limit = start + tl.minimum((row_block * block_m + block_m - 1) // group, q_len - 1) + 1
    dtype: tl.constexpr = out.dtype.element_ty
    acc, high, weight = attend_pages(
        q_tile,
        start + tokens,
        start + row_block * block_m // group,
        first,
        tl.minimum(first + blocks, tl.cdiv(limit, block_n)),
        limit,
        table_row,
        k_pages + kv_head * k_head,
        v_pages + kv_head * v_head,
        k_pages,
        v_pages,
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
        bits,
        code_group,
        False,
        window,
        capped,
        upcast,
        False,
        dtype,
        block_m,
        block_n,
        block_d,
    )
    some = weight > 0.0
    acc = acc / tl.where(some, weight, 1.0)[:, None]
    if slot < 0:
        out_base = out + first_row * (kv_heads * group * head_dim)
        out_rows = tokens * (kv_heads * group) + heads
        tl.store(out_base + out_rows[:, None] * head_dim + dims, acc.to(dtype), mask=live)
    else:
        part_rows = slot + kv_head * block_m + tl.arange(0, block_m)
        tl.store(parts + part_rows[:, None] * head_dim + dims, acc, mask=live)
        sums = tl.where(some, high + tl.math.log2(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(part_sums + part_rows, sums, mask=tokens < q_len)


@triton.jit(do_not_specialize=["table_stride", "q_heads"])
def varlen_kernel(
    q,
    k_pages,
    v_pages,
    out,
    parts,
    part_sums,
    starts,
    lengths,
    block_table,
    items,
    table_stride,
    q_heads,
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
    code_group: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    decode_m: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per (item, key head), for sequences with any numbers of rows: `q` and `out` [T, Hq, D], those of
    sequence s from `starts[s]` on.

    items int32 [n, 5]: sequence; its block of rows, of `block_m`, or of `decode_m` where it has one token; first block
    of keys, and their number; row of `parts` [rows, D] and `part_sums` [rows] from which on the key heads' results
    lie, or -1 for `out`. Otherwise like `attend_kernel`.
    """
    item = items + tl.program_id(0) // kv_heads * 5
    kv_head = tl.program_id(0) % kv_heads
    sequence = tl.load(item)
    first_row = tl.load(starts + sequence)
    q_len = tl.load(starts + sequence + 1) - first_row
    total = tl.load(lengths + sequence)
    first_row = first_row.to(tl.int64)
    table_row = block_table + sequence * table_stride
    if q_len == 1:
        _attend_item(
            q,
            k_pages,
            v_pages,
            out,
            parts,
            part_sums,
            table_row,
            first_row,
            1,
            total,
            item,
            kv_head,
            q_heads,
            inner,
            outer,
            k_page,
            k_token,
            k_head,
            v_page,
            v_token,
            v_head,
            kv_heads,
            group,
            head_dim,
            page_tokens,
            bits,
            code_group,
            window,
            capped,
            upcast,
            decode_m,
            block_n,
            block_d,
        )
    else:
        _attend_item(
            q,
            k_pages,
            v_pages,
            out,
            parts,
            part_sums,
            table_row,
            first_row,
            q_len,
            total,
            item,
            kv_head,
            q_heads,
            inner,
            outer,
            k_page,
            k_token,
            k_head,
            v_page,
            v_token,
            v_head,
            kv_heads,
            group,
            head_dim,
            page_tokens,
            bits,
            code_group,
            window,
            capped,
            upcast,
            block_m,
            block_n,
            block_d,
        )


@triton.jit
def varlen_combine_kernel(
    parts,
    part_sums,
    out,
    starts,
    merges,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    decode_m: tl.constexpr,
    block_m: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per (merge, key head) x row of a block: the parts that `varlen_kernel` wrote.

    merges int32 [n, 4]: sequence, its block of rows, the first row of the first part, and the number of parts.
    """
    merge = merges + tl.program_id(0) // kv_heads * 4
    kv_head = tl.program_id(0) % kv_heads
    sequence, row_block, slot, num_parts = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    first_row = tl.load(starts + sequence)
    q_len = tl.load(starts + sequence + 1) - first_row
    block = tl.where(q_len == 1, decode_m, block_m)
    row = row_block * block + tl.program_id(1)
    token = row // group
    if tl.program_id(1) >= block or token >= q_len:
        return
    at = slot + kv_head * block + tl.program_id(1)
    result = combined(parts, part_sums, at, kv_heads * block, num_parts, head_dim, block_s, block_d)
    dims = tl.arange(0, block_d)
    out_row = (first_row + token).to(tl.int64) * (kv_heads * group) + kv_head * group + row % group
    tl.store(out + out_row * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
