"""Random EXL2 matrices, packed without quantising anything: every int32 is a valid word of every bit width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from engine.backends.torch.quant.widths import WIDTHS, MatrixShape

HEAD_BITS = 6
LEAST_BITS, MOST_BITS = 2.2, 8.0
_GROUP_ROWS = 128
_FIRST_CODE, _CODES = 8, 16
_CODES_PER_WORD = 8
_MEAN_SQUARE = sum((code + 1) ** 2 for code in range(_FIRST_CODE, _CODES)) / (_CODES - _FIRST_CODE)


def declaration(bits: float) -> dict[str, object]:
    """quantization_config of a model that was packed so."""
    calibration = {"rows": 0, "length": 0, "dataset": "none, random weights"}
    return {
        "quant_method": "exl2",
        "version": "0.2.4",
        "bits": bits,
        "head_bits": HEAD_BITS,
        "calibration": calibration,
    }


def random_linear(rows: int, columns: int, bits: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The stored tensors of a layer of `rows` inputs and `columns` outputs by the last part of their names, with about
    `bits` bits for each weight, all counted; weights deviate by 1 / sqrt(rows)."""
    shape = MatrixShape(rows, columns, _GROUP_ROWS)
    heights, widths = shape.group_rows(), group_widths(shape, bits)
    words = [height * width // 32 for height, width in zip(heights, widths, strict=True)]
    starts = [sum(words[:place]) for place in range(len(words))]
    spread = torch.tensor([2**width / math.sqrt(12) for width in widths])
    return {
        "q_weight": _random_words(sum(words), shape.stored_columns, generator),
        "q_invperm": torch.randperm(rows, generator=generator).to(torch.int32),
        "q_scale": _random_codes(len(widths), shape.stored_columns, generator),
        "q_scale_max": (256 * rows**-0.5 / _MEAN_SQUARE / spread).half(),
        "q_groups": torch.tensor([each for pair in zip(widths, starts, strict=True) for each in pair]).to(torch.int16),
    }


@cache
def stored_linear(rows: int, columns: int, bits: float) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype in safetensors' words and shape of what `random_linear` makes."""
    shape = MatrixShape(rows, columns, _GROUP_ROWS)
    heights, widths = shape.group_rows(), group_widths(shape, bits)
    words = sum(height * width // 32 for height, width in zip(heights, widths, strict=True))
    return {
        "q_weight": ("I32", (words, shape.stored_columns)),
        "q_invperm": ("I32", (rows,)),
        "q_scale": ("I32", (len(widths), shape.stored_columns // _CODES_PER_WORD)),
        "q_scale_max": ("F16", (len(widths),)),
        "q_groups": ("I16", (2 * len(widths),)),
    }


def group_widths(shape: MatrixShape, bits: float) -> list[int]:
    """A width for each group, falling, such that the whole comes near to `bits` for each weight and not above it where
    the narrowest can be kept."""
    widths = [WIDTHS[0]] * len(shape.group_rows())
    for wider in WIDTHS[1:]:
        for place in range(len(widths)):
            tried = [*widths[:place], wider, *widths[place + 1 :]]
            if shape.stored_bits(tried) > bits * shape.elements:
                return widths
            widths = tried
    return widths


def _random_words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Uniform over all int32."""
    halves = torch.randint(-(2**15), 2**15, (rows, columns * 2), generator=generator, dtype=torch.int16)
    return halves.view(torch.int32)


def _random_codes(groups: int, columns: int, generator: torch.Generator) -> Tensor:
    """Scale codes from the upper half, eight in a word."""
    lanes = torch.randint(
        _FIRST_CODE, _CODES, (groups, columns // _CODES_PER_WORD, _CODES_PER_WORD), generator=generator
    )
    return (lanes << 4 * torch.arange(_CODES_PER_WORD)).sum(dim=2).to(torch.int32)
