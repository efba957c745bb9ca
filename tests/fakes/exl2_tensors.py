"""EXL2 layers packed and unpacked one value at a time, by the format's rules alone: what the reader is held against."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Groups = Sequence[tuple[int, int]]
"""(bits, input rows) of each group, bits falling."""


def pack_column(values: Sequence[int], bits: int) -> list[int]:
    """`values` as one stream of bits, least significant first, in signed 32-bit words. They must fill the words."""
    stream = sum(value << (position * bits) for position, value in enumerate(values))
    words, rest = divmod(len(values) * bits, 32)
    assert rest == 0, f"{len(values)} values of {bits} bits fill no whole words"
    return [signed(stream >> (32 * word)) for word in range(words)]


def unpack_column(words: Sequence[int], bits: int) -> list[int]:
    """The values of a column, bit by bit."""
    total = len(words) * 32 // bits
    return [sum(_bit(words, i * bits + bit) << bit for bit in range(bits)) for i in range(total)]


def pack_matrix(codes: Sequence[Sequence[int]], bits: int) -> Tensor:
    """`codes` [rows][columns] as int32 words [rows * bits / 32, columns]."""
    columns = [pack_column(column, bits) for column in zip(*codes, strict=True)]
    return torch.tensor(columns, dtype=torch.int32).t().contiguous()


def pack_nibbles(rows: Sequence[Sequence[int]]) -> Tensor:
    """Each row of 4-bit values as int32 words, eight columns to a word."""
    return torch.tensor([pack_column(row, 4) for row in rows], dtype=torch.int32)


def random_exl2(
    groups: Groups,
    out_features: int,
    *,
    seed: int = 0,
    bias: bool = False,
    scale_max: tuple[float, float] = (0.5, 4.0),
) -> dict[str, Tensor]:
    """Tensors of a random layer by their short names: any code, any scale code, a random permutation.

    Columns beyond `out_features`, up to a multiple of 32, are padding: codes of zero weight.  scale_max: range of
    the groups' q_scale_max.
    """
    draw = random.Random(seed)
    columns = -(-out_features // 32) * 32
    words, starts = [], [0]
    for bits, rows in groups:
        codes = [
            [draw.randrange(1 << bits) if column < out_features else 1 << (bits - 1) for column in range(columns)]
            for _ in range(rows)
        ]
        words.append(pack_matrix(codes, bits))
        starts.append(starts[-1] + len(words[-1]))
    in_features = sum(rows for _, rows in groups)
    scale_codes = [[draw.randrange(16) for _ in range(columns)] for _ in groups]
    tensors = {
        "q_weight": torch.cat(words),
        "q_invperm": torch.tensor(draw.sample(range(in_features), in_features), dtype=torch.int32),
        "q_scale": pack_nibbles(scale_codes),
        "q_scale_max": torch.tensor([draw.uniform(*scale_max) for _ in groups]).half(),
        "q_groups": torch.tensor(
            [number for (bits, _), start in zip(groups, starts, strict=False) for number in (bits, start)],
            dtype=torch.int16,
        ),
    }
    if bias:
        padding = [0.0] * (columns - out_features)
        tensors["bias"] = torch.tensor([draw.uniform(-1, 1) for _ in range(out_features)] + padding).half()
    return tensors


def dequantise_by_rules(tensors: Mapping[str, Tensor], out_features: int, *, prescale: float = 1.0) -> Tensor:
    """The layer's matrix, float16 [in, out], computed value by value with Python's integers and numpy's float16."""
    flat = tensors["q_groups"].tolist()
    starts = [*flat[1::2], len(tensors["q_weight"])]
    packed_rows: list[list[np.float16]] = []
    for group, (bits, (start, end)) in enumerate(zip(flat[::2], pairwise(starts), strict=True)):
        maximum = np.float16(np.float32(tensors["q_scale_max"][group].item()) * np.float32(prescale / 256))
        columns = []
        for column in range(out_features):
            word = tensors["q_scale"][group, column // 8].item()
            code = ((word >> (4 * (column % 8))) & 15) + 1
            scale = np.float16(code * code) * maximum
            codes = unpack_column(tensors["q_weight"][start:end, column].tolist(), bits)
            with np.errstate(over="ignore"):
                columns.append([np.float16(value - (1 << (bits - 1))) * scale for value in codes])
        packed_rows += [list(row) for row in zip(*columns, strict=True)]
    return torch.from_numpy(np.array([packed_rows[row] for row in tensors["q_invperm"].tolist()], dtype=np.float16))


def signed(word: int) -> int:
    """The low 32 bits of `word`, as an int32 holds them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _bit(words: Sequence[int], position: int) -> int:
    return (words[position // 32] >> (position % 32)) & 1
