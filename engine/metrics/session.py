"""Where time and tokens go, over a session: pure accumulators that are told the time, with O(1) work per call.

They are told of requests when these end and of steps when workers report them, never of single tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from engine.backends.base import BackendStats, DraftPosition
from engine.metrics.meter import WINDOW_S, Ended, Rate, draft_increase
from engine.snapshot import Goodput, Insight, Lengths, Session, Spread

LENGTH_BOUNDS = tuple(2**power for power in range(4, 18))
RELATIVE_ERROR = 0.01
_SMALLEST = 1e-6
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_MAX_GAPS = 256


class Quantiles:
    """Quantiles of any number of measurements in little room: DDSketch (Masson, Rim and Lee 2019).

    A measurement is counted in a bucket that ends `RELATIVE_ERROR` of it away on either side; those below a millionth
    count as 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Counter[int] = Counter()
        self._zeros = 0
        self._sum, self._least, self._longest = 0.0, math.inf, 0.0

    def add(self, value: float) -> None:
        """Count one measurement, 0 or more."""
        self.count += 1
        self._sum += value
        self._least, self._longest = min(self._least, value), max(self._longest, value)
        if value < _SMALLEST:
            self._zeros += 1
        else:
            self._buckets[math.ceil(math.log(value) / _LOG_GAMMA)] += 1

    def freeze(self) -> Spread:
        """What is known of them."""
        if not self.count:
            return Spread()
        p50, p90, p99 = self._at((0.50, 0.90, 0.99))
        return Spread(count=self.count, mean=self._sum / self.count, p50=p50, p90=p90, p99=p99, longest=self._longest)

    def _at(self, shares: Sequence[float]) -> list[float]:
        """The values that these ascending shares of the measurements do not exceed (nearest rank)."""
        found: list[float] = []
        ascending = iter([(None, self._zeros), *sorted(self._buckets.items())])
        bucket, passed = next(ascending)
        for share in shares:
            rank = math.ceil(share * self.count)
            while passed < rank:
                bucket, inside = next(ascending)
                passed += inside
            middle = 0.0 if bucket is None else 2 * _GAMMA**bucket / (_GAMMA + 1)
            found.append(min(self._longest, max(self._least, middle)))
        return found


class LengthCounter:
    """A distribution of lengths in tokens."""

    def __init__(self) -> None:
        self._spread = Quantiles()
        self._counts = [0] * (len(LENGTH_BOUNDS) + 1)

    def add(self, tokens: int) -> None:
        """Count one length."""
        self._spread.add(tokens)
        self._counts[bisect_left(LENGTH_BOUNDS, tokens)] += 1

    def freeze(self) -> Lengths:
        """All that were counted."""
        return Lengths(spread=self._spread.freeze(), bounds=LENGTH_BOUNDS, counts=tuple(self._counts))


class BusyClock:
    """How long at least one of several workers computed. Steps are counted in whatever order they are reported: what
    lay idle between those that are known is remembered for others that fill it."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._until = -math.inf
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MAX_GAPS)

    def worked(self, began: float, ended: float) -> None:
        """A worker computed from `began` to `ended`."""
        idle: list[tuple[float, float]] = []
        while self._gaps and self._gaps[-1][1] > began:
            idle_from, idle_until = self._gaps.pop()
            filled_from, filled_until = max(idle_from, began), min(idle_until, ended)
            if filled_from >= filled_until:
                idle.append((idle_from, idle_until))
                continue
            self.busy_s += filled_until - filled_from
            if filled_until < idle_until:
                idle.append((filled_until, idle_until))
            if idle_from < filled_from:
                idle.append((idle_from, filled_from))
        self._gaps.extend(reversed(idle))
        if began > self._until:
            self._gaps.append((self._until, began))
        if ended > self._until:
            self.busy_s += ended - max(began, self._until)
            self._until = ended


@dataclass(frozen=True, slots=True)
class Slo:
    """What answers are held to, in seconds; None is not asked for."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def kept(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whether a whole answer kept it; one of a single token has no time between tokens."""
        in_time = self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s)
        return in_time and (self.itl_s is None or itl_s is None or itl_s <= self.itl_s)


