"""Keys and values as codes: as HeadCodec makes them, and as they lie where the native kernel laid them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.torch.kv.codec import HeadCodec

TILE, CPU = 16, torch.device("cpu")


@dataclass(frozen=True)
class Coded:
    """Heads [..., head_dim] as codes, int8 and as large as those of 8 bits, and a float16 scale for each group."""

    codes: Tensor
    scales: Tensor

    def dequantise(self) -> Tensor:
        """Return the heads in float64, still rotated."""
        groups = self.codes.double().unflatten(-1, (self.scales.shape[-1], -1))
        return (groups * self.scales.double().unsqueeze(-1)).flatten(-2)


def hadamard_rotate(heads: Tensor, form: HeadFormat) -> Tensor:
    """Return heads [..., head_dim] after their Hadamard rotation, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < form.hadamard_size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    found: Tensor = heads.double().unflatten(-1, (-1, form.hadamard_size)) @ matrix * form.hadamard_size**-0.5
    return found.flatten(-2)


def made(heads: Tensor, form: HeadFormat) -> Coded:
    """What HeadCodec makes of heads [..., head_dim]."""
    packed = HeadCodec(form, [CPU]).encode(heads)
    codes, scales = packed[..., : form.code_bytes].view(torch.int8), packed[..., form.code_bytes :].view(torch.float16)
    return Coded(torch.cat([codes << 4, codes & -16], -1) if form.bits == 4 else codes, scales)


def laid(pool: Tensor, pages: Sequence[int], tokens: int, form: HeadFormat, *, pairs: bool) -> Coded:
    """The first `tokens` of a sequence as they lie in `pages` of the pool: heads [tokens, 2 * kv_heads, head_dim].

    pairs: whether the kernel multiplies pairs of bfloat16.
    """
    page_tokens, kv_heads = pool.shape[1], pool.shape[2] // 2
    tiles = pool[list(pages)].view(-1, kv_heads, 2, page_tokens // TILE, TILE * form.head_bytes)
    rows, scales = tiles.split((TILE * form.code_bytes, tiles.shape[-1] - TILE * form.code_bytes), -1)
    codes = rows.contiguous().view(torch.int8)
    if form.bits == 4:
        halves = codes.unflatten(-1, (-1, TILE))
        codes = torch.cat([halves << 4, halves & -16], -1).flatten(-2)
    keys, values = (part.unflatten(-1, (-1, TILE, 2) if pairs else (-1, 2, TILE)) for part in codes.unbind(2))
    if not pairs:
        keys, values = keys.transpose(-1, -2), values.transpose(-1, -2)
    keys = keys.permute(0, 2, 4, 1, 3, 5)  # page, tile, token, head, pair of elements, element
    values = values.unflatten(3, (TILE // 2, -1)).permute(0, 2, 3, 6, 1, 4, 5)  # ..., pair of tokens, token, head, ...
    heads = torch.cat([part.reshape(-1, kv_heads, form.head_dim) for part in (keys, values)], 1)
    groups = scales.contiguous().view(torch.float16).unflatten(-1, (-1, TILE)).permute(0, 3, 5, 2, 1, 4)
    return Coded(heads[:tokens], groups.reshape(-1, 2 * kv_heads, form.head_dim // form.group)[:tokens])
