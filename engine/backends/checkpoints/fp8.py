"""Weights of 8-bit floats with float scales, one for a block, an output row or all of a matrix.

DeepSeek-V3 and Qwen3 keep a scale for each block of 128 x 128 as `weight_scale_inv`, which multiplies in spite of its
name (transformers 5.23, integrations/finegrained_fp8.py, `Fp8Dequantize`); compressed-tensors and AutoFP8 keep it as
`weight_scale`. Scales of activations are not read: activations stay in the floats that the model computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.checkpoints.quantized_tensors import Wanted, by, malformed_tensor, require_parts
from engine.backends.common.quant_config import FP8_KINDS, FP8_SCALES

BLOCK = (128, 128)
"""Rows and columns that share a scale, where config.json does not say it."""

_SCALE_FLOATS = ("F32", "BF16", "F16")
_SLAB_ROWS = 512
"""Rows that are made at a time: their scales, spread out, stay small."""

Shape = tuple[int, ...]


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
        weight, scale = (t.to(device) for t in self.checkpoint.read(*(f"{self.key}.{part}" for part in self.parts)))
        return dequantise(weight, scale, self.block)


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """`weight` [N, K] times its scales, float32; `scale` has one for each `block`, row by row, the last ones of an
    edge for what is left there."""
    rows, columns = weight.shape
    down, across = block
    grid = scale.float().reshape(-(-rows // down), -(-columns // across))
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
    scales = dict(_known_scales(shape, block))
    if scale.shape not in scales:
        raise malformed_tensor(
            key, names[1], f"is {by(scale.shape)}; its layer makes it {' or '.join(dict.fromkeys(map(by, scales)))}"
        )
    require_parts(key, parts, {names[1]: Wanted(scale.shape, _SCALE_FLOATS)})
    return Fp8Weight(checkpoint, key, shape, scales[scale.shape], parts)


def _known_scales(shape: tuple[int, int], block: tuple[int, int] | None) -> Iterator[tuple[Shape, tuple[int, int]]]:
    """Shapes that the scales of a weight may have, each with the block that it means."""
    rows, columns = shape
    down, across = block or BLOCK
    yield (-(-rows // down), -(-columns // across)), (down, across)
    if block is None:
        yield from ((scalar, shape) for scalar in ((), (1,), (1, 1)))
        yield from ((channels, (1, columns)) for channels in ((rows,), (rows, 1)))
