"""Packing one weight matrix as EXL2, every weight rounded to the nearest value that its group has.

A matrix is stored as [input features, output features]. Its rows are sorted, those that matter most first, and cut
into groups; each group has a width in bits, a scale of half precision, and a 4-bit code per column that divides it.
On disk the widest groups come first. Nothing here looks at what the model computes: there is no calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.backends.checkpoints.bit_packing import WORD_BITS
from tools.exl2_writer.bit_allocation import ROW_STEP, WIDTHS, MatrixErrors, MatrixShape

# Rounding groups of rows to EXL2's values: the scales that lose least, and the nearest value at those scales.
#
# A group's value is (q - 2**(bits - 1)) * scale with q in 0 .. 2**bits - 1, and the scale of a column is
# s**2 * m in half precision, s in 1 .. 16 per column and m per group.

LARGEST_CODE = 16
SCALE_STEPS = LARGEST_CODE**2
"""The largest s**2: a group's stored scale is that of its largest column, m * 256."""

_MIN_HALF = 2.0**-24
_SMALLEST_SHARE = {2: 0.4, 3: 0.55, 4: 0.7, 5: 0.8, 6: 0.9, 8: 0.95}
_TRIED_SHARES = 10


@dataclass(frozen=True, slots=True)
class RoundedGroups:
    """Groups of equal height, all of one width.

    values: uint8 [groups, rows, columns], q.  scale_codes: uint8 [groups, columns], s.  scale_max: fp16 [groups].
    errors: float32 [groups, rows], the squared error of each row summed over columns.
    """

    values: Tensor
    scale_codes: Tensor
    scale_max: Tensor
    errors: Tensor


def round_groups(weights: Tensor, bits: int) -> RoundedGroups:
    """Round `weights`, float32 [groups, rows, columns], to `bits`."""
    wanted = _best_scales(weights, bits)
    unit = _half_not_below(wanted.amax(dim=1) / SCALE_STEPS)
    codes = _best_codes(weights, wanted, unit, bits)
    scales = _scales(codes, unit)
    steps = _steps(weights, scales, bits)
    errors = (_times(steps, scales) - weights).square_().sum(dim=2)
    values = (steps + 2 ** (bits - 1)).to(torch.uint8)
    return RoundedGroups(values, codes.to(torch.uint8), unit * SCALE_STEPS, errors)


def _best_scales(weights: Tensor, bits: int) -> Tensor:
    """Per column the real scale of least squared error: the one that just holds its largest weight, or a share of it.

    Returns float32 [groups, columns]. A smaller scale clips the outliers and is finer for the rest, which pays the
    more the fewer the bits.
    """
    holding: Tensor = weights.abs().amax(dim=1) / (2 ** (bits - 1) - 0.5)
    shares = torch.linspace(1.0, _SMALLEST_SHARE[bits], _TRIED_SHARES).tolist()
    best, least = holding, _column_errors(weights, holding, bits)
    for share in shares[1:]:
        scales = holding * share
        errors = _column_errors(weights, scales, bits)
        best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
    return best


def _best_codes(weights: Tensor, wanted: Tensor, unit: Tensor, bits: int) -> Tensor:
    """Per column the better of the two codes around the wanted scale; float32 [groups, columns]."""
    exact = (wanted / unit.float().clamp_min(_MIN_HALF)[:, None]).sqrt_()
    below, above = (code.clamp_(1, LARGEST_CODE) for code in (exact.floor(), exact.ceil()))
    errors = [_column_errors(weights, _scales(code, unit), bits) for code in (below, above)]
    return torch.where(errors[0] <= errors[1], below, above)


def _scales(codes: Tensor, unit: Tensor) -> Tensor:
    """The scales that codes stand for, rounded to half precision as a reader rounds them; float32."""
    return (codes.square().half() * unit[:, None]).float()


