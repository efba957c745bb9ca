"""EXL2, ExLlamaV2's format: rows of a matrix in groups of 2 to 8 bits, each with a 4-bit scale per column.

The numbers are those of ExLlamaV2 0.3.2's kernels (q_matrix.cu, qdq_*.cuh), bit for bit in float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.checkpoints.bit_packing import (
    WIDTHS,
    WORD_BITS,
    period_words,
    unpack_columns,
    unpack_row_nibbles,
)
from engine.backends.checkpoints.quantized_tensors import (
    Part,
    Wanted,
    first_size,
    malformed_tensor,
    parts_of,
    require_parts,
)

PARTS = ("q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups", "bias")
"""Tensors of a layer, as the checkpoint names them after the layer's key."""

COLUMN_MULTIPLE = 32
"""Output features are padded to a multiple of this with columns of zero weights."""

_SCALE_MAX_UNIT = 1 / 256


class Group(NamedTuple):
    """Packed rows of one bit width: words `first_word` up to `end_word` of every column."""

    bits: int
    first_word: int
    end_word: int

    @property
    def rows(self) -> int:
        """Input rows that the words hold."""
        return (self.end_word - self.first_word) * WORD_BITS // self.bits


def require_exl2(key: str, parts: Mapping[str, Part], in_features: int, columns: int) -> None:
    """Raise ModelLoadFailed naming the first tensor of layer `key` that a matrix of `in_features` rows and `columns`
    columns, padding included, cannot have."""
    groups = first_size(parts, "q_scale_max")
    wanted = {
        "q_weight": Wanted((first_size(parts, "q_weight"), columns), ("I32",)),
        "q_invperm": Wanted((in_features,), ("I32",)),
        "q_scale_max": Wanted((groups,), ("F16",)),
        "q_scale": Wanted((groups, -(-columns // 8)), ("I32",)),
        "q_groups": Wanted((2 * groups,), ("I16",)),
        "bias": Wanted((columns,), ("F16", "BF16", "F32"), optional=True),
    }
    require_parts(key, parts, wanted)


def padded_columns(out_features: int) -> int:
    """Columns of the packed matrix of a layer with `out_features` outputs."""
    return -(-out_features // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


@dataclass(frozen=True, slots=True, eq=False)
class Exl2Linear:
    """One layer as it is stored: K input rows, N output columns (padding included), G groups of packed rows.

    q_weight: int32 [R, N], every column of a group one stream of values.  q_invperm: int32 [K], the packed row that an
    input row lies at.  q_scale: int32 [G, N / 8], 4-bit scale codes.  q_scale_max: float16 [G].  q_groups: int16
    [2 * G], (bits, first word) of each group, widths falling.  bias: [N].  `key` names the layer in refusals:
    tensors that do not fit together raise ModelLoadFailed.
    """

    key: str
    q_weight: Tensor
    q_invperm: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        parts = parts_of({name: getattr(self, name) for name in PARTS})
        columns = self.q_weight.shape[-1] if self.q_weight.dim() else 0
        require_exl2(self.key, parts, self.in_features, columns)
        self._check_groups()
        self._check_permutation()

    @property
    def in_features(self) -> int:
        """Rows of the matrix."""
        return self.q_invperm.numel()

    def groups(self) -> Iterator[Group]:
        """The groups in the order of their packed rows."""
        flat: list[int] = self.q_groups.tolist()
        spans = pairwise([*flat[1::2], self.q_weight.shape[0]])
        for bits, (first_word, end_word) in zip(flat[::2], spans, strict=True):
            yield Group(bits, first_word, end_word)

    def dequantise(self, out_features: int | None = None, *, prescale: float = 1.0) -> Tensor:
        """The matrix, float16 [K, out_features] (all N columns where not given), times `prescale`.

        Products are made in float32, where they are exact, and rounded once: what a float16 multiplication gives.
        """
        columns = self.q_weight.shape[1] if out_features is None else out_features
        scales = self._scales(columns, prescale)
        input_rows = torch.argsort(self.q_invperm)
        weight = torch.empty((self.in_features, columns), dtype=torch.float16, device=self.q_weight.device)
        row = 0
        for group, scale in zip(self.groups(), scales, strict=True):
            codes = unpack_columns(self.q_weight[group.first_word : group.end_word, :columns], group.bits)
            values = codes.float().sub_(1 << (group.bits - 1)).mul_(scale)
            weight.index_copy_(0, input_rows[row : row + group.rows], values.half())
            row += group.rows
        return weight

    def _scales(self, columns: int, prescale: float) -> Tensor:
        """float32 [G, columns] of float16 values: the square of a code times its group's maximum, rounded at each
        step (the maximum may become subnormal)."""
        maximum = (self.q_scale_max.float() * (prescale * _SCALE_MAX_UNIT)).half().float()
        root = unpack_row_nibbles(self.q_scale, columns).float() + 1
        return (root.square() * maximum.unsqueeze(-1)).half().float()

    def _check_groups(self) -> None:
        previous_bits = max(WIDTHS)
        for number, group in enumerate(self.groups()):
            problem = _group_problem(group, previous_bits, first=number == 0)
            if problem:
                raise malformed_tensor(self.key, "q_groups", f"is damaged: its group {number} {problem}")
            previous_bits = group.bits
        rows = sum(group.rows for group in self.groups())
        if rows != self.in_features:
            raise malformed_tensor(self.key, "q_groups", f"makes {rows} input rows; q_invperm has {self.in_features}")

    def _check_permutation(self) -> None:
        expected = torch.arange(self.in_features, device=self.q_invperm.device)
        if not torch.equal(self.q_invperm.sort().values.long(), expected):
            raise malformed_tensor(self.key, "q_invperm", f"is not a permutation of {self.in_features} rows")


def _group_problem(group: Group, previous_bits: int, *, first: bool) -> str:
    words = group.end_word - group.first_word
    if group.bits not in WIDTHS:
        return f"has values of {group.bits} bits, not {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
    if group.bits > previous_bits:
        return f"has {group.bits} bits after one of {previous_bits}, and widths fall"
    if first and group.first_word != 0:
        return f"begins at word row {group.first_word}, not 0"
    if words <= 0:
        return f"begins at word row {group.first_word} and ends at {group.end_word}"
    if words % period_words(group.bits):
        return f"has {words} word rows, which {group.bits}-bit values do not fill"
    return ""
