"""What was measured of settings: slices of windows, pooled; whether a setting keeps the SLO. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from console.autotune.estimates import UNKNOWN, Interval, Noise, quantile_of, rate_of
from console.autotune.space import Setting

Verdict = Literal["kept", "broken", "unsure"]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of latency: such a share of first tokens, and of gaps between tokens, come within these; None asks
    nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None
    share: float = 0.95


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a window. tokens: generated.  ttft_s, itl_s: of every first token and of every gap in it.

    judged, kept: requests that ended, and of these the ones that kept the SLO.
    """

    seconds: float
    tokens: int
    ttft_s: Sequence[float] = ()
    itl_s: Sequence[float] = ()
    judged: int = 0
    kept: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a setting under load."""

    slices: tuple[Slice, ...]

    @property
    def seconds(self) -> float:
        """How long it was."""
        return sum(each.seconds for each in self.slices)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Of each slice its tokens/s, and its seconds."""
        return [(each.tokens / each.seconds, each.seconds) for each in self.slices]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a setting. tokens_per_s: output.  kept: whether it keeps the SLO.

    excess: the worse of the two latencies, of what the SLO allows: up to 1 it is kept.
    goodput_per_s: requests that kept it.
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

    @property
    def keeps(self) -> bool:
        """Whether it seems to keep the SLO, be that sure or not."""
        return self.excess <= 1

    @property
    def value(self) -> float:
        """Throughput; what breaks the SLO counts for the less the further it is from keeping it."""
        return self.tokens_per_s.value / max(1.0, self.excess) ** 2

    @classmethod
    def of(cls, setting: Setting, samples: Sequence[Sample], slo: Slo, noise: Noise = UNKNOWN) -> Record:
        """Pool the windows of a setting; one at least, with a slice in it. noise: what is known of it from others."""
        slices = [each for sample in samples for each in sample.slices]
        seconds = sum(each.seconds for each in slices)
        ttft = quantile_of([each.ttft_s for each in slices], slo.share)
        itl = quantile_of([each.itl_s for each in slices], slo.share)
        asked = [(ttft, slo.ttft_s), (itl, slo.itl_s)]
        limits = [(found, limit) for found, limit in asked if limit is not None]
        return cls(
            setting=setting,
            windows=len(samples),
            seconds=seconds,
            tokens_per_s=rate_of([each.rates for each in samples], noise),
            ttft_s=ttft,
            itl_s=itl,
            goodput_per_s=sum(each.kept for each in slices) / seconds,
            verdict=_verdict(limits),
            excess=max((found.value / limit for found, limit in limits if found is not None), default=0.0),
        )


def _verdict(limits: Iterable[tuple[Interval | None, float]]) -> Verdict:
    found = [
        "unsure" if each is None else "broken" if each.low > limit else "kept" if each.high <= limit else "unsure"
        for each, limit in limits
    ]
    return "broken" if "broken" in found else "unsure" if "unsure" in found else "kept"


def pareto(records: Iterable[Record]) -> list[Record]:
    """Those that none beats in both throughput and ITL, the fastest first."""
    front: list[Record] = []
    for record in sorted(records, key=lambda each: (-each.tokens_per_s.value, _latency(each))):
        if not front or _latency(record) < _latency(front[-1]):
            front.append(record)
    return front


def _latency(record: Record) -> float:
    return record.itl_s.value if record.itl_s is not None else float("inf")
