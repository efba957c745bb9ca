# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `layer_ops` is the typed way in.
"""The Triton kernels of a mixture of experts: one launch computes all experts that a step needs, as the fused MoE
kernels of vLLM and SGLang do. Which those are is found on the device, so that the host waits for nothing.

An assignment is one row of x and one of its experts, number row * per_token + its place among the row's experts. Sorted
by expert, `order` int32 [assignments] has their numbers, and `ends` int32 [experts] where each expert's end. A block is
`block_m` adjacent ones of one expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.torch.cuda.layer_kernels import activated


@triton.jit(do_not_specialize=["experts"])
def route_kernel(
    logits, chosen, weights, experts, per_token: tl.constexpr, normalised: tl.constexpr, block_e: tl.constexpr
):
    """One program per row of `logits` [rows, experts]: the per_token experts with the highest softmax, the first among
    equals, ascending, and their shares in float32; normalised: those add up to 1. Of a row that is not finite, any."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, block_e)
    exists = each < experts
    logit = tl.load(logits + row * experts + each, mask=exists, other=-float("inf")).to(tl.float32)
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    left = tl.where(exists, tl.where(share == share, share, 0.0), -1.0)
    picked = each < 0
    for _ in tl.static_range(per_token):
        best = each == tl.argmax(left, 0)
        picked = picked | best
        left = tl.where(best, -2.0, left)
    share = tl.where(picked, share, 0.0)
    if normalised:
        share = share / tl.sum(share, 0)
    at = row * per_token + tl.cumsum(picked.to(tl.int32), 0) - 1
    tl.store(chosen + at, each, mask=picked)
    tl.store(weights + at, share, mask=picked)


@triton.jit(do_not_specialize=["assignments"])
def order_kernel(chosen, order, ends, assignments, block: tl.constexpr):
    """One program per expert: the numbers of its assignments, in order, and their end; int32 chosen [assignments]."""
    expert = tl.program_id(0)
    lower = 0
    mine = 0
    for first in range(0, assignments, block):
        at = first + tl.arange(0, block)
        found = tl.load(chosen + at, mask=at < assignments, other=2147483647)
        lower += tl.sum((found < expert).to(tl.int32), 0)
        mine += tl.sum((found == expert).to(tl.int32), 0)
    tl.store(ends + expert, lower + mine)
    for first in range(0, assignments, block):
        at = first + tl.arange(0, block)
        found = tl.load(chosen + at, mask=at < assignments, other=2147483647) == expert
        tl.store(order + lower + tl.cumsum(found.to(tl.int32), 0) - 1, at, mask=found)
        lower += tl.sum(found.to(tl.int32), 0)


