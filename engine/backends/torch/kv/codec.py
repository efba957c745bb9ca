"""HeadCodec: keys and values as codes of 8 or 4 bits, rounded to nearest in small groups, after a Hadamard rotation.

Some models' keys have a few channels much larger than the rest, which would leave too few steps of a shared scale for
the others. The rotation spreads each over the whole head (as in QuaRot, Ashkboos et al. 2024). It is orthogonal and its
own
inverse: equally rotated queries give the same scores, and rotated values give rotated outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat

_MIN_CODE = -128
"""The code of the element of a group that is furthest from 0; its sign is the scale's."""


class HeadCodec:
    """Encodes heads [..., head_dim] into bytes [..., head_bytes], and decodes them, still rotated.

    A code times its group's scale is the element. Codes of 8 bits are int8. Those of 4 are the upper halves of such,
    with 0 below; byte i of a head has that of element i in its lower half and that of i + head_dim / 2 in its upper.
    """

    def __init__(self, heads: HeadFormat, devices: Iterable[torch.device]) -> None:
        self._heads = heads
        matrix = _hadamard(heads.hadamard_size)
        self._matrices = {device: matrix.to(device) for device in devices}

    def rotate(self, heads: Tensor) -> Tensor:
        """Return the rotated heads [..., head_dim] in their dtype; the rotation is its own inverse."""
        rotated = self._rotate(heads.float())
        return rotated.to(heads.dtype)

    def encode(self, heads: Tensor) -> Tensor:
        """Rotate and round heads [..., head_dim] to bytes [..., head_bytes]. An infinity or NaN makes its group NaN."""
        groups = self._rotate(heads.float()).unflatten(-1, (-1, self._heads.group))
        extremes = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scales = (extremes / _MIN_CODE).half()
        step = 1 << (8 - self._heads.bits)
        units = scales.float() * step
        codes = (groups / units.masked_fill(units == 0, 1)).round_().clamp_(_MIN_CODE // step, -_MIN_CODE // step - 1)
        packed = (codes * step).to(torch.int8).flatten(-2)
        if self._heads.bits == 4:
            low, high = packed.chunk(2, dim=-1)
            packed = high | (low >> 4 & 15)
        return torch.cat([packed.view(torch.uint8), scales.flatten(-2).view(torch.uint8)], dim=-1)

    def decode(self, packed: Tensor, out: Tensor) -> Tensor:
        """Write the rotated heads [..., head_dim] of `packed` [..., head_bytes] to `out`, contiguous, and return it."""
        size = self._heads.code_bytes
        codes = packed[..., :size].view(torch.int8)
        if self._heads.bits == 4:
            out[..., :size] = codes << 4
            out[..., size:] = codes & -16
        else:
            out.copy_(codes)
        scales = packed[..., size:].view(torch.float16)
        out.unflatten(-1, (-1, self._heads.group)).mul_(scales.to(out.dtype).unsqueeze(-1))
        return out

    def _rotate(self, heads: Tensor) -> Tensor:
        rotated: Tensor = heads.unflatten(-1, (-1, self._heads.hadamard_size)) @ self._matrices[heads.device]
        return rotated.flatten(-2)


def _hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix of a power of two, orthonormal, symmetric, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix.mul_(size**-0.5)
