"""Random EXL2 matrices, packed without quantising anything: every int32 is a valid word of every bit width.

Made apart from the product's own writer, so that a reader is not tested against its own assumptions. The layout is
that of EXL2 files: groups of rows in descending width, each column an LSB-first bit stream of 32-bit words, 4-bit
scale codes, one fp16 maximum scale per group, and a permutation of the input rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WIDTHS = (8, 6, 5, 4, 3, 2)
PADDING = 32
"""Columns are padded to a multiple of this."""
_ROWS = 32
_FIRST_CODE, _CODES = 8, 16
_MEAN_SQUARE = sum((code + 1) ** 2 for code in range(_FIRST_CODE, _CODES)) / (_CODES - _FIRST_CODE)


@dataclass(frozen=True, slots=True)
class Group:
    """A run of input rows that share a width and a maximum scale."""

    bits: int
    rows: int


def plan_groups(rows: int, widths: tuple[int, ...], group_rows: int) -> list[Group]:
    """Groups for `rows` input rows, about as many for each width, the widest first; the last takes what is left.

    Raises ValueError where rows is no multiple of 32 or there are fewer groups than widths.
    """
    if rows % _ROWS or group_rows % _ROWS:
        raise ValueError(f"{rows} rows in groups of {group_rows}: both must be multiples of {_ROWS}")
    count = math.ceil(rows / group_rows)
    if count < len(widths):
        raise ValueError(
            f"{rows} rows make {count} groups of {group_rows}, fewer than the {len(widths)} widths asked for"
        )
    ordered = sorted(widths, reverse=True)
    return [
        Group(ordered[index * len(ordered) // count], min(group_rows, rows - index * group_rows))
        for index in range(count)
    ]


def random_exl2(
    in_features: int,
    out_features: int,
    groups: list[Group],
    *,
    std: float,
    generator: torch.Generator,
    bias: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of one linear layer, named as after its key and a dot; weights have about the deviation `std`. They
    are made on the generator's device."""
    device = generator.device
    columns = math.ceil(out_features / PADDING) * PADDING
    words = [group.rows * group.bits // 32 for group in groups]
    starts = [sum(words[:index]) for index in range(len(groups))]
    flat = [number for group, start in zip(groups, starts, strict=True) for number in (group.bits, start)]
    perm = torch.randperm(in_features, generator=generator, device=device)
    spread = torch.tensor([2**group.bits / math.sqrt(12) for group in groups])
    codes = torch.randint(_FIRST_CODE, _CODES, (len(groups), columns), generator=generator, device=device)
    tensors = {
        "q_weight": random_words(sum(words), columns, generator),
        "q_invperm": perm.to(torch.int32),
        "q_scale": _pack_codes(codes),
        "q_scale_max": (std / _MEAN_SQUARE / spread * 256).half(),
        "q_groups": torch.tensor(flat, dtype=torch.int16),
    }
    if bias:
        tensors["bias"] = (0.3 * torch.randn(columns, generator=generator, device=device)).half()
    return tensors


def random_words(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform over all int32, on the generator's device."""
    size, device = (rows, columns * 2), generator.device
    halves = torch.randint(-(2**15), 2**15, size, generator=generator, dtype=torch.int16, device=device)
    return halves.view(torch.int32)


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [G, N] to int32 [G, N / 8], the first column in the lowest bits."""
    lanes = codes.view(codes.shape[0], -1, 8).to(torch.int64) << (4 * torch.arange(8, device=codes.device))
    words = lanes.sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
