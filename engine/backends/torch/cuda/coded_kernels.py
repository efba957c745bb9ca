# mypy: ignore-errors
# Triton's language inside Python's syntax: no type checker knows it. `coded_linear` is the typed way in.
"""The Triton kernels of weights in the codes of their files: products, sums of their parts, and decoding.

`coded_linear.CodedMatrix` has the layout. A group is 32 inputs of one output, or 16 in six-bit formats. Codes are
multiplied as they are, which float16 and bfloat16 represent exactly, and a sum over `span` groups is scaled in float32:
no weight is rounded. A constexpr `scales` says how the scales are kept: "halves" as float16 for each group, "minima"
with a float16 minimum besides, "six_bits" as 6-bit scales and minima of 8 groups, "bytes" as int8, "zeros" as float16
with an uint8 zero point, "floats" as float32 for `row_span` outputs. The last two are those of `span` groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.torch.cuda.moe_kernels import expert_block


@triton.jit
def _packed(low, matrix_rows, low_stride, at, live, bits: tl.constexpr, ragged: tl.constexpr):
    """Return the bytes with the low bits of group `at`, and below 8 bits of the one after it, uint8 [rows, group]."""
    group: tl.constexpr = 16 if bits == 6 else 32
    shared: tl.constexpr = 1 if bits == 8 else 2
    pointers = low + matrix_rows.to(tl.int64)[:, None] * low_stride + at // shared * group
    pointers += tl.arange(0, group)[None, :]
    return tl.load(pointers, mask=live, other=0) if ragged else tl.load(pointers)


@triton.jit
def _numbers(
    packed,
    high,
    zero,
    matrix_rows,
    outputs,
    at,
    live,
    part: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    floats: tl.constexpr,
):
    """Return the numbers of group `at` that its scale is for, float16 [rows, group], all exact.

    part: the group's place in a step, even as `at` is.  zero: [rows], what codes are above their numbers besides
    `offset`.  floats: what codes are, "e4m3", "e4m3_bits" or "e5m2", if not whole numbers.
    """
    if floats == "e4m3":
        return packed.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if floats == "e4m3_bits":
        # Cards before 8.9 have no such conversion. With the bias that float16 has for its exponent, numbers are smaller
        # by 2**8; the sign comes to two places, one of them that of the exponent's first bit.
        codes = (packed.to(tl.int8, bitcast=True).to(tl.int16) << 7) & ~0x4000
        return codes.to(tl.float16, bitcast=True)
    if floats == "e5m2":
        return (packed.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    codes = packed.to(tl.int16)
    # 1024 as float16, 0x6400, has ones as its last places: a code becomes a number by an `or`.
    base = zero.to(tl.float16) + offset
    if bits == 4 and part % 2 == 1:
        # 1024 + 16 * code, without a shift.
        sixteenfold = ((codes & 0xF0) | 0x6400).to(tl.float16, bitcast=True)
        return sixteenfold * 0.0625 - (base + 64.0).to(tl.float16)[:, None]
    if bits < 8:
        codes = (codes >> (part % 2 * 4)) & 15
    if bits == 5 or bits == 6:
        columns = tl.arange(0, packed.shape[1])
        words = tl.load(high + at * outputs + matrix_rows, mask=live, other=0)
        more = (words[:, None] >> (columns * (bits - 4))[None, :]) & (2 ** (bits - 4) - 1)
        codes = codes | (more << 4).to(tl.int16)
    return (codes | 0x6400).to(tl.float16, bitcast=True) - (base + 1024.0).to(tl.float16)[:, None]


@triton.jit
def _factor(
    scale,
    small,
    matrix_rows,
    outputs,
    at,
    live,
    part: tl.constexpr,
    scales: tl.constexpr,
    span: tl.constexpr,
    row_span: tl.constexpr,
):
    """Return the scale of group `at` of every output, float32 [rows]."""
    if scales == "six_bits":
        # Words of a super-block: four low bits of 8 scales, of 8 minima, and the two high bits of both.
        words = small + at // 8 * 3 * outputs + matrix_rows
        low = (tl.load(words) >> (part % 8 * 4)) & 15
        high = (tl.load(words + 2 * outputs) >> (part % 8 * 2)) & 3
        whole = tl.load(scale + at // 8 * outputs + matrix_rows).to(tl.float32)
        factor = whole * (low | (high << 4)).to(tl.float32)
    elif scales == "bytes":
        whole = tl.load(scale + at // 16 * outputs + matrix_rows).to(tl.float32)
        factor = whole * tl.load(small + at * outputs + matrix_rows).to(tl.float32)
    else:
        columns = tl.cdiv(outputs, row_span)
        factor = tl.load(scale + at // span * columns + matrix_rows // row_span, mask=live, other=0.0).to(tl.float32)
    return factor


@triton.jit
def _zero(small, matrix_rows, outputs, at, live, scales: tl.constexpr, span: tl.constexpr):
    """Return the zero point of group `at` of every output, uint8 [rows]; 0 for scales without any."""
    if scales == "zeros":
        zero = tl.load(small + at // span * outputs + matrix_rows, mask=live, other=0)
    else:
        zero = tl.zeros([matrix_rows.shape[0]], dtype=tl.uint8)
    return zero


@triton.jit
def _shift(minimum, small, matrix_rows, outputs, at, live, part: tl.constexpr, scales: tl.constexpr):
    """Return what is added to the numbers of group `at` of every output, float32 [rows]."""
    if scales == "six_bits":
        words = small + (at // 8 * 3 + 1) * outputs + matrix_rows
        low = (tl.load(words) >> (part % 8 * 4)) & 15
        high = (tl.load(words + outputs) >> (16 + part % 8 * 2)) & 3
        whole = tl.load(minimum + at // 8 * outputs + matrix_rows).to(tl.float32)
        shift = -whole * (low | (high << 4)).to(tl.float32)
    else:
        shift = tl.load(minimum + at * outputs + matrix_rows, mask=live, other=0.0).to(tl.float32)
    return shift


@triton.jit
def _sums(
    x_rows,
    order,
    low,
    high,
    scale,
    minimum,
    small,
    matrix_rows,
    first,
    last,
    outputs,
    low_stride,
    groups,
    dtype: tl.constexpr,
    ordered: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    floats: tl.constexpr,
    scales: tl.constexpr,
    span: tl.constexpr,
    row_span: tl.constexpr,
    step_groups: tl.constexpr,
    upcast: tl.constexpr,
):
    """Return the products of `matrix_rows` [n] with rows of x over the steps first, ..., last - 1, float32 [n, m].

    x_rows: pointers to the first input of each row, [m], of `dtype`.  order: the input of x for each of the matrix, if
    `ordered`.
    """
    group: tl.constexpr = 16 if bits == 6 else 32
    shared: tl.constexpr = 1 if bits == 8 else 2
    block_n: tl.constexpr = matrix_rows.shape[0]
    block_m: tl.constexpr = x_rows.shape[0]
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    # Formats without super-blocks have any number of groups.
    ragged: tl.constexpr = scales != "six_bits" and scales != "bytes"
    shifted: tl.constexpr = scales == "minima" or scales == "six_bits"
    summed: tl.constexpr = span if span < step_groups else step_groups
    ones = tl.full([block_n, group], 1.0, tl.float32)
    if not upcast:
        ones = ones.to(dtype)
    for index in range(first, last):
        for part in tl.static_range(step_groups):
            at = index * step_groups + part
            live = at < groups
            if part % shared == 0:
                packed = _packed(low, matrix_rows, low_stride, at, live, bits, ragged)
            if part % summed == 0:
                factor = _factor(scale, small, matrix_rows, outputs, at, live, part, scales, span, row_span)
                zero = _zero(small, matrix_rows, outputs, at, live, scales, span)
                total = tl.zeros([block_n, block_m], dtype=tl.float32)
            weight = _numbers(packed, high, zero, matrix_rows, outputs, at, live, part, bits, offset, floats)
            columns = at * group + tl.arange(0, group)
            if ordered:
                columns = tl.load(order + columns, mask=live, other=0)
            x_at = x_rows[None, :] + columns[:, None]
            x_tile = tl.load(x_at, mask=live, other=0.0) if ragged else tl.load(x_at)
            if upcast:
                x_tile = x_tile.to(tl.float32)
                weight = weight.to(tl.float32)
            else:
                weight = weight.to(dtype)
            total = tl.dot(weight, x_tile, total)
            if part % summed == summed - 1:
                acc += total * factor[:, None]
            if shifted:
                # A product with ones sums up x in the layout of the accumulator, without a way through shared memory.
                shift = _shift(minimum, small, matrix_rows, outputs, at, live, part, scales)
                acc += tl.dot(ones, x_tile) * shift[:, None]
    return acc


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
    share,
    inputs,
    outputs,
    out_stride,
    low_stride,
    groups,
    bits: tl.constexpr,
    offset: tl.constexpr,
    floats: tl.constexpr,
    scales: tl.constexpr,
    span: tl.constexpr,
    row_span: tl.constexpr,
    step_groups: tl.constexpr,
    has_bias: tl.constexpr,
    split: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program per block_n outputs and block_m rows of x, the rows first, x part of the inputs, `share` steps of
    step_groups groups.

    x [rows, inputs], dense.  Writes out [rows, outputs], its rows out_stride apart; or, split, float32 parts
    [parts, rows, outputs].  upcast: multiply in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    # Programs of the same outputs run side by side, so that the codes of all but one come from the cache.
    row_blocks = tl.cdiv(rows, block_m)
    outputs_at = tl.program_id(0) // row_blocks * block_n + tl.arange(0, block_n)
    # Rows beyond the last repeat it, and are not stored: a load without a mask takes fewer instructions.
    matrix_rows = tl.minimum(outputs_at, outputs - 1)
    rows_at = tl.program_id(0) % row_blocks * block_m + tl.arange(0, block_m)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, tl.cdiv(groups, step_groups))
    acc = _sums(
        x + tl.minimum(rows_at, rows - 1) * inputs,
        x,
        low,
        high,
        scale,
        minimum,
        small,
        matrix_rows,
        first,
        last,
        outputs,
        low_stride,
        groups,
        x.dtype.element_ty,
        False,
        bits,
        offset,
        floats,
        scales,
        span,
        row_span,
        step_groups,
        upcast,
    )
    keep = (outputs_at < outputs)[:, None] & (rows_at < rows)[None, :]
    if split:
        part_at = out + (tl.program_id(1) * rows).to(tl.int64) * outputs
        tl.store(part_at + (rows_at * outputs)[None, :] + outputs_at[:, None], acc, mask=keep)
    else:
        if has_bias:
            acc += tl.load(bias + matrix_rows).to(tl.float32)[:, None]
        out_at = (rows_at.to(tl.int64) * out_stride)[None, :] + outputs_at[:, None]
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def multiply_experts_kernel(
    x,
    out,
    order,
    ends,
    addresses,
    experts,
    inputs,
    outputs,
    out_stride,
    low_stride,
    groups,
    parts: tl.constexpr,
    ordered: tl.constexpr,
    divisor: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    floats: tl.constexpr,
    scales: tl.constexpr,
    span: tl.constexpr,
    row_span: tl.constexpr,
    step_groups: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_e: tl.constexpr,
):
    """One program per block_n outputs of one of `parts` matrices x block of assignments, see `moe_kernels`: out
    [assignments, parts * outputs] by number, its rows out_stride apart, of row number // divisor of dense x.

    addresses: int64 [experts, parts, 6], of the arrays of each expert's matrices and of the order of their inputs.
    """
    expert, first, end = expert_block(ends, experts, block_m, block_e)
    if expert >= experts:
        return
    blocks = tl.cdiv(outputs, block_n)
    part = tl.program_id(0) // blocks
    outputs_at = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n)
    sorted_rows = first + tl.arange(0, block_m)
    number = tl.load(order + tl.minimum(sorted_rows, end - 1)).to(tl.int64)
    small_type: tl.constexpr = tl.int8 if scales == "bytes" else tl.uint8 if scales == "zeros" else tl.int32
    scale_type: tl.constexpr = tl.float32 if scales == "floats" else tl.float16
    at = addresses + (expert * parts + part) * 6
    acc = _sums(
        x + number // divisor * inputs,
        tl.multiple_of(tl.load(at + 5).to(tl.pointer_type(tl.int32)), 16),
        tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.uint8)), 16),
        tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(tl.int32)), 16),
        tl.multiple_of(tl.load(at + 2).to(tl.pointer_type(scale_type)), 16),
        tl.multiple_of(tl.load(at + 3).to(tl.pointer_type(tl.float16)), 16),
        tl.multiple_of(tl.load(at + 4).to(tl.pointer_type(small_type)), 16),
        tl.minimum(outputs_at, outputs - 1),
        0,
        tl.cdiv(groups, step_groups),
        outputs,
        low_stride,
        groups,
        x.dtype.element_ty,
        ordered,
        bits,
        offset,
        floats,
        scales,
        span,
        row_span,
        step_groups,
        upcast,
    )
    out_at = out + (number * out_stride)[None, :] + (part * outputs + outputs_at)[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(outputs_at < outputs)[:, None] & (sorted_rows < end)[None, :])


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
    floats: tl.constexpr,
    scales: tl.constexpr,
    span: tl.constexpr,
    row_span: tl.constexpr,
    step_groups: tl.constexpr,
    look_up: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program per block_n rows and step of inputs: the weights of rows first, first + 1, ... or of rows `ids`
    (int64 [count]), rounded once to the dtype of out [count, inputs]. An id that is no row's has the nearest's."""
    group: tl.constexpr = 16 if bits == 6 else 32
    shared: tl.constexpr = 1 if bits == 8 else 2
    ragged: tl.constexpr = scales != "six_bits" and scales != "bytes"
    out_rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    wanted = out_rows < count
    matrix_rows = tl.load(ids + out_rows, mask=wanted, other=0) if look_up else first + out_rows
    matrix_rows = tl.maximum(tl.minimum(matrix_rows, outputs - 1), 0)
    for part in tl.static_range(step_groups):
        at = tl.program_id(1) * step_groups + part
        live = at < groups
        if part % shared == 0:
            packed = _packed(low, matrix_rows, low_stride, at, live, bits, ragged)
        factor = _factor(scale, small, matrix_rows, outputs, at, live, part, scales, span, row_span)
        zero = _zero(small, matrix_rows, outputs, at, live, scales, span)
        numbers = _numbers(packed, high, zero, matrix_rows, outputs, at, live, part, bits, offset, floats)
        values = numbers.to(tl.float32) * factor[:, None]
        if scales == "minima" or scales == "six_bits":
            values += _shift(minimum, small, matrix_rows, outputs, at, live, part, scales)[:, None]
        columns = at * group + tl.arange(0, group)
        out_at = out + out_rows.to(tl.int64)[:, None] * inputs + columns[None, :]
        tl.store(out_at, values.to(out.dtype.element_ty), mask=wanted[:, None] & live)
