"""What measurements say and how sure that is: means over batches, percentiles over sections. Pure.

* A rate is measured in slices of a window, one after the other; its mean has the standard error of the slices' mean
  (batch means, Conway 1963), and each window may be off as a whole by `DRIFT`, since a machine has others to serve.
* A percentile is taken over everything, and its standard error is that of the percentiles of the slices (sectioning,
  Asmussen and Glynn 2007, III.5): gaps of one step are as long for all who are in it, so their number says nothing.
* Intervals are Student's t, two-sided with `CONFIDENCE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
DRIFT = 0.015


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where it lies with CONFIDENCE. low and high are 0 and infinity where that cannot be told."""

    value: float
    low: float = 0.0
    high: float = math.inf

    def __str__(self) -> str:
        return f"{self.value:g} ({self.low:g} to {self.high:g})"


def rate_of(slices: Sequence[float], windows: int) -> Interval:
    """The mean of rates, one for each slice of so many windows."""
    mean = fmean(slices)
    if len(slices) < 2:
        return Interval(mean)
    variance = stdev(slices) ** 2 / len(slices) + (DRIFT * mean) ** 2 / windows
    return _around(mean, math.sqrt(variance), len(slices) - 1)


def quantile_of(sections: Sequence[Sequence[float]], share: float) -> Interval | None:
    """The value that `share` of all do not exceed; None where there are none."""
    filled = [section for section in sections if section]
    if not filled:
        return None
    value = quantile([each for section in filled for each in section], share)
    if len(filled) < 2:
        return Interval(value)
    error = stdev([quantile(section, share) for section in filled]) / math.sqrt(len(filled))
    return _around(value, error, len(filled) - 1)


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two that it lies between, linearly (R-7, as numpy has it)."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _around(value: float, error: float, freedom: int) -> Interval:
    half = student_t(freedom) * error
    return Interval(value, max(0.0, value - half), value + half)


@cache
def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t (exact for one and two degrees of freedom, else the expansion of Abramowitz
    and Stegun 26.7.5, right to a hundredth)."""
    share = (1 + confidence) / 2
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z, n = NormalDist().inv_cdf(share), freedom
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return sum(terms)