@triton.jit
def expert_block(ends, experts, block_m: tl.constexpr, block_e: tl.constexpr):
    """Return the expert of this program's block, its first sorted assignment, and the end of the expert's; the expert
    is `experts` behind the last block."""
    block = tl.program_id(1)
    each = tl.arange(0, block_e)
    exists = each < experts
    stop = tl.load(ends + each, mask=exists, other=0)
    start = tl.load(ends + each - 1, mask=exists & (each > 0), other=0)
    blocks = tl.where(exists, (stop - start + block_m - 1) // block_m, 0)
    upto = tl.cumsum(blocks, 0)
    expert = tl.sum(((upto <= block) & exists).to(tl.int32), 0)
    mine = each == expert
    first = tl.sum(tl.where(mine, start + (block - upto + blocks) * block_m, 0), 0)
    return expert, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit(do_not_specialize=["experts"])
def gate_up_kernel(
    x,
    out,
    weights,
    order,
    ends,
    experts,
    inner,
    inputs,
    per_token: tl.constexpr,
    activation: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    block_e: tl.constexpr,
):
    """One program per block_n of `inner` x block: activation(gate) * up of each assignment, sorted: out
    [assignments, inner] for x [rows, inputs].

    weights: int64 [experts] addresses of matrices [2 * inner, inputs] of x's dtype, the gate's rows first.  upcast:
    multiply in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    expert, first, end = expert_block(ends, experts, block_m, block_e)
    if expert >= experts:
        return
    sorted_rows = first + tl.arange(0, block_m)
    live = sorted_rows < end
    x_rows = tl.load(order + sorted_rows, mask=live, other=0) // per_token
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    weight = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
    weight = tl.multiple_of(weight, 16)
    gate = tl.zeros([block_m, block_n], dtype=tl.float32)
    up = tl.zeros([block_m, block_n], dtype=tl.float32)
    x_at = x + x_rows.to(tl.int64)[:, None] * inputs
    gate_at = weight + columns.to(tl.int64)[None, :] * inputs
    up_at = gate_at + inner.to(tl.int64) * inputs
    for start in range(0, inputs, block_k):
        k = start + tl.arange(0, block_k)
        x_tile = tl.load(x_at + k[None, :], mask=live[:, None] & (k < inputs)[None, :], other=0.0)
        inside = (k < inputs)[:, None] & (columns < inner)[None, :]
        gate_tile = tl.load(gate_at + k[:, None], mask=inside, other=0.0)
        up_tile = tl.load(up_at + k[:, None], mask=inside, other=0.0)
        if upcast:
            x_tile = x_tile.to(tl.float32)
            gate_tile = gate_tile.to(tl.float32)
            up_tile = up_tile.to(tl.float32)
        gate += tl.dot(x_tile, gate_tile)
        up += tl.dot(x_tile, up_tile)
    dtype: tl.constexpr = x.dtype.element_ty
    gated = activated(gate.to(dtype).to(tl.float32), activation).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    keep = live[:, None] & (columns < inner)[None, :]
    tl.store(out + sorted_rows.to(tl.int64)[:, None] * inner + columns[None, :], gated.to(dtype), mask=keep)


@triton.jit(do_not_specialize=["experts"])
def down_kernel(
    x,
    out,
    weights,
    order,
    ends,
    experts,
    outputs,
    inputs,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    block_e: tl.constexpr,
):
    """One program per block_n outputs x block: out [assignments, outputs] by number, for x [assignments, inputs]
    sorted. weights: int64 [experts] addresses of matrices [outputs, inputs]."""
    expert, first, end = expert_block(ends, experts, block_m, block_e)
    if expert >= experts:
        return
    sorted_rows = first + tl.arange(0, block_m)
    live = sorted_rows < end
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    weight = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
    weight = tl.multiple_of(weight, 16)
    acc = tl.zeros([block_m, block_n], dtype=tl.float32)
    x_at = x + sorted_rows.to(tl.int64)[:, None] * inputs
    weight_at = weight + columns.to(tl.int64)[None, :] * inputs
    for start in range(0, inputs, block_k):
        k = start + tl.arange(0, block_k)
        x_tile = tl.load(x_at + k[None, :], mask=live[:, None] & (k < inputs)[None, :], other=0.0)
        tile = tl.load(weight_at + k[:, None], mask=(k < inputs)[:, None] & (columns < outputs)[None, :], other=0.0)
        if upcast:
            x_tile = x_tile.to(tl.float32)
            tile = tile.to(tl.float32)
        acc += tl.dot(x_tile, tile)
    number = tl.load(order + sorted_rows, mask=live, other=0).to(tl.int64)
    keep = live[:, None] & (columns < outputs)[None, :]
    tl.store(out + number[:, None] * outputs + columns[None, :], acc.to(x.dtype.element_ty), mask=keep)


@triton.jit
def mix_kernel(x, weights, out, width, per_token: tl.constexpr, block: tl.constexpr):
    """One program per row x `block` columns: the sum of x [rows * per_token, width] by float32 weights [rows,
    per_token], always in order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros([block], dtype=tl.float32)
    for place in tl.static_range(per_token):
        number = row * per_token + place
        total += tl.load(x + number * width + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(
            weights + number
        )
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
