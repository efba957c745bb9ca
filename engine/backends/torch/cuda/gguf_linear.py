"""Linear layers and embeddings that compute on CUDA from the codes of a GGUF file, with Triton kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.gguf_codes import SLAB_BYTES, Codes, triton_problem
from engine.backends.paged_attention.interface import claim_triton_cache
from engine.backends.torch_device import is_device_lost
from engine.models.gguf.header import FORMATS

MAX_CODED_ROWS = 64
"""Rows of x up to which the codes are multiplied; above, slabs of the weight are decoded for torch to multiply."""

MAX_SPLITS = 16
"""Parts that the inputs are split into at most."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that are wanted for each multiprocessor."""

_PACK_VALUES = 2**22
"""Weights that are laid out at a time: their unpacked codes take a multiple of their memory."""

_BLOCK_BYTES = {block.name: (block.values, block.num_bytes) for block in FORMATS.values()}


class Layout(NamedTuple):
    """How the kernels take a format. bits: of a code.  group: inputs that share a scale.  offset: what a code is above
    its number.  scales, step_groups: as in `gguf_kernels`."""

    bits: int
    group: int
    offset: int
    scales: str
    step_groups: int


LAYOUTS = {
    "Q8_0": Layout(8, 32, 128, "halves", 4),
    "Q4_0": Layout(4, 32, 8, "halves", 4),
    "Q4_1": Layout(4, 32, 0, "minima", 4),
    "Q5_0": Layout(5, 32, 16, "halves", 4),
    "Q5_1": Layout(5, 32, 0, "minima", 4),
    "Q4_K": Layout(4, 32, 0, "six_bits", 8),
    "Q5_K": Layout(5, 32, 0, "six_bits", 8),
    "Q6_K": Layout(6, 16, 32, "bytes", 16),
}


# A matrix on the device.


