# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `adapter_slots` is the typed way in.
"""The Triton kernels that add LoRA updates to rows of many adapters, each of which names its own.

Factors are read where they lie: a table has their addresses and ranks, so a launch fits whatever adapters its rows name
(as Punica, Chen et al. 2023, and S-LoRA, Sheng et al. 2023, do). A block of rows goes through the adapters that it
names one after the other; rows of a prompt all have the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _factors(table, slot, place, stride, dtype: tl.constexpr):
    """Return the addresses of a slot's factors at `place` of its `stride` numbers, and their rank; 0 for none."""
    entry = table + slot.to(tl.int64) * stride + place
    a = tl.load(entry).to(tl.pointer_type(dtype))
    b = tl.load(entry + 1).to(tl.pointer_type(dtype))
    return a, b, tl.load(entry + 2).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "place", "stride"])
def shrink_kernel(
    x,
    slots,
    table,
    sums,
    rows,
    inputs,
    place,
    stride,
    max_rank: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    block_r: tl.constexpr,
):
    """One program per block of rows x share of their `inputs` x a share of the blocks of ranks: float32 sums
    [shares, rows, max_rank] of x [rows, inputs] @ a.T of each row's adapter. slots int32 [rows]: -1 for none."""
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    dtype: tl.constexpr = x.dtype.element_ty
    remaining = tl.load(slots + row, mask=row < rows, other=-1)
    slot = tl.max(remaining, 0)
    share = tl.cdiv(tl.cdiv(inputs, block_k), tl.num_programs(1)) * block_k
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, inputs)
    x_rows = row.to(tl.int64)[:, None] * inputs
    while slot >= 0:
        mine = remaining == slot
        a, _b, rank = _factors(table, slot, place, stride, dtype)
        for at in range(tl.program_id(2) * block_r, rank, tl.num_programs(2) * block_r):
            ranks = at + tl.arange(0, block_r)
            total = tl.zeros([block_m, block_r], dtype=tl.float32)
            for k in range(first, last, block_k):
                columns = k + tl.arange(0, block_k)
                inside = columns < last
                values = tl.load(x + x_rows + columns[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
                weights = tl.load(
                    a + ranks[:, None].to(tl.int64) * inputs + columns[None, :],
                    mask=(ranks < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                if upcast:
                    values, weights = values.to(tl.float32), weights.to(tl.float32)
                total += tl.dot(values, tl.trans(weights))
            at_sums = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * max_rank + ranks[None, :]
            tl.store(sums + at_sums, total, mask=mine[:, None] & (ranks < rank)[None, :])
        remaining = tl.where(mine, -1, remaining)
        slot = tl.max(remaining, 0)


@triton.jit(do_not_specialize=["rows", "place", "stride"])
def expand_kernel(
    out,
    slots,
    table,
    sums,
    rows,
    outputs,
    place,
    stride,
    shares: tl.constexpr,
    max_rank: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_r: tl.constexpr,
):
    """One program per block of rows x block of outputs: out [rows, outputs] += the sums, rounded, @ b, in place."""
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    dtype: tl.constexpr = out.dtype.element_ty
    remaining = tl.load(slots + row, mask=row < rows, other=-1)
    slot = tl.max(remaining, 0)
    at_out = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    while slot >= 0:
        mine = remaining == slot
        _a, b, rank = _factors(table, slot, place, stride, dtype)
        if rank > 0:
            inside = mine[:, None] & (column < outputs)[None, :]
            total = tl.load(at_out, mask=inside, other=0.0).to(tl.float32)
            for at in range(0, rank, block_r):
                ranks = at + tl.arange(0, block_r)
                shrunk = tl.zeros([block_m, block_r], dtype=tl.float32)
                for share in tl.static_range(shares):
                    at_sums = (share * rows + row).to(tl.int64)[:, None] * max_rank + ranks[None, :]
                    shrunk += tl.load(sums + at_sums, mask=mine[:, None] & (ranks < rank)[None, :], other=0.0)
                weights = tl.load(
                    b + ranks[:, None].to(tl.int64) * outputs + column[None, :],
                    mask=(ranks < rank)[:, None] & (column < outputs)[None, :],
                    other=0.0,
                )
                shrunk = shrunk.to(dtype)
                if upcast:
                    shrunk, weights = shrunk.to(tl.float32), weights.to(tl.float32)
                total += tl.dot(shrunk, weights)
            tl.store(at_out, total.to(dtype), mask=inside)
        remaining = tl.where(mine, -1, remaining)
        slot = tl.max(remaining, 0)
