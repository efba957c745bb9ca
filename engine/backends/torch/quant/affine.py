"""Groups of whole numbers that stand for scale * (value - zero), as GPTQ and AWQ compute them."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ROWS = 128
"""Rows that are made at a time: their float32 forms stay small."""


def dequantise_rows(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """The matrix, float16 [K, N]: scale * (value - zero), rounded once.

    codes: uint8 [K, N].  zeros, scales: float32 [G, N], the scales of values that float16 has.  groups: int64 [K],
    each row's.
    """
    weight = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
    for first in range(0, len(weight), _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        values = codes[block].float().sub_(zeros[groups[block]]).mul_(scales[groups[block]])
        weight[block] = values.half()
    return weight
