# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `layer_ops` is the typed way in.
"""The Triton kernels between the products of a layer: each does in one launch what torch does in two to six, and rounds
where torch does."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)


@triton.jit
def activated(x, activation: tl.constexpr):
    """Return silu, gelu or gelu_tanh of float32 x."""
    if activation == "silu":
        found = x / (1.0 + tl.exp(-x))
    elif activation == "gelu":
        found = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    else:
        inner = _GELU_SCALE * (x + 0.044715 * x * x * x)
        found = x / (1.0 + tl.exp(-2.0 * inner))
    return found


@triton.jit
def gate_kernel(both, out, inner, activation: tl.constexpr, block: tl.constexpr):
    """One program per row x `block` columns: activation(gate) * up of `both` [rows, 2 * inner], gate first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    at = both + row * (2 * inner) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    gated = activated(gate, activation).to(dtype).to(tl.float32) * up
    tl.store(out + row * inner + columns, gated.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["epsilon"])
def add_norm_kernel(hidden, added, weight, out, width, epsilon, block: tl.constexpr):
    """One program per row of `width` <= block: hidden += added in place, and out = the RMS norm of that sum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * width + columns
    dtype: tl.constexpr = hidden.dtype.element_ty
    total = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(dtype)
    tl.store(hidden + at, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    normed = total * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(dtype), mask=inside)


@triton.jit
def _normed(x, scale, weight, at, inside, norm: tl.constexpr, dtype: tl.constexpr):
    """Return x * scale * weight, as float32 of `dtype`; norm "rms" rounds before the weight, too."""
    x = x * scale
    if norm == "rms":
        x = x.to(dtype).to(tl.float32)
    return (x * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["epsilon"])
def rotate_and_write_kernel(
    qkv,
    cos,
    sin,
    weight,
    slots,
    pages,
    epsilon,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotated: tl.constexpr,
    rotates: tl.constexpr,
    norm: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
    block_r: tl.constexpr,
):
    """One program per row x block_h heads of qkv [rows, heads + 2 * kv_heads, head_dim]: query and key heads are normed
    and rotated, queries in place, and keys and values written to pages [slots, 2 * kv_heads, head_dim].

    cos, sin: [rows, rotated]; sin's first half is negated.  weight: of the norm, [heads + kv_heads, head_dim].  norm:
    "", "rms" or "rms_plus_one".  rotates: False for a layer without rotation.  A program's thread that writes a number
    has read both that it depends on, as halves of a head are loaded apart.
    block_d >= rotated / 2.  block_r >= head_dim - rotated; 0 where all is rotated.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    half: tl.constexpr = rotated // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    exists = head < heads + 2 * kv_heads
    turned = head < heads + kv_heads
    column = tl.arange(0, block_d)
    inside = exists[:, None] & (column < half)[None, :]
    source = qkv + row * ((heads + 2 * kv_heads) * head_dim) + (head * head_dim)[:, None]
    first = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if block_r > 0:
        rest_column = tl.arange(0, block_r)
        rest_inside = exists[:, None] & (rest_column < head_dim - rotated)[None, :]
        rest = tl.load(source + rotated + rest_column[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    if norm != "":
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if block_r > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / head_dim + epsilon)[:, None]
        at = (head * head_dim)[:, None] + column[None, :]
        normed = inside & turned[:, None]
        first = tl.where(turned[:, None], _normed(first, scale, weight, at, normed, norm, dtype), first)
        second = tl.where(turned[:, None], _normed(second, scale, weight, at + half, normed, norm, dtype), second)
        if block_r > 0:
            rest_at = (head * head_dim + rotated)[:, None] + rest_column[None, :]
            normed = rest_inside & turned[:, None]
            rest = tl.where(turned[:, None], _normed(rest, scale, weight, rest_at, normed, norm, dtype), rest)
    if rotates:
        angle = row * rotated + column
        cosine = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sin + half + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
        new_first = (first * cosine).to(dtype).to(tl.float32) - second * sine
        new_second = (second * cosine).to(dtype).to(tl.float32) + first * sine
        first = tl.where(turned[:, None], new_first, first)
        second = tl.where(turned[:, None], new_second, second)
    is_query = (head < heads)[:, None]
    slot = tl.load(slots + row)
    target = pages + slot * (2 * kv_heads * head_dim) + ((head - heads) * head_dim)[:, None]
    tl.store(source + column[None, :], first.to(dtype), mask=inside & is_query)
    tl.store(source + half + column[None, :], second.to(dtype), mask=inside & is_query)
    tl.store(target + column[None, :], first.to(dtype), mask=inside & (head >= heads)[:, None])
    tl.store(target + half + column[None, :], second.to(dtype), mask=inside & (head >= heads)[:, None])
    if block_r > 0:
        tl.store(source + rotated + rest_column[None, :], rest.to(dtype), mask=rest_inside & is_query)
        tl.store(target + rotated + rest_column[None, :], rest.to(dtype), mask=rest_inside & (head >= heads)[:, None])
