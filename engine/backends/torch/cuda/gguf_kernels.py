# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `gguf_linear` is the typed way in.
"""The Triton kernels of weights in the codes of a GGUF file: products, sums of their parts, and decoding.

`gguf_linear.CodedMatrix` has the layout. A group is the inputs of one output that share a scale: 32, or 16 in six-bit
formats. Codes are multiplied as they are, which float16 and bfloat16 represent exactly, and a group's sum is scaled in
float32: no weight is rounded. A constexpr `scales` says how the scales are kept: "halves" as float16 for each group,
"minima" with a float16 minimum besides, "six_bits" as 6-bit scales and minima of 8 groups, "bytes" as int8.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _codes(low, high, matrix_rows, inside, outputs, low_stride, at, part: tl.constexpr, bits: tl.constexpr):
    """Return the codes of group `at`, int32 [rows, group], from 0 on. part: its place in a step, even as `at` is."""
    group: tl.constexpr = 16 if bits == 6 else 32
    # Below 8 bits, two groups share their bytes: the first has the low halves.
    shared: tl.constexpr = 1 if bits == 8 else 2
    columns = tl.arange(0, group)
    pointers = low + matrix_rows.to(tl.int64)[:, None] * low_stride + (at // shared * group + columns)[None, :]
    codes = tl.load(pointers, mask=inside[:, None], other=0).to(tl.int32)
    if bits < 8:
        codes = (codes >> (part % 2 * 4)) & 15
    if bits == 5 or bits == 6:
        words = tl.load(high + at * outputs + matrix_rows, mask=inside, other=0)
        more = (words[:, None] >> (columns * (bits - 4))[None, :]) & (2 ** (bits - 4) - 1)
        codes = codes | (more << 4)
    return codes


@triton.jit
def _numbers(codes, offset: tl.constexpr):
    """Return codes - offset as float32. Below 2**23, a code is the last bits of that number plus itself."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + offset)


