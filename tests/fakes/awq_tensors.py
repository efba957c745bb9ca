"""AWQ layers of 4 bits packed and unpacked one value at a time, by the rules of AutoAWQ's "gemm" version alone.

A word holds eight columns of a row, its lowest nibble column 0, then 2, 4, 6, 1, 3, 5 and 7 (AutoAWQ 0.2,
`WQLinear_GEMM.from_linear`, its order_map).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.fakes.exl2_tensors import pack_column

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of a word that each nibble holds, the lowest first."""


def pack_interleaved(rows: Sequence[Sequence[int]]) -> Tensor:
    """Each row of 4-bit values as int32 words, eight interleaved columns to a word."""
    words = [
        [pack_column([row[first + column] for column in ORDER], 4)[0] for first in range(0, len(row), 8)]
        for row in rows
    ]
    return torch.tensor(words, dtype=torch.int32)


def random_awq(
    in_features: int, out_features: int, groups: int, *, seed: int = 0, scales: tuple[float, float] = (0.005, 0.03)
) -> dict[str, Tensor]:
    """Tensors of a random layer by their short names: any value, any zero point.  scales: range of the scales."""
    draw = random.Random(seed)

    def codes(rows: int) -> list[list[int]]:
        return [[draw.randrange(16) for _ in range(out_features)] for _ in range(rows)]

    return {
        "qweight": pack_interleaved(codes(in_features)),
        "qzeros": pack_interleaved(codes(groups)),
        "scales": torch.tensor([[draw.uniform(*scales) for _ in range(out_features)] for _ in range(groups)]).half(),
    }


def dequantise_by_rules(tensors: Mapping[str, Tensor]) -> Tensor:
    """The layer's matrix, float16 [in, out], value by value: (value - zero) * scale."""
    words, zeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].half().numpy()
    rows, (groups, columns) = len(words), scales.shape
    matrix = np.empty((rows, columns), dtype=np.float16)
    for row in range(rows):
        group = row // (rows // groups)
        for column in range(columns):
            value, zero = (_value(packed, column) for packed in (words[row], zeros[group]))
            with np.errstate(over="ignore"):
                matrix[row, column] = scales[group, column] * np.float16(value - zero)
    return torch.from_numpy(matrix)


def _value(words: Sequence[int], column: int) -> int:
    return (words[column // 8] >> (4 * ORDER.index(column % 8))) & 15
