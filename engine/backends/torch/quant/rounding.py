"""Rounding groups of rows to EXL2's values: the scales that lose least, and the nearest value at those scales.

A group's value is (q - 2**(bits - 1)) * scale with q in 0 .. 2**bits - 1, and the scale of a column is
s**2 * m in half precision, s in 1 .. 16 per column and m per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_CODE = 16
SCALE_STEPS = LARGEST_CODE**2
"""The largest s**2: a group's stored scale is that of its largest column, m * 256."""

_LEAST_HALF = 2.0**-24
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
    exact = (wanted / unit.float().clamp_min(_LEAST_HALF)[:, None]).sqrt_()
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