def _steps(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest multiples of the scales that `bits` can say, q less its middle; 0 where a scale is 0."""
    half = 2 ** (bits - 1)
    divisors = torch.where(scales > 0, scales, torch.inf)
    return (weights / divisors[:, None]).round_().clamp_(-half, half - 1)


def _times(steps: Tensor, scales: Tensor) -> Tensor:
    return steps * scales[:, None]


def _column_errors(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    return _steps(weights, scales, bits).mul_(scales[:, None]).sub_(weights).square_().sum(dim=1)


def _half_not_below(values: Tensor) -> Tensor:
    """The least half-precision numbers that are not below `values` (not negative)."""
    halves = values.half()
    return torch.where(halves.float() < values, (halves.view(torch.int16) + 1).view(torch.float16), halves)


_CODES_PER_WORD = 8
_SAMPLED_COLUMNS = 256
_BATCH_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Sums over some weights: squared errors, and squares of the weights themselves."""

    squared_error: float = 0.0
    squared_weight: float = 0.0

    def __add__(self, other: RoundingError) -> RoundingError:
        return RoundingError(self.squared_error + other.squared_error, self.squared_weight + other.squared_weight)

    @property
    def relative(self) -> float:
        """Root mean square of the error as a share of the weights'."""
        return float((self.squared_error / self.squared_weight) ** 0.5) if self.squared_weight else 0.0


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors by the last part of their name, and what rounding to each width cost."""

    tensors: dict[str, Tensor]
    errors: Mapping[int, RoundingError]


def stored_shapes(
    shape: MatrixShape, widths: Sequence[int], *, bias: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of what `pack_linear` returns, in its order."""
    groups, columns = len(widths), shape.stored_columns
    words = sum(rows * width // WORD_BITS for rows, width in zip(shape.group_rows(), widths, strict=True))
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "q_weight": (torch.int32, (words, columns)),
        "q_invperm": (torch.int32, (shape.rows,)),
        "q_scale": (torch.int32, (groups, columns // _CODES_PER_WORD)),
        "q_scale_max": (torch.float16, (groups,)),
        "q_groups": (torch.int16, (2 * groups,)),
    }
    return shapes | {"bias": (torch.float16, (columns,))} if bias else shapes


def measure_linear(weight: Tensor, group_size: int, importance: Tensor | None = None) -> MatrixErrors:
    """The cost of rounding each group of `weight` [out, in] to each width: in weights as good as lost, the squared
    error's share of the matrix times its size. The same relative error so costs the same in every matrix.

    importance: float [in], how much the squared error of each input feature counts; all the same if None.
    Wide matrices are judged by a sample of their columns, evenly spread.
    """
    shape = _shape(weight, group_size)
    rows = row_order(weight, importance)
    sample = weight[:: max(1, shape.columns // _SAMPLED_COLUMNS)].float()
    counts = torch.ones(shape.rows) if importance is None else importance.float()
    sorted_rows, counts = sample.t()[rows], counts[rows]
    per_weight = (float(counts @ sorted_rows.square().sum(dim=1)) or 1.0) / shape.elements
    errors = [
        [
            error / per_weight
            for batch, count in _batches(sorted_rows, counts, group_size)
            for error in _errors(batch, count, width)
        ]
        for width in WIDTHS
    ]
    return MatrixErrors(shape, tuple(zip(*errors, strict=True)))


def pack_linear(
    weight: Tensor,
    widths: Sequence[int],
    *,
    group_size: int,
    importance: Tensor | None = None,
    bias: Tensor | None = None,
) -> PackedMatrix:
    """Pack `weight` [out, in]; widths: bits of each group of rows in the order of `row_order`.

    in must be a multiple of 32; out is padded to one with zero weights. bias: [out].
    """
    shape = _shape(weight, group_size)
    members = row_order(weight, importance).split(shape.group_rows())
    order = sorted(range(len(widths)), key=lambda group: -widths[group])
    words, codes, scales = [], [], []
    errors = dict.fromkeys(sorted(set(widths)), RoundingError())
    for group in order:
        rows = weight[:, members[group]].t().float()
        rounded = round_groups(pad(rows, (0, shape.stored_columns - shape.columns))[None], widths[group])
        errors[widths[group]] += RoundingError(float(rounded.errors.sum()), float(rows.square().sum()))
        words.append(pack_columns(rounded.values[0], widths[group]))
        codes.append(rounded.scale_codes[0])
        scales.append(rounded.scale_max)
    tensors = {
        "q_weight": torch.cat(words),
        "q_invperm": torch.cat([members[group] for group in order]).argsort().int(),
        "q_scale": pack_codes(torch.stack(codes)),
        "q_scale_max": torch.cat(scales),
        "q_groups": _group_table([widths[group] for group in order], [len(part) for part in words]),
    }
    if bias is not None:
        tensors["bias"] = pad(bias.half(), (0, shape.stored_columns - shape.columns))
    return PackedMatrix(tensors, errors)


def row_order(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """Input features of `weight` [out, in], the one whose weights matter most first; int64 [in]."""
    energy: Tensor = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32).square_()
    if importance is not None:
        energy *= importance.float()
    return energy.argsort(descending=True, stable=True)


def pack_columns(values: Tensor, bits: int) -> Tensor:
    """Each column of `values`, uint8 [rows, columns], as a stream of bits, least significant first; int32 words."""
    rows, columns = values.shape
    runs = values.view(rows // ROW_STEP, ROW_STEP, columns).long()
    words = torch.zeros(rows // ROW_STEP, bits, columns, dtype=torch.int64)
    for place in range(ROW_STEP):
        word, shift = divmod(place * bits, WORD_BITS)
        words[:, word] |= runs[:, place] << shift
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= runs[:, place] >> (WORD_BITS - shift)
    return words.view(-1, columns).to(torch.int32)


def pack_codes(codes: Tensor) -> Tensor:
    """Scale codes 1 to 16, uint8 [groups, columns], eight to a word and less one; int32 [groups, columns / 8]."""
    groups, columns = codes.shape
    places = torch.arange(_CODES_PER_WORD) * (WORD_BITS // _CODES_PER_WORD)
    nibbles = codes.view(groups, columns // _CODES_PER_WORD, _CODES_PER_WORD).long() - 1
    return (nibbles << places).sum(dim=2).to(torch.int32)


def _group_table(widths: Sequence[int], words: Sequence[int]) -> Tensor:
    starts = torch.tensor([0, *words[:-1]]).cumsum(dim=0)
    return torch.stack((torch.tensor(widths), starts), dim=1).flatten().to(torch.int16)


def _shape(weight: Tensor, group_size: int) -> MatrixShape:
    columns, rows = weight.shape
    assert rows % ROW_STEP == 0, f"{rows} input features are no multiple of {ROW_STEP}"
    return MatrixShape(rows, columns, group_size)


def _batches(rows: Tensor, counts: Tensor, group_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups stacked as [groups, rows, columns] with their rows' counts, in order; the short last one by itself."""
    height = max(1, _BATCH_ELEMENTS // (group_size * rows.shape[1])) * group_size
    full = len(rows) // group_size * group_size
    for part, count in zip(rows[:full].split(height), counts[:full].split(height), strict=True):
        if len(part):
            yield part.reshape(-1, group_size, part.shape[1]), count.reshape(-1, group_size)
    if full < len(rows):
        yield rows[None, full:], counts[None, full:]


def _errors(groups: Tensor, counts: Tensor, bits: int) -> list[float]:
    errors: list[float] = (round_groups(groups, bits).errors * counts).sum(dim=1).tolist()
    return errors
