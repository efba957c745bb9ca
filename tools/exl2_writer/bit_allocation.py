"""How many bits each group of rows gets, so that a model meets its target with the least error. No torch here.

Every group starts at the narrowest width; the steps that take the most error away per bit are then chosen first,
until the bits are spent. Of each group's widths only those on the lower convex hull of (bits, error) are offered,
which makes the greedy order the one that a Lagrange multiplier gives (Shoham and Gersho 1988, "Efficient bit
allocation for an arbitrary set of quantizers").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits per value that EXL2 has."""

GROUP_SIZES = (32, 64, 128)
"""Rows that may share a scale."""

ROW_STEP = COLUMN_STEP = 32
"""The kernels read 32 rows at a time; stored columns are padded to a multiple of 32."""

_SCALE_BITS, _GROUP_BITS, _PERMUTATION_BITS = 4, 16 + 32, 32
"""Overhead: per group and column its scale's code, per group its largest scale and two int16, per row its place."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A matrix to be packed: rows are input features, columns output features, as EXL2 stores them."""

    rows: int
    columns: int
    group_size: int

    @property
    def elements(self) -> int:
        """Weights that it stands for."""
        return self.rows * self.columns

    @property
    def stored_columns(self) -> int:
        """Columns with padding."""
        return math.ceil(self.columns / COLUMN_STEP) * COLUMN_STEP

    def group_rows(self) -> tuple[int, ...]:
        """Rows of each group; the last may be shorter."""
        full, rest = divmod(self.rows, self.group_size)
        return (self.group_size,) * full + ((rest,) if rest else ())

    def overhead_bits(self) -> int:
        """Bits stored besides the values, at any width."""
        groups = len(self.group_rows())
        return groups * (self.stored_columns * _SCALE_BITS + _GROUP_BITS) + self.rows * _PERMUTATION_BITS

    def stored_bits(self, widths: Sequence[int]) -> int:
        """Bits stored in all, for the width of each group."""
        values = sum(rows * width for rows, width in zip(self.group_rows(), widths, strict=True))
        return values * self.stored_columns + self.overhead_bits()


@dataclass(frozen=True, slots=True)
class MatrixErrors:
    """Rounding errors of a matrix: errors[group][i] is the error of that group at WIDTHS[i], of any one unit."""

    shape: MatrixShape
    errors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """One widening of one group. rank: which of that group's steps it is."""

    gain: float
    matrix: str
    group: int
    rank: int
    width: int
    bits: int


def plan_widths(matrices: Mapping[str, MatrixErrors], bits_per_weight: float) -> dict[str, tuple[int, ...]]:
    """The width of every group of every matrix, in the order of `errors`.

    bits_per_weight: what all matrices together may store per weight, overhead included. It is never exceeded, and
    no step that takes error away is left out if its bits are there. Raises ValueError below `least_bits`.
    """
    shapes = [matrix.shape for matrix in matrices.values()]
    left_bits = math.floor(bits_per_weight * sum(shape.elements for shape in shapes))
    left_bits -= sum(_uniform_bits(shape, WIDTHS[0]) for shape in shapes)
    if left_bits < 0:
        raise ValueError(f"{bits_per_weight} bits per weight cannot hold {WIDTHS[0]} bits and their overhead")
    widths = {name: [WIDTHS[0]] * len(matrix.errors) for name, matrix in matrices.items()}
    chosen: dict[tuple[str, int], int] = {}
    for step in sorted(_all_steps(matrices), key=lambda step: -step.gain):
        reached = chosen.get((step.matrix, step.group), 0)
        if step.rank == reached and step.bits <= left_bits:
            left_bits -= step.bits
            chosen[step.matrix, step.group] = reached + 1
            widths[step.matrix][step.group] = step.width
    return {name: tuple(chosen) for name, chosen in widths.items()}


def least_bits(shapes: Iterable[MatrixShape]) -> float:
    """Bits per weight with every value at the narrowest width."""
    shapes = list(shapes)
    return sum(_uniform_bits(shape, WIDTHS[0]) for shape in shapes) / sum(shape.elements for shape in shapes)


def average_bits(shapes: Mapping[str, MatrixShape], widths: Mapping[str, Sequence[int]]) -> float:
    """Bits stored per weight over all matrices, overhead included."""
    stored = sum(shape.stored_bits(widths[name]) for name, shape in shapes.items())
    return stored / sum(shape.elements for shape in shapes.values())


def _uniform_bits(shape: MatrixShape, width: int) -> int:
    return shape.rows * shape.stored_columns * width + shape.overhead_bits()


def _all_steps(matrices: Mapping[str, MatrixErrors]) -> Iterator[_Step]:
    for name, matrix in matrices.items():
        groups = zip(matrix.shape.group_rows(), matrix.errors, strict=True)
        for group, (rows, errors) in enumerate(groups):
            for rank, (start, end) in enumerate(_hull_steps(errors)):
                bits = rows * matrix.shape.stored_columns * (WIDTHS[end] - WIDTHS[start])
                gain = (errors[start] - errors[end]) / bits
                if gain > 0:
                    yield _Step(gain, name, group, rank, WIDTHS[end], bits)


def _hull_steps(errors: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Pairs of indices into WIDTHS along the lower convex hull: each goes where error falls fastest per bit."""
    start = 0
    while start < len(WIDTHS) - 1:
        end = max(
            range(start + 1, len(WIDTHS)),
            key=lambda end: ((errors[start] - errors[end]) / (WIDTHS[end] - WIDTHS[start]), end),
        )
        yield start, end
        start = end
