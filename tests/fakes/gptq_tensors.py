"""GPTQ layers of 4 bits packed and unpacked one value at a time, by the format's rules alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.fakes.exl2_tensors import pack_matrix, pack_nibbles


def random_gptq(
    in_features: int,
    out_features: int,
    groups: int,
    *,
    seed: int = 0,
    g_idx: Sequence[int] | None = None,
    bias: bool = False,
    scales: tuple[float, float] = (0.005, 0.03),
) -> dict[str, Tensor]:
    """Tensors of a random layer by their short names: any value, any zero point.  g_idx: each row's group, if stored.
    scales: range of the scales."""
    draw = random.Random(seed)

    def codes(rows: int) -> list[list[int]]:
        return [[draw.randrange(16) for _ in range(out_features)] for _ in range(rows)]

    tensors = {
        "qweight": pack_matrix(codes(in_features), 4),
        "qzeros": pack_nibbles(codes(groups)),
        "scales": torch.tensor([[draw.uniform(*scales) for _ in range(out_features)] for _ in range(groups)]).half(),
    }
    if g_idx is not None:
        tensors["g_idx"] = torch.tensor(list(g_idx), dtype=torch.int32)
    if bias:
        tensors["bias"] = torch.tensor([draw.uniform(-1, 1) for _ in range(out_features)]).half()
    return tensors


def dequantise_by_rules(tensors: Mapping[str, Tensor], row_groups: Sequence[int], *, zero_offset: int = 1) -> Tensor:
    """The layer's matrix, float16 [in, out], value by value; `row_groups` says each input row's group."""
    words, zeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].half().numpy()
    columns = len(words[0])
    matrix = np.empty((len(row_groups), columns), dtype=np.float16)
    for row, group in enumerate(row_groups):
        for column in range(columns):
            value = (words[row // 8][column] >> (4 * (row % 8))) & 15
            zero = ((zeros[group][column // 8] >> (4 * (column % 8))) & 15) + zero_offset
            with np.errstate(over="ignore"):
                matrix[row, column] = scales[group, column] * np.float16(value - zero)
    return torch.from_numpy(matrix)
