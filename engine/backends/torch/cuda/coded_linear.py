"""Linear layers and embeddings that compute on CUDA from weights in the codes of their files, with Triton kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.backends import triton_launch
from engine.backends.common.gguf_codes import SLAB_BYTES
from engine.backends.torch_device import is_device_lost
from engine.backends.triton_launch import (
    Kernel,
    Kernels,
    cdiv,
    claim_triton_cache,
    gpu_of,
    is_interpreted,
    power_of_two,
)

MAX_CODED_ROWS, MAX_NARROW_ROWS = 256, 64
"""Rows of x up to which codes are multiplied, if one scale is for a whole step of inputs, and else; above, slabs of the
weight are decoded for torch to multiply (docs/performance.md counts why). Up to MAX_NARROW_ROWS a program has all."""

MAX_SPLITS = 16
"""Parts that the inputs are split into at most."""


class Layout(NamedTuple):
    """How the kernels take a format. bits: of a code.  group: inputs of one output that lie together.  offset: what a
    code is above its number.  scales, step_groups, span, row_span, floats: as in `coded_kernels`."""

    bits: int
    group: int
    offset: int
    scales: str
    step_groups: int
    span: int = 1
    row_span: int = 1
    floats: str = ""

    @property
    def constants(self) -> dict[str, object]:
        """Arguments that the kernels are compiled for."""
        constants = self._asdict()
        del constants["group"]
        return constants

    @property
    def max_rows(self) -> int:
        """Rows of x up to which the codes are multiplied."""
        return MAX_CODED_ROWS if self.span >= self.step_groups else MAX_NARROW_ROWS

    @property
    def scale_factor(self) -> float:
        """Scales are so much larger: the kernels make numbers so much smaller."""
        return 2.0**8 if self.floats == "e4m3_bits" else 1.0


# A matrix on the device.


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A matrix [rows, inputs] in codes, in arrays that kernels read in order: of about the size that its file has.

    low: uint8 [rows, bytes]: whole codes of 8 bits; or the low 4 bits of codes, those of two groups in the halves of
        the same bytes.
    high: int32 [groups, rows]: all further bits of a group's codes, the first in the lowest place.
    scale, minimum: float16 [groups, spans of groups or super-blocks, rows]; float32 [spans, spans of rows] of floats.
    small: a super-block's scales: three int32 [.., 3, rows] of 6-bit codes, or int8 [groups, rows]; zero points, uint8
        [spans of groups, rows].
    order: int32 [inputs], the input of x that each of the matrix is for; None where they are the same.
    rounds_x: products of many rows are those with x in E4M3, where the device multiplies that.
    """

    layout: Layout
    rows: int
    inputs: int
    low: Tensor
    high: Tensor
    scale: Tensor
    minimum: Tensor
    small: Tensor
    order: Tensor | None = None
    rounds_x: bool = False

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.inputs // self.layout.group

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.arrays) + (0 if self.order is None else self.order.nbytes)

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which the kernels take them."""
        return self.low, self.high, self.scale, self.minimum, self.small


# The kernels, on one device.


class Tile(NamedTuple):
    """One program's share: block_m rows of x, block_n outputs; how Triton is to compile it; and how many programs are
    wanted for each multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int


_NARROW = {block_m: Tile(block_m, block_n=64, warps=4, stages=2, programs=2) for block_m in (16, 32, 64)}
_WIDE = Tile(block_m=128, block_n=128, warps=8, stages=2, programs=1)
TILES = (*_NARROW.values(), _WIDE)


def tile_for(rows: int) -> Tile:
    """Return the sizes for `rows` rows of x: up to MAX_NARROW_ROWS all of them in one program, so that codes are read
    once."""
    return _NARROW[max(16, 1 << (rows - 1).bit_length())] if rows <= MAX_NARROW_ROWS else _WIDE


