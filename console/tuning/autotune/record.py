"""Measurements of settings: slices of windows, pooled, and the verdict on the SLO. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import stdev
from typing import Literal

import msgspec

from console.tuning.autotune.space import Setting
from engine.metrics.distributions import percentiles
from engine.metrics.slo import Slo

# A rate is measured in slices of a window; its mean has the standard error of the slices' mean (batch means), and that
# of whole windows, since a machine has others to serve. A percentile is taken over everything, with the standard error
# of the percentiles of the slices: gaps of one step are as long for all who are in it, so their number says little.

DRIFT = 0.015
"""Of its mean, what a window may be off as a whole."""
RateSlice = tuple[float, float]
"""A rate, and the seconds that it was measured for."""
_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where it lies with 95% confidence. low and high are 0 and infinity where that is unknown."""

    value: float
    low: float = 0.0
    high: float = inf

    def __str__(self) -> str:
        return f"{self.value:g} ({self.low:g} to {self.high:g})"

    @classmethod
    def around(cls, value: float, error: float, freedom: int) -> Interval:
        """From a standard error and its degrees of freedom."""
        half = student_t(freedom) * error
        return cls(value, max(0.0, value - half), value + half)


def student_t(freedom: int) -> float:
    """Return Student's t for a two-sided interval of 95%, to a hundredth."""
    return _STUDENT_T[freedom - 1] if freedom <= len(_STUDENT_T) else 1.96 + 2.7 / freedom


def rate_of(windows: Sequence[Sequence[RateSlice]]) -> Interval:
    """The mean of rates in these windows."""
    slices = [each for window in windows for each in window]
    seconds = sum(length for _, length in slices)
    mean = sum(rate * length for rate, length in slices) / seconds
    freedom = len(slices) - 1
    if not freedom:
        return Interval(mean)
    own = sum((rate - mean) ** 2 * length for rate, length in slices) / freedom / seconds
    return Interval.around(mean, math.sqrt(own + (DRIFT * mean) ** 2 / len(windows)), freedom)


def quantile_of(sections: Sequence[Sequence[float]], share: float) -> Interval | None:
    """The value that `share` of all do not exceed; None where there are none."""
    (value,) = percentiles(itertools.chain.from_iterable(sections), share, interpolate=True)
    if value is None:
        return None
    found = [percentiles(section, share, interpolate=True)[0] for section in sections]
    by_section = [each for each in found if each is not None]
    if len(by_section) < 2:
        return Interval(value)
    return Interval.around(value, stdev(by_section) / math.sqrt(len(by_section)), len(by_section) - 1)


Verdict = Literal["kept", "broken", "unsure"]
_BRIEFEST_S = 0.1


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a window. tokens: generated.  ttft_s, itl_s: of every first token and of every gap in it.

    judged, met_slo: requests that ended, and of these the ones that met the SLO.
    """

    seconds: float
    tokens: int
    ttft_s: Sequence[float] = ()
    itl_s: Sequence[float] = ()
    judged: int = 0
    met_slo: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a setting under load. failed: why nothing was answered in it, "" where something was."""

    slices: tuple[Slice, ...]
    failed: str = ""

    @classmethod
    def of_failure(cls, reason: str, seconds: float) -> Sample:
        """A window that gave nothing: two empty slices, so that its rate is known to be none."""
        half = Slice(seconds=max(seconds, _BRIEFEST_S) / 2, tokens=0)
        return cls(slices=(half, half), failed=reason)

    @property
    def rates(self) -> list[RateSlice]:
        """Of each slice its tokens/s, and its seconds."""
        return [(each.tokens / each.seconds, each.seconds) for each in self.slices]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a setting. tokens_per_s: output.  verdict: whether it keeps the SLO.

    excess: the worse of the two latencies, of what the SLO allows: up to 1 it is kept, infinite where a window failed.
    goodput_per_s: requests that kept it.  failed: why a window of it gave nothing.
    """

    setting: Setting
    windows: int
    seconds: float
    tokens_per_s: Interval
    ttft_s: Interval | None
    itl_s: Interval | None
    goodput_per_s: float
    verdict: Verdict
    excess: float
    failed: str = ""

    @property
    def keeps(self) -> bool:
        """Return whether it seems to keep the SLO, sure or not."""
        return self.excess <= 1

    @property
    def value(self) -> float:
        """Throughput; what breaks the SLO counts for the less the further it is from keeping it."""
        return self.tokens_per_s.value / max(1.0, self.excess) ** 2

    @classmethod
    def of(cls, setting: Setting, samples: Sequence[Sample], slo: Slo) -> Record:
        """Pool the windows of a setting; one at least, with a slice in it."""
        slices = [each for sample in samples for each in sample.slices]
        seconds = sum(each.seconds for each in slices)
        ttft = quantile_of([each.ttft_s for each in slices], slo.share)
        itl = quantile_of([each.itl_s for each in slices], slo.share)
        asked = [(ttft, slo.ttft_s), (itl, slo.itl_s)]
        limits = [(found, limit) for found, limit in asked if limit is not None]
        excess = max((found.value / limit for found, limit in limits if found is not None), default=0.0)
        failed = next((sample.failed for sample in samples if sample.failed), "")
        return cls(
            setting=setting,
            windows=len(samples),
            seconds=seconds,
            tokens_per_s=rate_of([each.rates for each in samples]),
            ttft_s=ttft,
            itl_s=itl,
            goodput_per_s=sum(each.met_slo for each in slices) / seconds,
            verdict="broken" if failed else _verdict(limits),
            excess=inf if failed else excess,
            failed=failed,
        )


def _verdict(limits: Iterable[tuple[Interval | None, float]]) -> Verdict:
    found = [
        "unsure" if each is None else "broken" if each.low > limit else "kept" if each.high <= limit else "unsure"
        for each, limit in limits
    ]
    return "broken" if "broken" in found else "unsure" if "unsure" in found else "kept"


def pareto(records: Iterable[Record], slo: Slo) -> list[Record]:
    """Those that none beats in throughput and in the latencies that the SLO is about, both where it asks for none; the
    fastest first. What failed is none of them."""
    answered = sorted(
        (record for record in records if not record.failed),
        key=lambda each: (-each.tokens_per_s.value, _latencies(each, slo)),
    )
    front: list[Record] = []
    for record in answered:
        own = _latencies(record, slo)
        if not any(_no_longer(_latencies(faster, slo), own) for faster in front):
            front.append(record)
    return front


def _latencies(record: Record, slo: Slo) -> list[float]:
    both = ((record.ttft_s, slo.ttft_s), (record.itl_s, slo.itl_s))
    asked = [found for found, limit in both if limit is not None] or [found for found, _ in both]
    return [found.value if found is not None else inf for found in asked]


def _no_longer(these: Iterable[float], those: Iterable[float]) -> bool:
    return all(this <= that for this, that in zip(these, those, strict=True))
