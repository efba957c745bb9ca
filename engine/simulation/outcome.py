"""The outcome of a simulation: the fate of each request, and the numbers of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from engine.metrics.distributions import QuantileSketch, percentiles
from engine.metrics.slo import Slo
from engine.simulation.demand import Ask

Fate = Literal["answered", "too long", "refused", "timeout", "failed"]
"""How a request ends: too long has a prompt that no worker holds, refused is one that found the queue full, failed one
whose workers died too often."""
Miss = Literal["too long", "refused", "timeout", "failed", "first token", "other tokens"]
"""Why a request does not count as served: its fate, or which half of the SLO its answer was too slow for."""


@dataclass(slots=True)
class Served:
    """One request as its client saw it; times are seconds of the simulation.

    admitted_s: when it was queued.  first_s, last_s: its first and last token.  lost: how often its worker died.
    tpot_s: mean seconds between its tokens, as its workers made them; None where there were not two.
    """

    ask: Ask
    fate: Fate | None = None
    admitted_s: float | None = None
    placed_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    lost: int = 0
    worker: int = -1
    tpot_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds until its first token; None where none came."""
        return None if self.first_s is None else self.first_s - self.ask.at_s

    @property
    def e2e_s(self) -> float:
        """Seconds until it ended."""
        return self.ended_s - self.ask.at_s

    def keeps(self, slo: Slo) -> bool:
        """Return whether it was answered within the SLO."""
        return self.misses(slo) is None

    def misses(self, slo: Slo) -> Miss | None:
        """Why it was not answered within the SLO, the first of several reasons; None where it was."""
        if self.fate != "answered":
            return self.fate or "failed"
        if slo.ttft_s is not None and (self.ttft_s is None or self.ttft_s > slo.ttft_s):
            return "first token"
        return "other tokens" if slo.itl_s is not None and (self.tpot_s or 0.0) > slo.itl_s else None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a simulation that counts: from since_s on, when it is in its steady state, until until_s, when
    arrivals end. Requests that came within it give latencies and shares; those that ended within it give rates."""

    since_s: float = 0.0
    until_s: float = math.inf


WHOLE = Window()
"""All of it."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of some seconds."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    most: float = 0.0
    _SHARES: ClassVar[tuple[float, ...]] = (0.50, 0.90, 0.95, 0.99, 1.0)

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Nearest ranks; nothing but zeros of no values."""
        samples = list(values)
        if not samples:
            return cls()
        return cls._ranked(math.fsum(samples) / len(samples), percentiles(samples, *cls._SHARES))

    @classmethod
    def of_sketch(cls, sketch: QuantileSketch) -> Percentiles:
        """The same of a sketch, within 1%."""
        if not sketch.count:
            return cls()
        return cls._ranked(sketch.sum / sketch.count, sketch.quantiles(*cls._SHARES))

    @classmethod
    def _ranked(cls, mean: float, ranked: Iterable[float | None]) -> Percentiles:
        p50, p90, p95, p99, most = (value or 0.0 for value in ranked)
        return cls(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, most=most)


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How it stands at a time: requests that wait for a worker, requests on workers, and how far the front end is
    behind."""

    at_s: float
    queued: int
    running: int
    behind_s: float


@dataclass(slots=True)
class Outcome:
    """All that a simulation found.

    seconds: until the last request ended.  window: what is counted.  utilisation: of each worker, the share of the
    window that it spent in steps.  front_busy: the same of the front end.  most_behind_s: how far that was behind at
    worst.
    area: sum over time of the requests that were admitted and not ended, in request seconds.
    """

    served: list[Served] = field(default_factory=list)
    gaps: QuantileSketch = field(default_factory=QuantileSketch)
    moments: list[Moment] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)
    seconds: float = 0.0
    window: Window = WHOLE
    front_busy: float = 0.0
    most_behind_s: float = 0.0
    preemptions: int = 0
    steps: int = 0
    area: float = 0.0

    @property
    def answered(self) -> list[Served]:
        """Requests that got their whole answer."""
        return [each for each in self.served if each.fate == "answered"]

    def summary(self, slo: Slo | None = None) -> Summary:
        """The numbers of the window, with goodput where an SLO is given."""
        since_s, until_s = self.window.since_s, min(self.window.until_s, self.seconds)
        seconds = max(until_s - since_s, 1e-9)
        asked = [each for each in self.served if since_s <= each.ask.at_s <= until_s]
        ended = [each for each in self.served if since_s <= each.ended_s <= until_s]
        answered = [each for each in asked if each.fate == "answered"]
        misses = Counter(each.misses(slo or Slo()) for each in asked)
        within = misses.pop(None, 0)
        last_s = max((each.ask.at_s for each in asked), default=since_s)
        return Summary(
            requests=len(asked),
            offered_per_s=len(asked) / max(min(self.window.until_s, last_s) - since_s, 1.0),
            misses={miss: count for miss, count in misses.most_common() if miss is not None},
            fates=dict(sorted(Counter(each.fate or "" for each in asked).items())),
            seconds=seconds,
            requests_per_s=sum(each.fate == "answered" for each in ended) / seconds,
            output_tokens_per_s=sum(each.output_tokens for each in ended) / seconds,
            ttft_s=Percentiles.of(each.ttft_s for each in asked if each.ttft_s is not None),
            tpot_s=Percentiles.of(each.tpot_s for each in asked if each.tpot_s is not None),
            itl_s=Percentiles.of_sketch(self.gaps),
            e2e_s=Percentiles.of(each.e2e_s for each in answered),
            kept_share=within / len(asked) if asked else 0.0,
            goodput_per_s=within / seconds,
            most_queued=max((each.queued for each in self.moments), default=0),
            preemptions=self.preemptions,
            busiest=max(self.utilisation, default=0.0),
            idlest=min(self.utilisation, default=0.0),
            utilisation=math.fsum(self.utilisation) / max(1, len(self.utilisation)),
            front_busy=self.front_busy,
            front_behind_s=self.most_behind_s,
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a simulation. itl_s: of times between tokens, as workers made them; tpot_s: of the requests' means.

    offered_per_s: requests that came each second.
    kept_share: of the requests, those answered within the SLO, all that were answered where there is none; 0 of none.
    misses: why the others do not count, the most frequent reason first.
    utilisation, busiest, idlest: of workers, the share of the time that they were in steps.
    """

    requests: int
    offered_per_s: float
    misses: dict[Miss, int]
    fates: dict[str, int]
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    kept_share: float
    goodput_per_s: float
    most_queued: int
    preemptions: int
    busiest: float
    idlest: float
    utilisation: float
    front_busy: float
    front_behind_s: float