class CodedMatrix:
    """A matrix [rows, inputs] in the codes of a GGUF file: in arrays that kernels read in order, of the file's size.

    low: uint8 [rows, bytes]: whole codes of 8 bits; or the low 4 bits of codes, those of two groups in the halves of
        the same bytes.
    high: int32 [groups, rows]: all further bits of a group's codes, the first in the lowest place.
    scale, minimum: float16 [groups or super-blocks, rows].
    small: a super-block's scales: three int32 [.., 3, rows] of 6-bit codes, or int8 [groups, rows].
    """

    def __init__(self, raw: Tensor, codes: Codes, device: torch.device) -> None:
        """Lay out `raw`, uint8 [rows, bytes of a row] as the file has them, on `device`."""
        layout, rows, inputs = LAYOUTS[codes.format], codes.rows, codes.inputs
        self.codes: Final = codes
        self.layout: Final = layout
        self.groups: Final = inputs // layout.group
        self._values, self._block_bytes = _BLOCK_BYTES[codes.format]
        blocks = inputs // self._values
        width = inputs if layout.bits == 8 else -(-self.groups // 2) * layout.group

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.low: Final = empty(rows, width, dtype=torch.uint8)
        self.high: Final = empty(self.groups if layout.bits in (5, 6) else 0, rows, dtype=torch.int32)
        self.scale: Final = empty(blocks, rows, dtype=torch.float16)
        has_minimum = layout.scales in ("minima", "six_bits")
        self.minimum: Final = empty(blocks if has_minimum else 0, rows, dtype=torch.float16)
        words = blocks if layout.scales == "six_bits" else 0
        self.small: Final = (
            empty(self.groups, rows, dtype=torch.int8)
            if layout.scales == "bytes"
            else empty(words, 3, rows, dtype=torch.int32)
        )
        step = max(1, _PACK_VALUES // inputs)
        for first in range(0, rows, step):
            self._lay_out(raw[first : first + step].to(device), slice(first, first + step))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.arrays)

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which the kernels take them."""
        return self.low, self.high, self.scale, self.minimum, self.small

    @property
    def constants(self) -> dict[str, object]:
        """Arguments that the kernels are compiled for."""
        layout = self.layout
        return {
            "bits": layout.bits,
            "offset": layout.offset,
            "scales": layout.scales,
            "step_groups": layout.step_groups,
        }

    def _lay_out(self, raw: Tensor, at: slice) -> None:
        """Write the rows `at` of all arrays."""
        layout, rows = self.layout, len(raw)
        blocks = raw.reshape(rows, -1, self._block_bytes)
        codes, halves, small = _UNPACKERS[self.codes.format](blocks)
        codes = codes.reshape(rows, self.groups, layout.group)
        if layout.bits == 8:
            self.low[at] = codes.flatten(1)
        else:
            low = F.pad(codes & 15, (0, 0, 0, self.groups % 2)).unflatten(1, (-1, 2))
            self.low[at] = (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)
        if layout.bits in (5, 6):
            places = torch.arange(layout.group, device=codes.device) * (layout.bits - 4)
            words = ((codes >> 4).long() << places).sum(-1)
            self.high[:, at] = words.to(torch.int32).T  # the highest bit becomes the sign
        for target, half in zip((self.scale, self.minimum), halves, strict=False):
            target[:, at] = half.T
        if small is not None:
            self.small[..., at] = small


_Unpacked = tuple[Tensor, tuple[Tensor, ...], Tensor | None]
"""Codes uint8 [rows, blocks, values of a block]; float16 scales and minima [rows, blocks]; the array `small`."""


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """Low halves of `width` bytes, then their high halves, and so on: uint8 [rows, blocks, 2 * bytes]."""
    grouped = packed.unflatten(-1, (-1, 1, width))
    return torch.cat((grouped & 15, grouped >> 4), dim=-2).flatten(2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits in 4 bytes, the first in the lowest place: each 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(2) << 4


def _q8_0(blocks: Tensor) -> _Unpacked:
    return blocks[..., 2:] ^ 128, (_half(blocks, 0),), None


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 2:], 16), (_half(blocks, 0),), None


def _q4_1(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 4:], 16), (_half(blocks, 0), _half(blocks, 2)), None


def _q5_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]), (_half(blocks, 0),), None


def _q5_1(blocks: Tensor) -> _Unpacked:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return codes, (_half(blocks, 0), _half(blocks, 2)), None


def _six_bit_words(blocks: Tensor) -> Tensor:
    """Return int32 [blocks, 3, rows]: low 4 bits of 8 scales, of 8 minima, and the high 2 bits of both."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1).long()
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1).long()
    places = torch.arange(8, device=blocks.device)
    high = ((scales >> 4) << 2 * places) | ((minima >> 4) << 16 + 2 * places)
    words = ((scales & 15) << 4 * places, (minima & 15) << 4 * places, high)
    return torch.stack([word.sum(-1).to(torch.int32).T for word in words], dim=1)


def _q4_k(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 16:], 32), (_half(blocks, 0), _half(blocks, 2)), _six_bit_words(blocks)


def _q5_k(blocks: Tensor) -> _Unpacked:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> places.unsqueeze(-1)) & 1).flatten(2)
    codes = _nibbles(blocks[..., 48:], 32) | fifth << 4
    return codes, (_half(blocks, 0), _half(blocks, 2)), _six_bit_words(blocks)


def _q6_k(blocks: Tensor) -> _Unpacked:
    pairs = blocks[..., 128:192].unflatten(-1, (-1, 1, 32))
    high = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(2)
    codes = _nibbles(blocks[..., :128], 64) | high << 4
    small = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).T
    return codes, (_half(blocks, 208),), small


_UNPACKERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# The kernels, on one device.


class Tile(NamedTuple):
    """One program's share: block_m rows of x, block_n outputs; and how Triton is to compile it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(rows: int) -> Tile:
    """Return the sizes for up to MAX_CODED_ROWS rows of x: all of them in one program, so that codes are read once."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    return Tile(block_m, block_n=64, warps=4, stages=2)


