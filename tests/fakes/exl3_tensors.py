"""EXL3 layers packed and decoded by the format's rules alone, in Python's integers and numpy: what the reader is held
against."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tests.fakes.exl2_tensors import signed

Codebook = Literal["plain", "mcg", "mul1"]
Signs = Literal["suh", "su"]
"""Scales with signs, or signs alone, packed: as folders of the format's first months have them."""

MARKERS: Mapping[Codebook, int] = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
BLOCK = 128

_H = np.float32(1 / np.sqrt(128.0))


def random_exl3(
    in_features: int,
    out_features: int,
    bits: float = 4,
    *,
    codebook: Codebook = "plain",
    signs: Signs = "suh",
    seed: int = 0,
    scale: float = 1.0,
    bias: bool = False,
) -> dict[str, Tensor]:
    """Tensors of a random layer by their short names: any ring of bits is a trellis. Features are padded to multiples
    of 128.  scale: about the largest scale of an output; inputs' are about 1."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-features // BLOCK) * BLOCK for features in (in_features, out_features))
    shape = (rows // 16, columns // 16, int(16 * bits))
    tensors = {"trellis": torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)}
    if signs == "suh":
        tensors["suh"] = torch.tensor([draw.choice((-1, 1)) * draw.uniform(0.5, 1.5) for _ in range(rows)]).half()
        tensors["svh"] = torch.tensor(
            [draw.choice((-1, 1)) * draw.uniform(0.1, 1) * scale for _ in range(columns)]
        ).half()
    else:
        tensors["su"] = torch.randint(-(2**15), 2**15, (rows // 16,), dtype=torch.int16, generator=generator)
        tensors["sv"] = torch.randint(-(2**15), 2**15, (columns // 16,), dtype=torch.int16, generator=generator)
    if codebook != "plain":
        tensors[codebook] = torch.tensor(signed(MARKERS[codebook]), dtype=torch.int32)
    if bias:
        padding = [0.0] * (columns - out_features)
        tensors["bias"] = torch.tensor([draw.uniform(-1, 1) for _ in range(out_features)] + padding).half()
    return tensors


def pack_tile(windows: Sequence[int], bits: float) -> list[int]:
    """The signed 16-bit words of a tile's 256 windows, which must follow from one another around the ring."""
    ring = "".join(f"{window:016b}"[-added:] for window, added in zip(windows, added_bits(bits), strict=True))
    words = [int(ring[at : at + 16], 2) for at in range(0, len(ring), 16)]
    swapped = [words[number ^ 1] for number in range(len(words))]
    return [word - (1 << 16) if word >= 1 << 15 else word for word in swapped]


def tile_windows(words: Sequence[int], bits: float) -> list[int]:
    """The 256 windows of a tile, read from its ring of bits one after the other."""
    ring = "".join(f"{words[number ^ 1] & 0xFFFF:016b}" for number in range(len(words)))
    windows, end = [], 0
    for added in added_bits(bits):
        end += added
        windows.append(int((ring + ring)[end + len(ring) - 16 : end + len(ring)], 2))
    return windows


def added_bits(bits: float) -> list[int]:
    """Bits that each of a tile's values adds to the ring: at half-bit rates one more for every other."""
    whole = int(bits)
    return [whole, whole + (bits != whole)] * 128


@cache
def window_value(window: int, codebook: Codebook) -> np.float16:
    """The value of a window."""
    if codebook == "mul1":
        total = sum((window * 0x83DCD12D & 0xFFFFFFFF).to_bytes(4, "little"))
        scale, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16)
        return np.float16(float(1024 + total) * float(scale) + float(offset))
    hashed = window * 89226354 + 64248484 if codebook == "plain" else window * 0xCBAC1FED
    hashed = (hashed & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = np.array([hashed & 0xFFFF, hashed >> 16 & 0xFFFF], dtype=np.uint16).view(np.float16)
    return np.float16(low + high)


def element_of(value: int) -> tuple[int, int]:
    """Row and column in its tile of a value: 32 lanes of a tensor core hold 8 each, in pairs of rows."""
    lane, place = divmod(value, 8)
    row = (0, 1, 8, 9)[place % 4] + 2 * (lane % 4)
    return row, lane // 4 + (8 if place >= 4 else 0)


def rotated_by_rules(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The matrix before its Hadamard transforms, float16 [in, out] with padding."""
    trellis = tensors["trellis"]
    tile_rows, tile_columns, words = trellis.shape
    codebook: Codebook = "mcg" if "mcg" in tensors else "mul1" if "mul1" in tensors else "plain"
    matrix = np.zeros((tile_rows * 16, tile_columns * 16), dtype=np.float16)
    for tile_row in range(tile_rows):
        for tile_column in range(tile_columns):
            stored = trellis[tile_row, tile_column].tolist()
            for value, window in enumerate(tile_windows(stored, words / 16)):
                row, column = element_of(value)
                matrix[16 * tile_row + row, 16 * tile_column + column] = window_value(window, codebook)
    return matrix


def dequantise_by_rules(tensors: Mapping[str, Tensor], in_features: int, out_features: int) -> Tensor:
    """The layer's matrix, float16 [in, out] without padding: the transform of the rows, suh, that of the columns, svh,
    each rounded to float16."""
    suh, svh = scales_by_rules(tensors, "su"), scales_by_rules(tensors, "sv")
    matrix = _transform_rows(rotated_by_rules(tensors)) * suh[:, np.newaxis]
    matrix = _transform_rows(matrix.T).T * svh[np.newaxis, :]
    return torch.from_numpy(np.ascontiguousarray(matrix[:in_features, :out_features]))


def scales_by_rules(tensors: Mapping[str, Tensor], name: str) -> np.ndarray:
    """suh or svh, made from packed signs where those are stored."""
    if f"{name}h" in tensors:
        scales: np.ndarray = tensors[f"{name}h"].numpy()
        return scales
    words = tensors[name].tolist()
    return np.array([1 - 2 * (word >> bit & 1) for word in words for bit in range(16)], dtype=np.float16)


@cache
def sums_in_order() -> bool:
    """Return whether this machine's torch makes the sums of a float32 product from the first element on, with fused
    multiplications and additions, as these rules do. Libraries choose the order by processor and shape."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((128, 128), (512, 128), (128, 384)):
        left = torch.randn(rows, BLOCK, generator=generator)
        right = torch.randn(BLOCK, columns, generator=generator)
        total = np.zeros((rows, columns), dtype=np.float32)
        for place in range(BLOCK):
            product = np.outer(left[:, place].double().numpy(), right[place].double().numpy())
            total = (total + product).astype(np.float32)
        if not np.array_equal(total, (left @ right).numpy()):
            return False
    return True


def _transform_rows(matrix: np.ndarray) -> np.ndarray:
    """Each 128 rows replaced by their Hadamard transform: float32 sums from the first row on, products not rounded,
    as fused multiplications and additions make them; then float16."""
    made = np.empty_like(matrix)
    for first in range(0, len(matrix), BLOCK):
        block = matrix[first : first + BLOCK].astype(np.float64)
        for row in range(BLOCK):
            total = np.zeros(matrix.shape[1], dtype=np.float32)
            for other in range(BLOCK):
                sign = -1 if (row & other).bit_count() % 2 else 1
                total = (total + sign * float(_H) * block[other]).astype(np.float32)
            made[first + row] = total.astype(np.float16)
    return made
