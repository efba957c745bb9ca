"""Matrices in the codes of a GGUF file, laid out for the CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.gguf_codes import Codes
from engine.backends.torch.cuda.coded_linear import TRIAL_INPUTS, TRIAL_ROWS, CodedMatrix, Layout, kernels_problem
from engine.models.gguf.header import FORMATS

_PACK_VALUES = 2**22
"""Weights that are laid out at a time: their unpacked codes take a multiple of their memory."""

BLOCK_BYTES = {block.name: (block.values, block.num_bytes) for block in FORMATS.values()}
"""Weights and bytes of a block, by format."""

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


def gguf_matrix(raw: Tensor, codes: Codes, device: torch.device) -> CodedMatrix:
    """Lay out `raw`, uint8 [rows, bytes of a row] as the file has them, on `device`."""
    layout, rows, inputs = LAYOUTS[codes.format], codes.rows, codes.inputs
    groups, blocks = inputs // layout.group, inputs // BLOCK_BYTES[codes.format][0]
    width = inputs if layout.bits == 8 else -(-groups // 2) * layout.group

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    has_minimum = layout.scales in ("minima", "six_bits")
    words = blocks if layout.scales == "six_bits" else 0
    matrix = CodedMatrix(
        layout,
        rows,
        inputs,
        low=empty(rows, width, dtype=torch.uint8),
        high=empty(groups if layout.bits in (5, 6) else 0, rows, dtype=torch.int32),
        scale=empty(blocks, rows, dtype=torch.float16),
        minimum=empty(blocks if has_minimum else 0, rows, dtype=torch.float16),
        small=empty(groups, rows, dtype=torch.int8)
        if layout.scales == "bytes"
        else empty(words, 3, rows, dtype=torch.int32),
    )
    step = max(1, _PACK_VALUES // inputs)
    for first in range(0, rows, step):
        _lay_out(matrix, codes.format, raw[first : first + step].to(device), slice(first, first + step))
    return matrix


def _lay_out(matrix: CodedMatrix, name: str, raw: Tensor, at: slice) -> None:
    """Write the rows `at` of all arrays."""
    layout, rows = matrix.layout, len(raw)
    codes, halves, small = _UNPACKERS[name](raw.reshape(rows, -1, BLOCK_BYTES[name][1]))
    codes = codes.reshape(rows, matrix.groups, layout.group)
    if layout.bits == 8:
        matrix.low[at] = codes.flatten(1)
    else:
        low = F.pad(codes & 15, (0, 0, 0, matrix.groups % 2)).unflatten(1, (-1, 2))
        matrix.low[at] = (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)
    if layout.bits in (5, 6):
        places = torch.arange(layout.group, device=codes.device) * (layout.bits - 4)
        words = ((codes >> 4).long() << places).sum(-1)
        matrix.high[:, at] = words.to(torch.int32).T  # the highest bit becomes the sign
    for target, half in zip((matrix.scale, matrix.minimum), halves, strict=False):
        target[:, at] = half.T
    if small is not None:
        matrix.small[..., at] = small


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


def gguf_kernels_problem(devices: Sequence[torch.device], dtype: torch.dtype, name: str) -> str:
    """Return why the kernels cannot compute from the format `name` on `devices`, as `kernels_problem` does."""

    def make(device: torch.device) -> tuple[CodedMatrix, Tensor]:
        values, num_bytes = BLOCK_BYTES[name]
        generator = torch.Generator().manual_seed(0)
        shape = (TRIAL_ROWS, TRIAL_INPUTS // values * num_bytes)
        raw = torch.randint(60, shape, dtype=torch.uint8, generator=generator)  # as float16, below 1
        return gguf_matrix(raw, Codes(name, TRIAL_ROWS, TRIAL_INPUTS), device), dequantise(raw, name)

    return kernels_problem(devices, dtype, name, make)
