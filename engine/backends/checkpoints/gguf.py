"""Blocks of GGUF's formats as the numbers that they stand for: those of ggml's own dequantisation, bit for bit.

Layouts: ggml-common.h (llama.cpp). A row is a sequence of blocks; each has its scale, and its codes in halves or
quarters of a byte. All of them are little-endian.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.models.files import open_file
from engine.models.gguf.file import Piece
from engine.models.gguf.header import damaged

_ALIGNMENT = 4
"""Of the widest numbers that a file has."""

_SUPER = 256
"""Values of a super-block, which K-quants have."""

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of OCP's MXFP4."""

_AHEAD_BYTES, _ADVICE_BYTES = 16 << 20, 128 << 10
"""As much as a tensor has, but no more than that, is read of what follows it while it is laid out: each piece of advice
takes 12 us, and Linux takes one for no more than it reads ahead by itself, 128 KiB if not set otherwise."""

_SLAB_VALUES = 2**22
"""Values that are made at a time: what they are made of takes several times their memory."""


def read_piece(piece: Piece, dtype: torch.dtype = torch.float16) -> Tensor:
    """The tensor, on the CPU: in the file's floats, or decoded to `dtype` where it is quantised.

    Raises ModelLoadFailed where the file cannot be read, or its rows are not those of the piece's heads; OSError.
    """
    tensor, shape = piece.tensor, piece.shape
    rows = read_codes(piece)
    if tensor.format.name in _PLAIN:
        found = rows.contiguous().view(_PLAIN[tensor.format.name]).reshape(shape)
    else:
        found = torch.empty((rows.shape[0], shape[-1]), dtype=dtype)
        step = max(1, _SLAB_VALUES // shape[-1])
        for first in range(0, len(rows), step):
            found[first : first + step] = dequantise(rows[first : first + step], tensor.format.name)
        found = found.reshape(shape)
    return found.float() - 1 if piece.less_one else found


def read_codes(piece: Piece) -> Tensor:
    """The tensor as the file has it, uint8 [rows, bytes of a row], rows in the order of a model folder. Raises as
    `read_piece` does."""
    tensor, shape = piece.tensor, piece.shape
    raw = _map_bytes(tensor.file, tensor.offset + (piece.index or 0) * piece.num_bytes, piece.num_bytes)
    rows = raw.reshape(shape[0] if len(shape) == 1 and tensor.format.name in _PLAIN else math.prod(shape[:-1]), -1)
    if not piece.heads:
        return rows
    if len(rows) % (2 * piece.heads):
        raise damaged(
            tensor.file, f"a tensor of {len(rows)} rows is not one of {piece.heads} heads, as its metadata says"
        )
    return _in_halves(rows, piece.heads)


def _map_bytes(file: Path, offset: int, count: int) -> Tensor:
    """Bytes of the file, mapped: they are read when they are looked at, and ahead of that. Nothing is written to it."""
    with open_file(file) as stream:
        _read_ahead(stream.fileno(), offset, count + min(count, _AHEAD_BYTES))
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(stream.fileno(), before + count, access=mmap.ACCESS_COPY, offset=offset - before)
        except ValueError:  # beyond its end
            raise damaged(file, "it became shorter while it was read") from None
    found = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=before)
    return found if found.data_ptr() % _ALIGNMENT == 0 else found.clone()


def _read_ahead(descriptor: int, offset: int, count: int) -> None:
    """Have the system read that much from its disk, in the background; where it cannot, only time is lost."""
    if sys.platform == "linux":
        with suppress(OSError):
            for first in range(offset, offset + count, _ADVICE_BYTES):
                os.posix_fadvise(descriptor, first, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads whose pairs ggml rotates side by side, as a model folder has them: the first of all pairs, then the
    second."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def dequantise(raw: Tensor, name: str) -> Tensor:
    """The numbers of `raw`, uint8 [rows, bytes of a row], whose format is `name`: float32 [rows, values of a row]."""
    rows = raw.shape[0]
    if name in _PLAIN:
        return raw.contiguous().view(_PLAIN[name]).float()
    decode, num_bytes = _DECODERS[name]
    return decode(raw.reshape(-1, num_bytes)).reshape(rows, -1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at byte `at` of each block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, width: int) -> Tensor:
    """Low halves of `width` bytes, then their high halves, and so on: uint8 [N, 2 * bytes]."""
    grouped = codes.reshape(codes.shape[0], -1, 1, width)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).reshape(codes.shape[0], -1)


def _crumbs(codes: Tensor, width: int) -> Tensor:
    """Likewise, quarters of bytes."""
    grouped = codes.reshape(codes.shape[0], -1, 1, width)
    return torch.cat([grouped >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).reshape(codes.shape[0], -1)


def _bits(codes: Tensor, width: int) -> Tensor:
    """Likewise, bits of bytes."""
    grouped = codes.reshape(codes.shape[0], -1, 1, width)
    return torch.cat([grouped >> shift & 1 for shift in range(8)], dim=2).reshape(codes.shape[0], -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits in 4 bytes, the first in the lowest place: uint8 [N, 32], each 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).reshape(packed.shape[0], 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Values [N, 256] in as many groups as there are scales [N, G]: each times its own, [N, G, 256 / G]."""
    return scales.unsqueeze(-1) * values.reshape(*scales.shape, -1)


def _q2_k(blocks: Tensor) -> Tensor:
    packed, codes = blocks[:, :16], _crumbs(blocks[:, 16:80], 32)
    scales, minima = _half(blocks, 80) * (packed & 15).float(), _half(blocks, 82) * (packed >> 4).float()
    return (_scaled(codes.float(), scales) - minima.unsqueeze(-1)).reshape(-1, _SUPER)


def _q3_k(blocks: Tensor) -> Tensor:
    high, low = _bits(blocks[:, :32], 32), _crumbs(blocks[:, 32:96], 32)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8], 8) | _crumbs(packed[:, 8:], 4) << 4
    values = low.float() - 4 * (1 - high.float())
    return _scaled(values, _half(blocks, 108) * (scales.float() - 32)).reshape(-1, _SUPER)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 8 groups, from 12 bytes of 6-bit codes: float32 [N, 8] each."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:], 32).float()
    return (_scaled(codes, scales) - minima.unsqueeze(-1)).reshape(-1, _SUPER)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 32) << 4
    return (_scaled(codes.float(), scales) - minima.unsqueeze(-1)).reshape(-1, _SUPER)


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, :128], 64) | _crumbs(blocks[:, 128:192], 32) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(codes.float() - 32, scales).reshape(-1, _SUPER)


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(_nibbles(blocks[:, 2:], 16), _NONLINEAR)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 4:8], blocks[:, 2:4]
    scales = torch.stack((low & 15, low >> 4), dim=2).reshape(-1, 8)
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    scales = scales | (high.unsqueeze(-1) >> places & 3).reshape(-1, 8) << 4
    values = _looked_up(_nibbles(blocks[:, 8:], 16), _NONLINEAR)
    return _scaled(values, _half(blocks, 0) * (scales.float() - 32)).reshape(-1, _SUPER)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), exponents.sub(1).clamp(min=0) << 23)
    return bits.view(torch.float32) * _looked_up(_nibbles(blocks[:, 1:], 16), _E2M1)


_DECODERS: Mapping[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q2_K": (_q2_k, 84),
    "Q3_K": (_q3_k, 110),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "IQ4_NL": (_iq4_nl, 18),
    "IQ4_XS": (_iq4_xs, 136),
    "MXFP4": (_mxfp4, 17),
}