@dataclass(slots=True)
class _Counts:
    """What a reset forgets."""

    since: float
    started: float
    queue: Quantiles = field(default_factory=Quantiles)
    prefill: Quantiles = field(default_factory=Quantiles)
    decode: Quantiles = field(default_factory=Quantiles)
    prompts: LengthCounter = field(default_factory=LengthCounter)
    outputs: LengthCounter = field(default_factory=LengthCounter)
    longest_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    kept: int = 0
    kept_rate: Rate = field(default_factory=lambda: Rate(WINDOW_S))
    drafts: tuple[DraftPosition, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    sequence_steps: int = 0
    busy_before_s: float = 0.0


class SessionCounter:
    """The session. Times are seconds of one monotonic clock, `at` is unix time."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo or Slo()
        self._busy = BusyClock()
        self._counts = _Counts(since=0.0, started=0.0)

    def reset(self, now: float, at: float) -> None:
        """Count anew from now on."""
        self._counts = _Counts(since=at, started=now, busy_before_s=self._busy.busy_s)

    def hold_to(self, slo: Slo) -> None:
        """Judge by another SLO from now on; what was judged by the old one is forgotten."""
        if slo != self._slo:
            self._slo = slo
            self._counts.judged = self._counts.kept = 0
            self._counts.kept_rate = Rate(WINDOW_S)

    @property
    def busy_s(self) -> float:
        """Seconds in which a worker computed since the engine started: no reset touches it."""
        return self._busy.busy_s

    def ended(self, now: float, request: Ended) -> None:
        """A request ended, in whatever way."""
        counts = self._counts
        counts.finished[request.reason] += 1
        counts.longest_tokens = max(counts.longest_tokens, request.prompt_tokens + request.output_tokens)
        if request.reason != "cancelled" and not request.answerless:
            counts.judged += 1
            if request.whole and self._slo.kept(request.ttft_s, request.itl_s):
                counts.kept += 1
                counts.kept_rate.add(now)
        if not request.whole:
            return
        counts.prompts.add(request.prompt_tokens)
        if not request.answerless:
            counts.outputs.add(request.output_tokens)
        for phase, spent_s in (
            (counts.queue, request.queue_s),
            (counts.prefill, request.prefill_s),
            (counts.decode, request.decode_s),
        ):
            if spent_s is not None:
                phase.add(spent_s)

    def stepped(
        self, now: float, *, steps: int, step_s: float, sequences: int, stats: BackendStats, before: BackendStats
    ) -> None:
        """A worker did `steps` of `step_s` each with `sequences` requests, the last of which ended at `now`; stats are
        those after them and before."""
        if steps < 1:
            return
        counts = self._counts
        self._busy.worked(now - steps * step_s, now)
        counts.steps += steps
        counts.sequence_steps += steps * sequences
        counts.prompt_tokens += max(0, stats.prompt_tokens_computed - before.prompt_tokens_computed)
        if stats.drafts != before.drafts:
            counts.drafts = _summed(counts.drafts, draft_increase(stats, before))

    def produced(self, tokens: int) -> None:
        """So many output tokens came."""
        self._counts.output_tokens += tokens

    def freeze(self, now: float) -> Insight:
        """All of it; what devices tell is left for others to add."""
        counts = self._counts
        return Insight(
            session=Session(
                since=counts.since,
                elapsed_s=now - counts.started,
                busy_s=self._busy.busy_s - counts.busy_before_s,
                requests=counts.finished.total(),
                output_tokens=counts.output_tokens,
                prompt_tokens=counts.prompt_tokens,
                steps=counts.steps,
                batch=counts.sequence_steps / counts.steps if counts.steps else None,
            ),
            queue=counts.queue.freeze(),
            prefill=counts.prefill.freeze(),
            decode=counts.decode.freeze(),
            prompts=counts.prompts.freeze(),
            outputs=counts.outputs.freeze(),
            longest_context_tokens=counts.longest_tokens,
            finished=dict(counts.finished),
            goodput=Goodput(
                slo_ttft_s=self._slo.ttft_s,
                slo_itl_s=self._slo.itl_s,
                judged=counts.judged,
                kept=counts.kept,
                per_s=counts.kept_rate.events(now) / max(1.0, min(WINDOW_S, now - counts.started)),
            ),
            drafts=counts.drafts,
        )


def _summed(drafts: Sequence[DraftPosition], more: Sequence[DraftPosition]) -> tuple[DraftPosition, ...]:
    return tuple(
        DraftPosition(guessed=one.guessed + other.guessed, held=one.held + other.held)
        for one, other in zip_longest(drafts, more, fillvalue=DraftPosition())
    )
