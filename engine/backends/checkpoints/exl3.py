"""EXL3, ExLlamaV3's format: 16 x 16 tiles of a Hadamard-rotated matrix, each a ring of bits read by 16-bit windows.

The numbers are those of ExLlamaV3 1.6.5's `LinearEXL3.get_weight_tensor()` (codebook.cuh, exl3_dq.cuh, reconstruct.cu,
exl3_lib/quantize.py), rounded to float16 where it rounds. The trellis is QTIP's (arXiv 2406.11235).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from engine.backends.checkpoints.quantized_tensors import (
    Part,
    Wanted,
    malformed_tensor,
    parts_of,
    require_parts,
)

Codebook = Literal["plain", "mcg", "mul1"]

PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
"""Tensors of a layer, as the checkpoint names them after the layer's key."""

FEATURE_MULTIPLE = 128
"""Features of both sides are padded to a multiple of this, the size of the Hadamard transform."""

MULTIPLIERS: Mapping[Codebook, int] = {"plain": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
PLAIN_INCREMENT = 64248484
HALVES_MASK, HALVES_FLIP = 0x8FFF8FFF, 0x3B603B60
"""Of a hashed window, the bits that stay, and those that are flipped then: two float16 whose sum is the value."""
MUL1_BASE, MUL1_SCALE_BITS, MUL1_OFFSET_BITS = 1024, 0x1EEE, 0xC931
"""(base + sum of the hash's bytes) * scale + offset, rounded once; the last two by their bits in float16."""

_TILE = 16
_TILE_VALUES = _TILE * _TILE
_WORD_BITS = 16
_WORDS = tuple(_TILE * bits for bits in range(1, 9))
_HALF_BIT_WORDS = (24, 40, 56)
"""Words of a tile at 1 to 8 bits per weight, and at 1.5, 2.5 and 3.5, which the codebook mul1 alone has."""

_CPU_SLAB_ELEMENTS, _GPU_SLAB_ELEMENTS = 1 << 19, 1 << 24
"""Elements decoded at a time, in whole groups of 128 columns: what a core's cache holds, or what keeps a GPU busy."""


def require_exl3(key: str, parts: Mapping[str, Part], in_features: int, out_features: int) -> None:
    """Raise ModelLoadFailed naming the first tensor of layer `key` that a layer of these features cannot have."""
    rows, columns = padded_features(in_features), padded_features(out_features)
    words = (0, *parts["trellis"].shape)[-1] if "trellis" in parts else 0
    wanted = {"trellis": Wanted((rows // _TILE, columns // _TILE, words), ("I16",))}
    for name, features in (("su", rows), ("sv", columns)):
        if name in parts and f"{name}h" not in parts:
            wanted[name] = Wanted((features // _WORD_BITS,), ("I16",))
        else:
            wanted[f"{name}h"] = Wanted((features,), ("F16",))
    wanted |= {
        "mcg": Wanted((), ("I32",), optional=True),
        "mul1": Wanted((), ("I32",), optional=True),
        "bias": Wanted((columns,), ("F16", "BF16", "F32"), optional=True),
    }
    require_parts(key, parts, wanted)
    if "mcg" in parts and "mul1" in parts:
        raise malformed_tensor(key, "mul1", "names a second codebook next to mcg")
    if words not in _WORDS and not ("mul1" in parts and words in _HALF_BIT_WORDS):
        raise malformed_tensor(
            key,
            "trellis",
            f"has tiles of {words} words, {words / _TILE:g} bits per weight; "
            "EXL3 has 1 to 8 bits, and with mul1 also 1.5, 2.5 and 3.5",
        )


def out_features(trellis: Part) -> int:
    """Output features of a layer by its trellis, padding included; 0 where that has too few dimensions."""
    return trellis.shape[1] * _TILE if len(trellis.shape) > 1 else 0


def padded_features(features: int) -> int:
    """Features of one side of a stored matrix."""
    return -(-features // FEATURE_MULTIPLE) * FEATURE_MULTIPLE


@dataclass(frozen=True, slots=True, eq=False)
class Exl3Linear:
    """One layer as it is stored: K input rows and N output columns, padding included.

    trellis: int16 [K / 16, N / 16, 16 * bits per weight], a tile's ring of bits in 32-bit words, highest bit first.
    suh, svh: float16 [K] and [N], scales with signs; where they are missing, su and sv: int16 [K / 16] and [N / 16],
    signs alone, a bit each, lowest first.  mcg, mul1: int32, the codebook's multiplier; plain without both.  bias: [N].
    `key` names the layer in refusals: tensors that do not fit together raise ModelLoadFailed.
    """

    key: str
    trellis: Tensor
    suh: Tensor | None = None
    svh: Tensor | None = None
    su: Tensor | None = None
    sv: Tensor | None = None
    mcg: Tensor | None = None
    mul1: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        parts = parts_of({name: getattr(self, name) for name in PARTS})
        rows, columns = (*self.trellis.shape, 0, 0)[:2]
        require_exl3(self.key, parts, rows * _TILE, columns * _TILE)
        marker = self.mcg if self.codebook == "mcg" else self.mul1
        if marker is None:
            return
        stored, multiplier = int(marker.item()) & 0xFFFFFFFF, MULTIPLIERS[self.codebook]
        if stored != multiplier:
            raise malformed_tensor(
                self.key, self.codebook, f"is {stored:#x}; the codebook's multiplier is {multiplier:#x}"
            )

    @property
    def codebook(self) -> Codebook:
        """The table that turns a window into a value."""
        return "mcg" if self.mcg is not None else "mul1" if self.mul1 is not None else "plain"

    def write(self, weight: Tensor) -> None:
        """Decode into `weight`, float16 [out features, in features] without padding, on the tensors' device.

        Sums of a Hadamard transform are made in float32 and rounded to float16, as are the products with suh and svh.
        """
        out_features, in_features = weight.shape
        rows = self.trellis.shape[0] * _TILE
        suh, svh = _scales(self.suh, self.su), _scales(self.svh, self.sv).unsqueeze(1)
        table = codebook_values(self.codebook).to(weight.device)
        hadamard = hadamard_matrix().to(weight.device)
        elements = _CPU_SLAB_ELEMENTS if weight.device.type == "cpu" else _GPU_SLAB_ELEMENTS
        step = max(elements // rows // FEATURE_MULTIPLE, 1) * FEATURE_MULTIPLE
        for first in range(0, out_features, step):
            tiles = self.trellis[:, first // _TILE : (first + step) // _TILE]
            values = _tile_values(tiles, table).view(-1, FEATURE_MULTIPLE)
            rotated = (values @ hadamard).half().view(-1, rows).mul_(suh)
            blocks = rotated.float().view(-1, FEATURE_MULTIPLE, rows)
            slab = (hadamard @ blocks).half().view(-1, rows).mul_(svh[first : first + step])
            weight[first : first + step].copy_(slab[: out_features - first, :in_features])


@cache
def codebook_values(codebook: Codebook) -> Tensor:
    """The value of each 16-bit window: float32 [65536] of float16 values."""
    windows = torch.arange(1 << _WORD_BITS)
    hashed = windows * MULTIPLIERS[codebook]
    if codebook == "mul1":
        total = torch.stack([(hashed >> shift) & 0xFF for shift in (0, 8, 16, 24)]).sum(0)
        scale, offset = _float16([MUL1_SCALE_BITS, MUL1_OFFSET_BITS])
        values: Tensor = scale * (total + MUL1_BASE) + offset  # exact in float32
        return values.half().float()
    if codebook == "plain":
        hashed += PLAIN_INCREMENT
    halves = (hashed & HALVES_MASK) ^ HALVES_FLIP
    return (_float16(halves & 0xFFFF) + _float16((halves >> 16) & 0xFFFF)).half().float()


@cache
def hadamard_matrix() -> Tensor:
    """Sylvester's matrix of 128, orthonormal in float32."""
    matrix = torch.full((1, 1), FEATURE_MULTIPLE**-0.5)
    while len(matrix) < FEATURE_MULTIPLE:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix


@cache
def _windows(words: int) -> tuple[Tensor, Tensor]:
    """Of each value of a tile of `words` 16-bit words: the word that its window begins in, and by how many bits the 32
    bits from there on are shifted to the right. Values in the order of the tile's elements, column by column.

    The window of value i ends with the bits that i adds; at half-bit rates odd ones add one more. A tile's values are
    a tensor core's fragments, 8 to each of 32 lanes l: rows 0, 1, 8 and 9 from 2 * (l % 4) on, of the columns l // 4
    and l // 4 + 8.
    """
    added = [words // _TILE + (odd if words % _TILE else 0) for odd in (0, 1)] * (_TILE_VALUES // 2)
    begins = [(end - _WORD_BITS) % (words * _WORD_BITS) for end in accumulate(added)]
    order = [0] * _TILE_VALUES
    for value in range(_TILE_VALUES):
        lane, place = divmod(value, 8)
        row = lane % 4 * 2 + place % 2 + place // 2 % 2 * 8
        column = lane // 4 + place // 4 * 8
        order[column * _TILE + row] = value
    first = torch.tensor([begins[value] // _WORD_BITS for value in order])
    shift = torch.tensor([_WORD_BITS - begins[value] % _WORD_BITS for value in order], dtype=torch.int32)
    return first, shift.unsqueeze(1)


def _tile_values(tiles: Tensor, table: Tensor) -> Tensor:
    """Values of tiles [R, C, words], in the order of the transposed matrix: [16 * C, 16 * R] of the table's dtype."""
    rows, columns, words = tiles.shape
    first, shift = (each.to(tiles.device) for each in _windows(words))
    in_file = torch.arange(words, device=tiles.device) ^ 1  # the halves of a 32-bit word are stored lowest first
    stream = tiles.permute(2, 1, 0).reshape(words, -1).int().bitwise_and_(0xFFFF).index_select(0, in_file)
    pairs = stream.roll(-1, 0).bitwise_or_(stream << _WORD_BITS)
    windows = pairs.index_select(0, first).bitwise_right_shift_(shift).bitwise_and_(0xFFFF)
    values = table.index_select(0, windows.view(-1)).view(_TILE, _TILE, columns, rows)
    return values.permute(2, 0, 3, 1).reshape(columns * _TILE, rows * _TILE)


def _scales(scales: Tensor | None, packed: Tensor | None) -> Tensor:
    """float16 scales, or the signs that are stored for them: a set bit is -1."""
    if scales is not None:
        return scales
    assert packed is not None, "checked with the other tensors"
    bits = (packed.int().unsqueeze(1) >> torch.arange(_WORD_BITS, device=packed.device)) & 1
    return (1 - 2 * bits.flatten()).half()


def _float16(bits: Tensor | list[int]) -> Tensor:
    """The float16 of these bits, as float32."""
    return torch.as_tensor(bits).to(torch.int16).view(torch.float16).float()
