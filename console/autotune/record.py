"""What was measured of settings: slices of windows, pooled; whether a setting keeps the SLO. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal

import msgspec

from console.autotune.estimates import UNKNOWN, Interval, Noise, quantile_of, rate_of
from console.autotune.space import Setting

Verdict = Literal["kept", "broken", "unsure"]
_BRIEFEST_S = 0.1


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
    """One window of a setting under load. failed: why nothing was answered in it, "" where something was."""

    slices: tuple[Slice, ...]
    failed: str = ""

    @classmethod
    def of_failure(cls, reason: str, seconds: float) -> Sample:
        """A window that gave nothing: two empty slices, so that its rate is known to be none."""
        half = Slice(seconds=max(seconds, _BRIEFEST_S) / 2, tokens=0)
        return cls(slices=(half, half), failed=reason)

    @property
    def seconds(self) -> float:
        """How long it was."""
        return sum(each.seconds for each in self.slices)

    @property
    def rates(self) -> list[tuple[float, float]]:
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
        excess = max((found.value / limit for found, limit in limits if found is not None), default=0.0)
        failed = next((sample.failed for sample in samples if sample.failed), "")
        return cls(
            setting=setting,
            windows=len(samples),
            seconds=seconds,
            tokens_per_s=rate_of([each.rates for each in samples], noise),
            ttft_s=ttft,
            itl_s=itl,
            goodput_per_s=sum(each.kept for each in slices) / seconds,
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
