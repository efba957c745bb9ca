"""What measurements say and how sure that is: means over batches, percentiles over sections. Pure.

* A rate is measured in slices of a window, one after the other; its mean has the standard error of the slices' mean
  (batch means, Conway 1963). Four slices alone say little of how noisy they are, so what all settings showed counts in
  as so many more (moderated t, Smyth 2004).
* Each window may be off as a whole, since a machine has others to serve: by `DRIFT`, or by what windows of the same
  settings showed to lie between them.
* A percentile is taken over everything, and its standard error is that of the percentiles of the slices (sectioning,
  Asmussen and Glynn 2007, III.5): gaps of one step are as long for all who are in it, so their number says nothing.
* Intervals are Student's t, two-sided with `CONFIDENCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, stdev

CONFIDENCE = 0.95
DRIFT = 0.015
Slice = tuple[float, float]
"""A rate, and the seconds that it was measured for."""
PRIOR_FREEDOM = 8
"""As many slices, or windows, count as what is known of the noise before a setting's own."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where it lies with CONFIDENCE. low and high are 0 and infinity where that cannot be told."""

    value: float
    low: float = 0.0
    high: float = math.inf

    def __str__(self) -> str:
        return f"{self.value:g} ({self.low:g} to {self.high:g})"


@dataclass(frozen=True, slots=True)
class Noise:
    """What is known of the noise of rates, as shares of their means squared. second: of a second, None where nothing is
    known.  window: of a window as a whole."""

    second: float | None = None
    window: float = DRIFT**2


UNKNOWN = Noise()


def noise_of(settings: Iterable[Sequence[Sequence[Slice]]]) -> Noise:
    """Of all windows of all settings, each window as its slices: (rate, seconds)."""
    within, slices, between, again = 0.0, 0, 0.0, 0
    for windows in settings:
        means = [_mean(window) for window in windows]
        whole = _mean([each for window in windows for each in window])
        if not whole:
            continue
        for window, mean in zip(windows, means, strict=True):
            within += sum(((rate - mean) / whole) ** 2 * seconds for rate, seconds in window)
            slices += len(window) - 1
        between += sum((mean / whole - 1) ** 2 for mean in means)
        again += len(means) - 1
    second = within / slices if slices else None
    return Noise(second, (PRIOR_FREEDOM * DRIFT**2 + between) / (PRIOR_FREEDOM + again))


def rate_of(windows: Sequence[Sequence[Slice]], noise: Noise = UNKNOWN) -> Interval:
    """The mean of rates in these windows."""
    slices = [each for window in windows for each in window]
    mean, seconds = _mean(slices), sum(length for _, length in slices)
    own = sum((rate - mean) ** 2 * length for rate, length in slices)
    freedom = len(slices) - 1
    if noise.second is not None:
        own += PRIOR_FREEDOM * noise.second * mean**2
        freedom += PRIOR_FREEDOM
    if not freedom:
        return Interval(mean)
    variance = own / freedom / seconds + noise.window * mean**2 / len(windows)
    return _around(mean, math.sqrt(variance), freedom)


def _mean(slices: Sequence[Slice]) -> float:
    return sum(rate * seconds for rate, seconds in slices) / sum(seconds for _, seconds in slices)


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
