"""Weights of 8-bit floats with float scales, one for a block, an output row or all of a matrix.

DeepSeek-V3 and Qwen3 keep a scale for each block of 128 x 128 as `weight_scale_inv`, which multiplies in spite of its
name (transformers 5.23, integrations/finegrained_fp8.py, `Fp8Dequantize`); compressed-tensors and AutoFP8 keep it as
`weight_scale`. Scales of activations are not read: activations stay in the floats that the model computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.checkpoints.quantized_tensors import Wanted, by, malformed_tensor, require_parts
from engine.backends.common.quant_config import FP8_KINDS, FP8_SCALES, fp8_scales

_SCALE_FLOATS = ("F32", "BF16", "F16")
_SLAB_ROWS = 512
"""Rows that are made at a time: their scales, spread out, stay small."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Codes:
    """A weight [out, in] of 8-bit floats as it is stored, and a scale for each `block` of it, row by row."""

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]

    def grid(self) -> Tensor:
        """The scales, float32 [blocks down, blocks across]."""
        (rows, columns), (down, across) = self.weight.shape, self.block
        return self.scale.float().reshape(-(-rows // down), -(-columns // across))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of layer `key`, [out, in]. block: rows and columns of it that share a scale.  parts: its tensor and
    that of its scales, by their short names."""

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, int]
    block: tuple[int, int]
    parts: Mapping[str, TensorInfo]

    @property
    def stored_bytes(self) -> int:
        """Bytes of it and its scales in their files."""
        return sum(info.stored_bytes for info in self.parts.values())

    def read(self, device: torch.device) -> Tensor:
        """Dequantise on `device`: float32, in which the products are exact or rounded once."""
        codes = self.read_codes()
        return dequantise(Fp8Codes(codes.weight.to(device), codes.scale.to(device), self.block))

    def read_codes(self) -> Fp8Codes:
        """Read it as it is stored, on the CPU."""
        weight, scale = self.checkpoint.read(*(f"{self.key}.{part}" for part in self.parts))
        return Fp8Codes(weight, scale, self.block)


def dequantise(codes: Fp8Codes) -> Tensor:
    """The weight [N, K] times its scales, float32; the last scales of an edge are for what is left there."""
    weight, (down, across) = codes.weight, codes.block
    (rows, columns), grid = weight.shape, codes.grid()
    found = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for first in range(0, rows, _SLAB_ROWS):
        slab = slice(first, min(rows, first + _SLAB_ROWS))
        scales = grid[torch.arange(slab.start, slab.stop, device=grid.device) // down]
        if across < columns:
            scales = scales.repeat_interleave(across, dim=1)[:, :columns]
        torch.mul(weight[slab].float(), scales, out=found[slab])
    return found


def locate_fp8(checkpoint: Checkpoint, key: str, shape: tuple[int, int], block: tuple[int, int] | None) -> Fp8Weight:
    """The weight of layer `key`, which config.json makes [out, in] `shape`, judged by headers alone.

    block: as config.json has it; without one the scales' shape decides. Raises ModelLoadFailed naming the tensor that
    is missing or does not fit.
    """
    names = ["weight", *(name for name in FP8_SCALES if f"{key}.{name}" in checkpoint)]
    parts = {name: checkpoint.info(f"{key}.{name}") for name in names[:2]}
    require_parts(key, parts, {"weight": Wanted(shape, FP8_KINDS)})
    if len(parts) == 1:
        raise malformed_tensor(
            key, "weight", f"is stored as {parts['weight'].kind} without {' or '.join(FP8_SCALES)} next to it"
        )
    scale = parts[names[1]]
    scales = dict(fp8_scales(shape, block))
    if scale.shape not in scales:
        raise malformed_tensor(
            key, names[1], f"is {by(scale.shape)}; its layer makes it {' or '.join(dict.fromkeys(map(by, scales)))}"
        )
    require_parts(key, parts, {names[1]: Wanted(scale.shape, _SCALE_FLOATS)})
    return Fp8Weight(checkpoint, key, shape, scales[scale.shape], parts)