@triton.jit
def _factor(scale, small, matrix_rows, inside, outputs, at, part: tl.constexpr, scales: tl.constexpr):
    """Return the scale of group `at` of every output, float32 [rows]."""
    if scales == "six_bits":
        # Words of a super-block: four low bits of 8 scales, of 8 minima, and the two high bits of both.
        words = small + at // 8 * 3 * outputs + matrix_rows
        low = (tl.load(words, mask=inside, other=0) >> (part % 8 * 4)) & 15
        high = (tl.load(words + 2 * outputs, mask=inside, other=0) >> (part % 8 * 2)) & 3
        whole = tl.load(scale + at // 8 * outputs + matrix_rows, mask=inside, other=0.0).to(tl.float32)
        factor = whole * (low | (high << 4)).to(tl.float32)
    elif scales == "bytes":
        whole = tl.load(scale + at // 16 * outputs + matrix_rows, mask=inside, other=0.0).to(tl.float32)
        factor = whole * tl.load(small + at * outputs + matrix_rows, mask=inside, other=0).to(tl.float32)
    else:
        factor = tl.load(scale + at * outputs + matrix_rows, mask=inside, other=0.0).to(tl.float32)
    return factor


@triton.jit
def _shift(minimum, small, matrix_rows, inside, outputs, at, part: tl.constexpr, scales: tl.constexpr):
    """Return what is added to the numbers of group `at` of every output, float32 [rows]."""
    if scales == "six_bits":
        words = small + (at // 8 * 3 + 1) * outputs + matrix_rows
        low = (tl.load(words, mask=inside, other=0) >> (part % 8 * 4)) & 15
        high = (tl.load(words + outputs, mask=inside, other=0) >> (16 + part % 8 * 2)) & 3
        whole = tl.load(minimum + at // 8 * outputs + matrix_rows, mask=inside, other=0.0).to(tl.float32)
        shift = -whole * (low | (high << 4)).to(tl.float32)
    else:
        shift = tl.load(minimum + at * outputs + matrix_rows, mask=inside, other=0.0).to(tl.float32)
    return shift


@triton.jit(do_not_specialize=["rows", "share"])
def multiply_kernel(
    x,
    out,
    bias,
    low,
    high,
    scale,
    minimum,
    small,
    rows,
    inputs,
    outputs,
    out_stride,
    low_stride,
    groups,
    share,
    bits: tl.constexpr,
    offset: tl.constexpr,
    scales: tl.constexpr,
    step_groups: tl.constexpr,
    has_bias: tl.constexpr,
    split: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program per block_n outputs x part of the inputs, `share` steps of step_groups groups: all rows of x.

    x [rows, inputs], dense.  Writes out [rows, outputs], its rows out_stride apart; or, split, float32 parts
    [parts, rows, outputs].  upcast: multiply in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    group: tl.constexpr = 16 if bits == 6 else 32
    matrix_rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inside = matrix_rows < outputs
    x_rows = tl.arange(0, block_m)
    steps = tl.cdiv(groups, step_groups)
    first = tl.program_id(1) * share
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    # Formats without super-blocks have any number of groups.
    ragged: tl.constexpr = scales == "halves" or scales == "minima"
    shifted: tl.constexpr = scales == "minima" or scales == "six_bits"
    ones = tl.full([block_n, group], 1.0, tl.float32)
    if not upcast:
        ones = ones.to(x.dtype.element_ty)
    for index in range(first, tl.minimum(first + share, steps)):
        for part in tl.static_range(step_groups):
            at = index * step_groups + part
            live = inside
            if ragged:
                live = inside & (at < groups)
            codes = _codes(low, high, matrix_rows, live, outputs, low_stride, at, part, bits)
            columns = at * group + tl.arange(0, group)
            x_mask = (x_rows < rows)[None, :]
            if ragged:
                x_mask = x_mask & (columns < inputs)[:, None]
            x_tile = tl.load(x + columns[:, None] + (x_rows * inputs)[None, :], mask=x_mask, other=0.0)
            weight = _numbers(codes, offset)
            if upcast:
                x_tile = x_tile.to(tl.float32)
            else:
                weight = weight.to(x.dtype.element_ty)
            factor = _factor(scale, small, matrix_rows, live, outputs, at, part, scales)
            acc += tl.dot(weight, x_tile) * factor[:, None]
            if shifted:
                # A product with ones sums up x in the layout of the accumulator, without a way through shared memory.
                shift = _shift(minimum, small, matrix_rows, live, outputs, at, part, scales)
                acc += tl.dot(ones, x_tile) * shift[:, None]
    keep = inside[:, None] & (x_rows < rows)[None, :]
    if split:
        part_at = out + (tl.program_id(1) * rows).to(tl.int64) * outputs
        tl.store(part_at + (x_rows * outputs)[None, :] + matrix_rows[:, None], acc, mask=keep)
    else:
        if has_bias:
            acc += tl.load(bias + matrix_rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        out_at = (x_rows.to(tl.int64) * out_stride)[None, :] + matrix_rows[:, None]
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["parts", "rows"])
def combine_kernel(sums, out, bias, parts, rows, outputs, out_stride, has_bias: tl.constexpr, block: tl.constexpr):
    """One program per row and `block` outputs: the sum of float32 `sums` [parts, rows, outputs], always in order."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < outputs
    total = tl.zeros([block], dtype=tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * rows + row).to(tl.int64) * outputs + columns, mask=inside, other=0.0)
    if has_bias:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def decode_kernel(
    out,
    ids,
    low,
    high,
    scale,
    minimum,
    small,
    first,
    count,
    inputs,
    outputs,
    low_stride,
    groups,
    bits: tl.constexpr,
    offset: tl.constexpr,
    scales: tl.constexpr,
    step_groups: tl.constexpr,
    look_up: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program per block_n rows and step of inputs: the weights of rows first, first + 1, ... or of rows `ids`
    (int64 [count]), rounded once to the dtype of out [count, inputs]."""
    group: tl.constexpr = 16 if bits == 6 else 32
    out_rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    wanted = out_rows < count
    if look_up:
        matrix_rows = tl.load(ids + out_rows, mask=wanted, other=0)
        exists = wanted & (matrix_rows >= 0) & (matrix_rows < outputs)
    else:
        matrix_rows = first + out_rows
        exists = wanted
    for part in tl.static_range(step_groups):
        at = tl.program_id(1) * step_groups + part
        live = exists
        if scales == "halves" or scales == "minima":
            live = exists & (at < groups)
        codes = _codes(low, high, matrix_rows, live, outputs, low_stride, at, part, bits)
        factor = _factor(scale, small, matrix_rows, live, outputs, at, part, scales)
        values = _numbers(codes, offset) * factor[:, None]
        if scales == "minima" or scales == "six_bits":
            values += _shift(minimum, small, matrix_rows, live, outputs, at, part, scales)[:, None]
        columns = at * group + tl.arange(0, group)
        out_at = out + out_rows.to(tl.int64)[:, None] * inputs + columns[None, :]
        tl.store(out_at, values.to(out.dtype.element_ty), mask=wanted[:, None] & (columns < inputs)[None, :])
