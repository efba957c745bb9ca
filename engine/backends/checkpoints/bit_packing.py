"""Small whole numbers packed into int32 words, least significant bit first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits that a packed value may have."""

WORD_BITS = 32


def period_words(bits: int) -> int:
    """Words after which a value of `bits` bits begins at a word again: 1 for 2, 4 and 8; 3 for 3 and 6; 5 for 5."""
    return bits // math.gcd(bits, WORD_BITS)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Each column of `words`, int32 [R, N], as one stream of `bits`-bit values: uint8 [R * 32 / bits, N].

    Value i of a column is made of bits i * bits and up of the column's words, the first word lowest; it may straddle
    two of them. R must be a multiple of `period_words(bits)`.
    """
    lanes = list(_lanes(bits))
    periods = words.unflatten(0, (-1, period_words(bits)))
    values = torch.empty((len(periods), len(lanes), words.shape[1]), dtype=torch.uint8, device=words.device)
    for lane, (word, shift, low_bits) in enumerate(lanes):
        value = (periods[:, word] >> shift) & _mask(low_bits)
        if low_bits < bits:
            value |= (periods[:, word + 1] & _mask(bits - low_bits)) << low_bits
        values[:, lane] = value
    return values.flatten(0, 1)


def unpack_row_nibbles(words: Tensor, columns: int, places: Sequence[int] = range(8)) -> Tensor:
    """Each row of `words`, int32 [R, C], as 4-bit values, eight to a word: uint8 [R, columns], columns <= 8 * C.

    places: which nibble of a word, the lowest first, holds each of its eight values.
    """
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & _mask(4)
    return values.to(torch.uint8).flatten(1)[:, :columns]


def _lanes(bits: int) -> Iterator[tuple[int, int, int]]:
    """For every value of one period: its first word, where in it the value begins, and how many bits are there."""
    for start in range(0, period_words(bits) * WORD_BITS, bits):
        word, shift = divmod(start, WORD_BITS)
        yield word, shift, min(bits, WORD_BITS - shift)


def _mask(bits: int) -> int:
    """Also what an arithmetic shift of a negative word needs: the copies of its sign lie above the mask."""
    return (1 << bits) - 1


# Groups of whole numbers that stand for scale * (value - zero), as GPTQ and AWQ compute them.

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
