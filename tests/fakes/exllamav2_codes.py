"""exllamav2's packed keys and values in numpy, by its sources (cache_q.cuh) and by no code of ours.

A block of 64 elements is rotated by butterflies between pairs of elements, 32 of them, so elements at even and at odd
places stay apart. 32 neighbours share a scale, which is the largest of them divided by half the codes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = 256
BITS = {8: (8, 8), 6: (8, 4), 4: (4, 4)}
Half = NDArray[np.float16]


def butterflies(values: Half) -> Half:
    """Sums and differences of pairs [..., 64] in float16, without a factor."""
    pairs = values.reshape(*values.shape[:-1], 32, 2)
    lanes = np.arange(32)
    for step in (1, 2, 4, 8, 16):
        signs = np.where(lanes & step, -1, 1).astype(np.float16)[:, None]
        pairs = (pairs * signs + pairs[..., lanes ^ step, :]).astype(np.float16)
    return pairs.reshape(values.shape)


def packed(heads: Half, bits: int) -> tuple[NDArray[np.uint8], Half]:
    """Codes and scales of [..., elements], a multiple of 64."""
    zero = 1 << bits - 1
    turned = butterflies(heads.reshape(-1, 64)).reshape(-1, 32)
    largest = np.abs(turned).max(1, keepdims=True)
    with np.errstate(all="ignore"):
        parts = np.nan_to_num((turned / largest).astype(np.float16).astype(np.float64), nan=-1.0)
    codes = np.clip(np.rint((parts * zero + zero).astype(np.float16)), 0, 2 * zero - 1).astype(np.uint8)
    flat = codes.reshape(*heads.shape[:-1], -1)
    if bits == 4:
        flat = flat[..., ::2] | flat[..., 1::2] << 4
    scales = (largest * np.float16(1 / zero)).astype(np.float16)
    return flat, scales.reshape(*heads.shape[:-1], -1)


def unpacked(codes: NDArray[np.uint8], scales: Half, bits: int) -> Half:
    """The elements that codes [..., bytes] and their scales [..., elements / 32] stand for."""
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    whole = codes.astype(np.float16) - np.float16(1 << bits - 1)
    turned = (whole.reshape(*scales.shape, 32) * scales[..., None]).astype(np.float16)
    return (butterflies(turned.reshape(-1, 64)) * np.float16(1 / 32)).astype(np.float16).reshape(whole.shape)


class CacheKernels:
    """The library's two functions over caches in pages, or whole. decoded: calls of the one that decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def fp16_to_q_kv(
        self,
        k_in: Tensor,
        k_out: Tensor,
        k_scales: Tensor,
        v_in: Tensor,
        v_out: Tensor,
        v_scales: Tensor,
        batch: int,
        offset: int,
        width: int,
        page_size: int,
        lengths: Tensor,
        table: Tensor,
        bits: int,
    ) -> None:
        """Pack `width` new tokens of each sequence."""
        at = _places(lengths, table, width) if page_size else torch.arange(offset, offset + width)
        for heads, codes, scales, each in zip(
            (k_in, v_in), (k_out, v_out), (k_scales, v_scales), BITS[bits], strict=True
        ):
            flat = heads[0, at].flatten(1).numpy()
            made = packed(flat, each)
            codes[0, at] = torch.from_numpy(made[0]).view(-1, *codes.shape[2:])
            scales[0, at] = torch.from_numpy(made[1]).view(-1, *scales.shape[2:])

    def q_to_fp16_kv(
        self,
        k_in: Tensor,
        k_out: Tensor,
        k_scales: Tensor,
        v_in: Tensor,
        v_out: Tensor,
        v_scales: Tensor,
        batch: int,
        offset: int,
        width: int,
        page_size: int,
        lengths: Tensor,
        table: Tensor,
        bits: int,
    ) -> None:
        """Decode all tokens that each sequence has."""
        self.decoded += 1
        at = torch.arange(offset, offset + width)
        if page_size:
            at = torch.cat(
                [
                    _places(torch.zeros(1, dtype=torch.int), row[None], int(length))
                    for row, length in zip(table, lengths, strict=True)
                ]
            )
        for codes, heads, scales, each in zip(
            (k_in, v_in), (k_out, v_out), (k_scales, v_scales), BITS[bits], strict=True
        ):
            made = unpacked(codes[0, at].flatten(1).numpy(), scales[0, at].flatten(1).numpy(), each)
            heads[0, at] = torch.from_numpy(made).view(-1, *heads.shape[2:])


def _places(lengths: Tensor, table: Tensor, count: int) -> Tensor:
    """Where the `count` tokens after `lengths` lie."""
    at = lengths[:, None].long() + torch.arange(count)
    return (table.long().gather(1, at // PAGE) * PAGE + at % PAGE).flatten()
