"""GPTQ of 4 bits, as AutoGPTQ and GPTQModel write it and ExLlamaV2 0.3.2 reads it (q_matrix.cu)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.checkpoints.bit_packing import WORD_BITS, dequantise_rows, unpack_columns, unpack_row_nibbles
from engine.backends.checkpoints.quantized_tensors import (
    Part,
    Wanted,
    first_size,
    malformed_tensor,
    parts_of,
    require_parts,
)
from engine.backends.common.quant_config import GPTQ_BITS, gptq_group_size

PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")
"""Tensors of a layer, as the checkpoint names them after the layer's key."""

_FLOATS = ("F16", "BF16", "F32")
_WORD_VALUES = WORD_BITS // GPTQ_BITS


def require_gptq(key: str, parts: Mapping[str, Part], in_features: int, columns: int) -> None:
    """Raise ModelLoadFailed naming the first tensor of layer `key` that a 4-bit matrix of `in_features` rows and
    `columns` columns cannot have, or the bits that its values have instead."""
    words = first_size(parts, "qweight")
    bits, rest = divmod(words * WORD_BITS, max(in_features, 1))
    if rest == 0 and bits in (2, 3, 8):
        raise malformed_tensor(key, "qweight", f"has {bits}-bit values; only {GPTQ_BITS}-bit GPTQ is supported")
    groups = first_size(parts, "scales")
    wanted = {
        "qweight": Wanted((-(-in_features // _WORD_VALUES), columns), ("I32",)),
        "scales": Wanted((groups, columns), _FLOATS),
        "qzeros": Wanted((groups, -(-columns // _WORD_VALUES)), ("I32",)),
        "g_idx": Wanted((in_features,), ("I32",), optional=True),
        "bias": Wanted((columns,), _FLOATS, optional=True),
    }
    require_parts(key, parts, wanted)
    if not 1 <= groups <= in_features:
        raise malformed_tensor(key, "scales", f"has {groups} groups for {in_features} input rows")


@dataclass(frozen=True, slots=True, eq=False)
class GptqLinear:
    """One layer as it is stored: K input rows, N output columns, G groups of rows.

    qweight: int32 [K / 8, N], eight rows to a word.  qzeros: int32 [G, N / 8], eight columns to a word.  scales: float
    [G, N], used as float16.  g_idx: int32 [K], each row's group; missing or all zero where the groups are consecutive
    rows.  bias: [N].  zero_offset: added to every stored zero point.  `key` names the layer in refusals: tensors
    that do not fit together raise ModelLoadFailed.
    """

    key: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None = None
    bias: Tensor | None = None
    zero_offset: int = 1

    def __post_init__(self) -> None:
        parts = parts_of({name: getattr(self, name) for name in PARTS})
        columns = self.qweight.shape[-1] if self.qweight.dim() else 0
        require_gptq(self.key, parts, self.in_features, columns)
        if self.g_idx is not None and not 0 <= int(self.g_idx.min()) <= int(self.g_idx.max()) < len(self.scales):
            raise malformed_tensor(self.key, "g_idx", f"names groups outside the {len(self.scales)} that exist")

    @property
    def in_features(self) -> int:
        """Rows of the matrix."""
        if self.g_idx is not None:
            return self.g_idx.numel()
        return self.qweight.shape[0] * _WORD_VALUES if self.qweight.dim() else 0

    def row_groups(self) -> Tensor:
        """Each input row's group, int64 [K]."""
        if self.g_idx is not None and bool(self.g_idx.any()):
            return self.g_idx.long()
        size = gptq_group_size(self.in_features, len(self.scales))
        return torch.arange(self.in_features, device=self.qweight.device) // size

    def dequantise(self) -> Tensor:
        """The matrix, float16 [K, N]: scale * (value - zero), rounded once; a zero point may be 16."""
        return dequantise_rows(self.codes(), self.zeros().float(), self.scales.half().float(), self.row_groups())

    def codes(self) -> Tensor:
        """The stored values, uint8 [K, N]."""
        return unpack_columns(self.qweight, GPTQ_BITS)[: self.in_features]

    def zeros(self) -> Tensor:
        """The zero points, uint8 [G, N]."""
        return unpack_row_nibbles(self.qzeros, self.qweight.shape[1]) + self.zero_offset
