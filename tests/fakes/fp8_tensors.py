"""FP8 layers packed and unpacked one value at a time, by the rules of the formats alone.

The bytes are the OCP's 8-bit floats (OFP8 1.0): sign, exponent, mantissa, of 1, 4 and 3 bits with a bias of 7 (E4M3: no
infinity, all ones is not a number) or of 1, 5 and 2 with a bias of 15 (E5M2: as IEEE 754). A weight is its byte's value
times the scale of its block (DeepSeek-V3's report, section 3.3; its `weight_dequant`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["e4m3", "e5m2"]

_MANTISSA_BITS: dict[Kind, int] = {"e4m3": 3, "e5m2": 2}
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def value_of(byte: int, kind: Kind) -> float:
    """The number that a byte stands for."""
    mantissa_bits = _MANTISSA_BITS[kind]
    exponent_bits = 7 - mantissa_bits
    sign, exponent, mantissa = byte >> 7, (byte & 127) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    bias, last = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    if kind == "e4m3" and byte & 127 == 127:
        return math.nan
    if kind == "e5m2" and exponent == last:
        return math.nan if mantissa else math.copysign(math.inf, -sign)
    fraction = mantissa / (1 << mantissa_bits)
    size = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
    return -size if sign else size


def random_fp8(
    out_features: int,
    in_features: int,
    block: tuple[int, int],
    *,
    seed: int = 0,
    kind: Kind = "e4m3",
    scale_name: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    scales: tuple[float, float] = (0.001, 0.003),
) -> dict[str, Tensor]:
    """Tensors of a random layer by their short names: any finite byte, a scale for each `block`, those that the edges
    cut among them.  scales: range of the scales."""
    draw = random.Random(seed)
    finite = [byte for byte in range(256) if math.isfinite(value_of(byte, kind))]
    weight = torch.tensor(draw.choices(finite, k=out_features * in_features), dtype=torch.uint8)
    down, across = -(-out_features // block[0]), -(-in_features // block[1])
    grid = torch.tensor([[draw.uniform(*scales) for _ in range(across)] for _ in range(down)])
    return {"weight": weight.view(out_features, in_features).view(_DTYPES[kind]), scale_name: grid.to(scale_dtype)}


def dequantise_by_rules(tensors: Mapping[str, Tensor], block: tuple[int, int]) -> Tensor:
    """The layer's weight, float32 [out, in], value by value."""
    stored, scale = tensors["weight"], next(tensor for name, tensor in tensors.items() if "scale" in name)
    kind: Kind = "e4m3" if stored.dtype == torch.float8_e4m3fn else "e5m2"
    values = [value_of(byte, kind) for byte in range(256)]
    grid = scale.float().numpy()
    found = np.empty(stored.shape, dtype=np.float32)
    for row, stored_row in enumerate(stored.view(torch.uint8).tolist()):
        for column, byte in enumerate(stored_row):
            found[row, column] = np.float32(values[byte]) * grid[row // block[0], column // block[1]]
    return torch.from_numpy(found)
