"""AWQ of 4 bits in the "gemm" version, as AutoAWQ 0.2 writes it (awq/modules/linear/gemm.py, `WQLinear_GEMM`) and reads
it back (awq/utils/packing_utils.py, `dequantize_gemm`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.checkpoints.bit_packing import dequantise_rows, unpack_row_nibbles
from engine.backends.checkpoints.quantized_tensors import (
    Part,
    Wanted,
    first_size,
    malformed_tensor,
    parts_of,
    require_parts,
)

PARTS = ("qweight", "qzeros", "scales", "bias")
"""Tensors of a layer, as the checkpoint names them after the layer's key."""

_FLOATS = ("F16", "BF16", "F32")
_WORD_VALUES = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word, the lowest first, holds each of its eight columns: from the lowest up, a word holds its
columns 0, 2, 4, 6, 1, 3, 5 and 7."""


def require_awq(key: str, parts: Mapping[str, Part], in_features: int, columns: int) -> None:
    """Raise ModelLoadFailed naming the first tensor of layer `key` that a 4-bit matrix of `in_features` rows and
    `columns` columns cannot have."""
    groups, words = first_size(parts, "scales"), -(-columns // _WORD_VALUES)
    wanted = {
        "qweight": Wanted((in_features, words), ("I32",)),
        "scales": Wanted((groups, columns), _FLOATS),
        "qzeros": Wanted((groups, words), ("I32",)),
        "bias": Wanted((columns,), _FLOATS, optional=True),
    }
    require_parts(key, parts, wanted)
    if groups < 1 or in_features % groups:
        raise malformed_tensor(
            key, "scales", f"has {groups} groups, which do not divide {in_features} input rows evenly"
        )


@dataclass(frozen=True, slots=True, eq=False)
class AwqLinear:
    """One layer as it is stored: K input rows, N output columns, G groups of K / G consecutive rows.

    qweight: int32 [K, N / 8] and qzeros: int32 [G, N / 8], eight columns to a word, interleaved.  scales: float [G, N],
    used as float16.  bias: [N].  `key` names the layer in refusals: tensors that do not fit together raise
    ModelLoadFailed.
    """

    key: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        parts = parts_of({name: getattr(self, name) for name in PARTS})
        columns = self.scales.shape[-1] if self.scales.dim() else 0
        require_awq(self.key, parts, first_size(parts, "qweight"), columns)

    def dequantise(self) -> Tensor:
        """The matrix, float16 [K, N]: scale * (value - zero), rounded once."""
        return dequantise_rows(self.codes(), self.zeros().float(), self.scales.half().float(), self.row_groups())

    def row_groups(self) -> Tensor:
        """Each input row's group, int64 [K]."""
        rows, groups = len(self.qweight), len(self.scales)
        return torch.arange(rows, device=self.qweight.device) // (rows // groups)

    def codes(self) -> Tensor:
        """The stored values, uint8 [K, N]."""
        return unpack_row_nibbles(self.qweight, self.scales.shape[1], _PLACES)

    def zeros(self) -> Tensor:
        """The zero points, uint8 [G, N]."""
        return unpack_row_nibbles(self.qzeros, self.scales.shape[1], _PLACES)