def split_count(programs: int, steps: int, wanted: int) -> int:
    """Return the parts to split the inputs into: as many as make `wanted` programs, with two steps or more for each."""
    return max(1, min(wanted // programs, steps // 2, MAX_SPLITS))


class _Product(NamedTuple):
    """How products of a size are launched. grid: programs, and parts of the inputs.  share: steps of a part.  combine:
    None where there is one part."""

    kernel: Kernel
    grid: tuple[int, int]
    share: int
    combine: Kernel | None


class CodedKernels:
    """The Triton kernels on `device`; a CPU where they are interpreted."""

    def __init__(self, device: torch.device) -> None:
        """Import them. Raises ImportError without Triton, OSError where what it compiles cannot be kept from other
        users."""
        claim_triton_cache()
        self._functions: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.coded_kernels")
        self.kernels: Final = Kernels(device)
        self._products: Final[dict[Hashable, _Product]] = {}
        self._interpreted: Final = is_interpreted(self._functions.multiply_kernel)
        self.device: Final = device
        self.processors: Final = gpu_of(device).processors
        self.multiplies_floats: Final = _multiplies_floats(device)

    def multiply(self, x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
        """Write x @ matrix.T + bias to `out` [rows, outputs], whose rows are dense; x [rows, inputs] has 1 to
        `Layout.max_rows` rows, and is dense."""
        rows, dtype, out_stride = len(x), x.dtype, out.stride(0)
        tile = tile_for(rows)
        row_blocks = cdiv(rows, tile.block_m)
        key = (matrix.layout, matrix.rows, matrix.inputs, tile.block_m, row_blocks, dtype, out_stride, bias is None)
        kernel, grid, share, combine = self._products.get(key) or self._add_product(key, x, matrix, bias, out)
        added = x if bias is None else bias
        if combine is None:
            kernel(grid, x, out, added, *matrix.arrays, varying=(rows, share))
            return
        sums = torch.empty((grid[1], *out.shape), dtype=torch.float32, device=x.device)
        kernel(grid, x, sums, added, *matrix.arrays, varying=(rows, share))
        combine((rows, cdiv(matrix.rows, _COMBINED)), sums, out, added, varying=(grid[1], rows))

    def _add_product(self, key: Hashable, x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor) -> _Product:
        tile = tile_for(len(x))
        steps = cdiv(matrix.groups, matrix.layout.step_groups)
        programs = cdiv(matrix.rows, tile.block_n) * cdiv(len(x), tile.block_m)
        share = cdiv(steps, split_count(programs, steps, tile.programs * self.processors))
        splits = cdiv(steps, share)
        sums, added = out if splits == 1 else out.new_empty(0, dtype=torch.float32), x if bias is None else bias
        kernel = self.kernels.add(
            key,
            self._functions.multiply_kernel,
            (x, sums, added, *matrix.arrays),
            varying=(len(x), share),
            numbers=(matrix.inputs, matrix.rows, out.stride(0), matrix.low.stride(0), matrix.groups),
            constants={
                **matrix.layout.constants,
                "has_bias": bias is not None and splits == 1,
                "split": splits > 1,
                "upcast": x.dtype == torch.bfloat16 and self._interpreted,
                "block_m": tile.block_m,
                "block_n": tile.block_n,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
        )
        combine = None
        if splits > 1:
            combine = self.kernels.add(
                ("combine", key),
                self._functions.combine_kernel,
                (sums, out, added),
                varying=(splits, len(x)),
                numbers=(matrix.rows, out.stride(0)),
                constants={"has_bias": bias is not None, "block": _COMBINED},
            )
        product = self._products[key] = _Product(kernel, (programs, splits), share, combine)
        return product

    def multiply_experts(
        self,
        x: Tensor,
        matrix: CodedMatrix,
        addresses: Tensor,
        order: Tensor,
        ends: Tensor,
        out: Tensor,
        *,
        ordered: bool,
        divisor: int,
        tile: Tile,
        blocks: int,
    ) -> None:
        """Write the products of sorted rows with their experts' matrices to `out` [assignments, parts * outputs], whose
        rows are dense, by number: of row number // divisor of dense x.

        matrix: one of them; all have its layout and sizes.  addresses: int64 [experts, parts, 6] of their arrays, and
        of their orders, if `ordered`.  order, ends: as in `moe_kernels`.  blocks: of rows.
        """
        (experts, parts, _), dtype, out_stride = addresses.shape, x.dtype, out.stride(0)
        tensors = x, out, order, ends, addresses
        key = (
            matrix.layout,
            matrix.rows,
            matrix.inputs,
            experts,
            parts,
            ordered,
            divisor,
            tile.block_m,
            dtype,
            out_stride,
        )
        kernel = self.kernels.get(key) or self.kernels.add(
            key,
            self._functions.multiply_experts_kernel,
            tensors,
            numbers=(experts, matrix.inputs, matrix.rows, out_stride, matrix.low.stride(0), matrix.groups),
            constants={
                "parts": parts,
                "ordered": ordered,
                "divisor": divisor,
                **matrix.layout.constants,
                "upcast": dtype == torch.bfloat16 and self._interpreted,
                "block_m": tile.block_m,
                "block_n": tile.block_n,
                "block_e": power_of_two(experts),
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
        )
        kernel((parts * cdiv(matrix.rows, tile.block_n), blocks), *tensors)

    def decode(self, matrix: CodedMatrix, first: int, out: Tensor) -> None:
        """Write the rows from `first` on to `out` [rows, inputs], dense."""
        self._decode(matrix, first, out, None)

    def look_up(self, matrix: CodedMatrix, ids: Tensor, out: Tensor) -> None:
        """Write the rows `ids`, int64 [N], to `out` [N, inputs], dense. What is not the number of a row is random."""
        self._decode(matrix, 0, out, ids)

    def _decode(self, matrix: CodedMatrix, first: int, out: Tensor, ids: Tensor | None) -> None:
        tensors, varying = (out, out if ids is None else ids, *matrix.arrays), (first, len(out))
        key = (matrix.layout, matrix.rows, matrix.inputs, out.dtype, ids is None)
        kernel = self.kernels.get(key) or self.kernels.add(
            key,
            self._functions.decode_kernel,
            tensors,
            varying=varying,
            numbers=(matrix.inputs, matrix.rows, matrix.low.stride(0), matrix.groups),
            constants={**matrix.layout.constants, "look_up": ids is not None, "block_n": DECODED_ROWS},
        )
        grid = cdiv(len(out), DECODED_ROWS), cdiv(matrix.groups, matrix.layout.step_groups)
        kernel(grid, *tensors, varying=varying)


_COMBINED = 512
"""Outputs of a program that adds up the parts of a split product."""

DECODED_ROWS = 32
"""Rows of a program that decodes."""


class CodedLinear:
    """x @ weight.T + bias from codes, whose matrices are `parts` of the rows of the weight.

    Up to `Layout.max_rows` rows of x, codes are multiplied and sums scaled in float32. Above, slabs of the weight are
    decoded to the dtype of x, SLAB_BYTES at a time. Where the model is meant so, x is rounded to 8-bit floats too from
    MAX_NARROW_ROWS rows on.
    """

    def __init__(
        self, kernels: CodedKernels, parts: Sequence[CodedMatrix], dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self.kernels, self.parts, self.bias = kernels, _share_orders(parts), bias
        self.dtype: Final = dtype
        self._inputs, self._outputs = parts[0].inputs, sum(part.rows for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out] for x [rows, in]. Raises ValueError for another width or dtype."""
        rows, inputs = x.shape
        if x.dtype is not self.dtype or inputs != self._inputs:
            raise ValueError(f"a layer of {self._inputs} inputs of {self.dtype} got {tuple(x.shape)} of {x.dtype}")
        x = x.contiguous()
        out = torch.empty((rows, self._outputs), dtype=self.dtype, device=x.device)
        if not rows:
            return out
        first, order, ordered = 0, None, x
        for part in self.parts:
            if part.order is not order:
                order = part.order
                ordered = x if order is None else x.index_select(1, order)
            bias, found = self.bias, out
            if len(self.parts) > 1:
                found = out[:, first : first + part.rows]
                bias = None if bias is None else bias[first : first + part.rows]
            if rows > MAX_NARROW_ROWS and part.rounds_x and self.kernels.multiplies_floats:
                self._multiply_floats(ordered, part, bias, found)
            elif rows <= part.layout.max_rows:
                self.kernels.multiply(ordered, part, bias, found)
            else:
                self._multiply_decoded(ordered, part, bias, found)
            first += part.rows
        return out

    def compile_kernels(self) -> None:
        """Run each kernel that a step may need, so that none is compiled while requests wait."""
        x = torch.zeros((MAX_CODED_ROWS + 1, self._inputs), dtype=self.dtype, device=self.parts[0].low.device)
        sizes = {(tile := tile_for(rows), cdiv(rows, tile.block_m)): rows for rows in range(1, MAX_CODED_ROWS + 1)}
        for rows in (*sizes.values(), MAX_CODED_ROWS + 1):
            self(x[:rows])

    def _multiply_decoded(self, x: Tensor, part: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
        slab = min(part.rows, max(1, SLAB_BYTES // (x.element_size() * self._inputs)))
        scratch = torch.empty((slab, self._inputs), dtype=x.dtype, device=x.device)
        for first in range(0, part.rows, slab):
            weight = scratch[: part.rows - first]
            self.kernels.decode(part, first, weight)
            found = out[:, first : first + len(weight)]
            if bias is None:
                torch.mm(x, weight.T, out=found)
            else:
                torch.addmm(bias[first : first + len(weight)], x, weight.T, out=found)

    def _multiply_floats(self, x: Tensor, part: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
        floats, scale = round_rows(x)
        weight = part.low.view(torch.float8_e4m3fn)
        scales = part.scale.expand(1, part.rows) / part.layout.scale_factor
        slab = max(_FLOATS_MULTIPLE, SLAB_BYTES // (4 * len(x)) // _FLOATS_MULTIPLE * _FLOATS_MULTIPLE)
        for first in range(0, part.rows, slab):
            at = slice(first, min(part.rows, first + slab))
            sums = multiply_floats(floats, weight[at]).mul_(scale).mul_(scales[:, at])
            if bias is not None:
                sums += bias[at]
            out[:, at] = sums


_MAX_E4M3 = 448.0
_FLOATS_MULTIPLE = 16


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, inputs] as E4M3 and the scale of each row, float32 [rows, 1]: its largest number is 448."""
    exact = x.float()
    scale = exact.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * _MAX_E4M3) / _MAX_E4M3
    return (exact / scale).to(torch.float8_e4m3fn), scale


def multiply_floats(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32, both E4M3. Raises RuntimeError where the device does not multiply these."""
    one = torch.ones((), device=x.device)
    product: Tensor = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product


@functools.cache
def _multiplies_floats(device: torch.device) -> bool:
    """Return whether torch multiplies E4M3 on `device`: on GPUs from compute capability 8.9 on."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 128, generator=generator).to(torch.float8_e4m3fn) for rows in (48, 32))
    try:
        found = multiply_floats(x.to(device), weight.to(device)).cpu()
    except (RuntimeError, TypeError, AttributeError) as error:  # a private operator of torch
        if is_device_lost(error):
            raise
        return False
    expected = x.float() @ weight.float().T
    return bool(((found - expected).abs() <= _TOLERANCE * expected.abs().max()).all())


def _share_orders(parts: Sequence[CodedMatrix]) -> tuple[CodedMatrix, ...]:
    """The parts, with one tensor for orders that are equal: x is put into each of them once."""
    orders: list[Tensor] = []
    shared = []
    for part in parts:
        order = part.order
        if order is not None:
            equal = next((each for each in orders if torch.equal(each, order)), None)
            if equal is None:
                orders.append(order)
            else:
                part = replace(part, order=equal)
        shared.append(part)
    return tuple(shared)


class GgufEmbedding:
    """Rows of a matrix in the codes of a GGUF file, decoded when they are looked up. layer: the head, where tied."""

    def __init__(self, layer: CodedLinear) -> None:
        self.layer: Final = layer
        self.dtype: Final = layer.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """Return [N, in] for ids, int64 [N], each the number of a row."""
        (matrix,) = self.layer.parts
        found = torch.empty((len(ids), matrix.inputs), dtype=self.dtype, device=ids.device)
        if len(ids):
            self.layer.kernels.look_up(matrix, ids.contiguous(), found)
        return found


# Whether they can be used.

TRIAL_ROWS, TRIAL_INPUTS = 40, 1024
_ROUNDING, _TOLERANCE = 2**-7, 0.01
"""Of a weight, and of the largest product, in half precision."""

MakeTrial = Callable[[torch.device], tuple[CodedMatrix, Tensor]]
"""Makes a small matrix [TRIAL_ROWS, TRIAL_INPUTS] on a device, and its weights on the CPU, float32."""


def kernels_problem(devices: Sequence[torch.device], dtype: torch.dtype, name: str, make: MakeTrial) -> str:
    """Return why the kernels cannot compute from the format `name` on `devices`, as a clause; "" where they can.

    They are compiled and tried there on a small matrix. Raises where a device is lost.
    """
    return triton_launch.kernels_problem(
        devices, f"the kernels for {name}", lambda device: _trial(CodedKernels(device), dtype, name, *make(device))
    )


def _trial(kernels: CodedKernels, dtype: torch.dtype, name: str, matrix: CodedMatrix, weight: Tensor) -> str:
    layer = CodedLinear(kernels, [matrix], dtype)
    found = GgufEmbedding(layer)(torch.arange(matrix.rows, device=kernels.device)).cpu()
    if not ((found.float() - weight).abs() <= _ROUNDING * weight.abs()).all():
        return f"{name} is decoded to other numbers"
    generator = torch.Generator().manual_seed(0)
    for rows in (1, MAX_NARROW_ROWS, MAX_CODED_ROWS, MAX_CODED_ROWS + 1):
        x = torch.randn(rows, matrix.inputs, generator=generator).to(dtype)
        expected = x.float() @ weight.T
        error = (layer(x.to(kernels.device)).float().cpu() - expected).abs().max()
        if not float(error) <= _TOLERANCE * float(expected.abs().max()):  # nor where it is NaN
            return f"products with {name} differ from those with the decoded numbers"
    return ""