def split_count(programs: int, steps: int, processors: int) -> int:
    """Return the parts to split the inputs into: as many as keep the GPU busy, with two steps or more for each."""
    return max(1, min(PROGRAMS_PER_PROCESSOR * processors // programs, steps // 2, MAX_SPLITS))


class GgufKernels:
    """The Triton kernels on `device`; a CPU where they are interpreted."""

    def __init__(self, device: torch.device) -> None:
        """Import them. Raises ImportError without Triton, OSError where what it compiles cannot be kept from other
        users."""
        claim_triton_cache()
        self._kernels: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.gguf_kernels")
        self.device: Final = device
        self.processors: Final = _processors(device)

    def multiply(self, x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
        """Write x @ matrix.T + bias to `out` [rows, outputs], whose rows are dense; x [rows, inputs] has 1 to
        MAX_CODED_ROWS rows, and is dense."""
        codes, tile = matrix.codes, tile_for(len(x))
        steps = -(-matrix.groups // matrix.layout.step_groups)
        programs = -(-codes.rows // tile.block_n)
        splits = split_count(programs, steps, self.processors)
        share = -(-steps // splits)
        splits = -(-steps // share)
        sums = torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device) if splits > 1 else out
        with torch.cuda.device_of(x):
            self._kernels.multiply_kernel[(programs, splits)](
                x,
                sums,
                bias if bias is not None else x,
                *matrix.arrays,
                len(x),
                codes.inputs,
                codes.rows,
                out.stride(0),
                matrix.low.stride(0),
                matrix.groups,
                share,
                **matrix.constants,
                has_bias=bias is not None,
                split=splits > 1,
                upcast=x.dtype == torch.bfloat16 and x.device.type != "cuda",
                block_m=tile.block_m,
                block_n=tile.block_n,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if splits > 1:
                self._kernels.combine_kernel[(len(x), -(-codes.rows // _COMBINED))](
                    sums,
                    out,
                    bias if bias is not None else x,
                    splits,
                    len(x),
                    codes.rows,
                    out.stride(0),
                    has_bias=bias is not None,
                    block=_COMBINED,
                )

    def decode(self, matrix: CodedMatrix, first: int, out: Tensor) -> None:
        """Write the rows from `first` on to `out` [rows, inputs], dense."""
        self._decode(matrix, first, out, None)

    def look_up(self, matrix: CodedMatrix, ids: Tensor, out: Tensor) -> None:
        """Write the rows `ids`, int64 [N], to `out` [N, inputs], dense. What is not the number of a row is random."""
        self._decode(matrix, 0, out, ids)

    def _decode(self, matrix: CodedMatrix, first: int, out: Tensor, ids: Tensor | None) -> None:
        codes = matrix.codes
        steps = -(-matrix.groups // matrix.layout.step_groups)
        with torch.cuda.device_of(out):
            self._kernels.decode_kernel[(-(-len(out) // DECODED_ROWS), steps)](
                out,
                ids if ids is not None else out,
                *matrix.arrays,
                first,
                len(out),
                codes.inputs,
                codes.rows,
                matrix.low.stride(0),
                matrix.groups,
                **matrix.constants,
                look_up=ids is not None,
                block_n=DECODED_ROWS,
            )


_COMBINED = 512
"""Outputs of a program that adds up the parts of a split product."""

DECODED_ROWS = 32
"""Rows of a program that decodes."""


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; for the interpreter, those of an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class GgufLinear:
    """x @ weight.T + bias from the codes of a GGUF file, whose tensors are `parts` of the rows of the weight.

    Up to MAX_CODED_ROWS rows of x, codes are multiplied and sums scaled in float32. Above, slabs of the weight are
    decoded to the dtype of x, SLAB_BYTES at a time.
    """

    def __init__(
        self, kernels: GgufKernels, parts: Sequence[CodedMatrix], dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self.kernels, self.parts, self.bias = kernels, tuple(parts), bias
        self.dtype: Final = dtype
        self._inputs, self._outputs = parts[0].codes.inputs, sum(part.codes.rows for part in parts)

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
        first = 0
        for part in self.parts:
            of_part = slice(first, first + part.codes.rows)
            bias = None if self.bias is None else self.bias[of_part]
            if rows <= MAX_CODED_ROWS:
                self.kernels.multiply(x, part, bias, out[:, of_part])
            else:
                self._multiply_decoded(x, part, bias, out[:, of_part])
            first = of_part.stop
        return out

    def _multiply_decoded(self, x: Tensor, part: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
        slab = min(part.codes.rows, max(1, SLAB_BYTES // (x.element_size() * self._inputs)))
        scratch = torch.empty((slab, self._inputs), dtype=x.dtype, device=x.device)
        for first in range(0, part.codes.rows, slab):
            weight = scratch[: part.codes.rows - first]
            self.kernels.decode(part, first, weight)
            found = out[:, first : first + len(weight)]
            if bias is None:
                torch.mm(x, weight.T, out=found)
            else:
                torch.addmm(bias[first : first + len(weight)], x, weight.T, out=found)


class GgufEmbedding:
    """Rows of a matrix in the codes of a GGUF file, decoded when they are looked up. layer: the head, where tied."""

    def __init__(self, layer: GgufLinear) -> None:
        self.layer: Final = layer
        self.dtype: Final = layer.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """Return [N, in] for ids, int64 [N], each the number of a row."""
        (matrix,) = self.layer.parts
        found = torch.empty((len(ids), matrix.codes.inputs), dtype=self.dtype, device=ids.device)
        if len(ids):
            self.layer.kernels.look_up(matrix, ids.contiguous(), found)
        return found


# Whether they can be used.

_MIN_CAPABILITY = (8, 0)
_TRIAL_ROWS, _TRIAL_INPUTS = 40, 1024
_ROUNDING, _TOLERANCE = 2**-7, 0.01
"""Of a weight, and of the largest product, in half precision."""


def gguf_kernels_problem(devices: Sequence[torch.device], dtype: torch.dtype, name: str) -> str:
    """Return why the kernels cannot compute from the format `name` on `devices`, as a clause; "" where they can.

    They are compiled and tried there on a small matrix: what a missing compiler or an unsupported GPU would break.
    Raises where a device is lost.
    """
    if problem := triton_problem():
        return problem
    for device in devices:
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
            return "Triton needs compute capability 8.0, not {}.{}".format(*found)
    for device in devices:
        try:
            if problem := _trial(GgufKernels(device), dtype, name):
                return f"{problem} on {device}"
        except Exception as error:  # whatever a compiler, a driver or a library raises
            if is_device_lost(error):
                raise
            text = (str(error) or repr(error)).strip().splitlines()[0]
            return f"the kernels for {name} fail on {device}: {type(error).__name__}: {text[:200]}"
    return ""


def _trial(kernels: GgufKernels, dtype: torch.dtype, name: str) -> str:
    values, num_bytes = _BLOCK_BYTES[name]
    generator = torch.Generator().manual_seed(0)
    shape = (_TRIAL_ROWS, _TRIAL_INPUTS // values * num_bytes)
    raw = torch.randint(60, shape, dtype=torch.uint8, generator=generator)  # as float16, below 1
    weight = dequantise(raw, name)
    layer = GgufLinear(kernels, [CodedMatrix(raw, Codes(name, _TRIAL_ROWS, _TRIAL_INPUTS), kernels.device)], dtype)
    found = GgufEmbedding(layer)(torch.arange(_TRIAL_ROWS, device=kernels.device)).cpu()
    if not ((found.float() - weight).abs() <= _ROUNDING * weight.abs()).all():
        return f"{name} is decoded to other numbers"
    for rows in (1, MAX_CODED_ROWS, MAX_CODED_ROWS + 1):
        x = torch.randn(rows, _TRIAL_INPUTS, generator=generator).to(dtype)
        expected = x.float() @ weight.T
        error = (layer(x.to(kernels.device)).float().cpu() - expected).abs().max()
        if not float(error) <= _TOLERANCE * float(expected.abs().max()):  # nor where it is NaN
            return f"products with {name} differ from those with the decoded numbers"
    return ""
