"""Counters, recent percentiles and one-second history over all models. Pure: every method is told the time.

What /metrics tells of each model is counted in `engine.usage`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate

import msgspec

from engine.backends.base import FinishReason
from engine.snapshot import Mark, Percentiles, Second, Totals
from engine.usage import E2E, ITL, TTFT, ModelUsage, UsageMeter

HISTORY_SECONDS = 600
WINDOW_S = 60.0
RATE_WINDOW_S = 4.0
_MAX_SAMPLES = 4096
_MAX_MARKS = 100


class Rate:
    """Events per second over the last `window_s`; a rate that began less than a window ago is not diluted."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, now: float, count: int = 1) -> None:
        """`count` events happened at `now`."""
        self._prune(now)
        self._events.append((now, count))
        self._total += count

    def events(self, now: float) -> int:
        """How many there were in the window."""
        self._prune(now)
        return self._total

    def per_second(self, now: float) -> float:
        """The rate at `now`."""
        self._prune(now)
        if not self._events:
            return 0.0
        return self._total / max(1.0, min(self._window_s, now - self._events[0][0]))

    def _prune(self, now: float) -> None:
        while self._events and self._events[0][0] < now - self._window_s:
            self._total -= self._events.popleft()[1]


class Window:
    """The samples of the last `window_s` seconds (of the newest few thousand that differ at most)."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now: float, value: float, times: int = 1) -> None:
        """Take a sample, `times` times."""
        self._samples.append((now, value, times))

    def percentiles(self, now: float) -> Percentiles:
        """p50, p95 and p99 of the samples still in the window."""
        while self._samples and self._samples[0][0] < now - self._window_s:
            self._samples.popleft()
        counts: Counter[float] = Counter()
        for _, value, times in self._samples:
            counts[value] += times
        p50, p95, p99 = percentiles(counts, 0.50, 0.95, 0.99)
        return Percentiles(p50=p50, p95=p95, p99=p99)


def percentiles(counts: Mapping[float, int], *shares: float) -> list[float | None]:
    """The values that these shares of the samples do not exceed (nearest rank); None each for no samples.

    counts: how often each value was sampled.
    """
    if not counts:
        return [None] * len(shares)
    values = sorted(counts)
    ranks = list(accumulate(counts[value] for value in values))
    return [values[bisect_left(ranks, max(1, math.ceil(share * ranks[-1])))] for share in shares]


class Metrics:
    """Everything that is counted. Times are seconds of one monotonic clock, except where `at` says unix time."""

    def __init__(self) -> None:
        self.output_rate = Rate()
        self.prompt_rate = Rate()
        self.finish_rate = Rate(WINDOW_S)
        self.windows = {name: Window() for name in (TTFT, ITL, E2E)}
        self.recent = {name: Percentiles() for name in (TTFT, ITL, E2E)}
        self.history: tuple[Second, ...] = ()
        self._marks: deque[Mark] = deque(maxlen=_MAX_MARKS)
        self._meters: dict[str, UsageMeter] = {}
        self._finished: dict[str, int] = {}
        self._counts = dict.fromkeys((name for name in Totals.__struct_fields__ if name != "finished"), 0)
        self._second_tokens = {"prompt_tokens": 0, "output_tokens": 0}
        self._second_samples: dict[str, Counter[float]] = {TTFT: Counter(), ITL: Counter()}

    def meter(self, model: str) -> UsageMeter:
        """What counts for all models of that name, the same each time."""
        return self._meters.setdefault(model, UsageMeter(model))

    # -- what happens -------------------------------------------------------------------------------------------

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter of Totals of that name."""
        self._counts[name] += amount

    def started(self, now: float, prompt_tokens: int, cached_tokens: int, ttft_s: float | None) -> None:
        """A request's prompt is computed. ttft_s: None where no token is to come of it."""
        self.count("prompt_tokens", prompt_tokens)
        self.count("cached_tokens", cached_tokens)
        self._second_tokens["prompt_tokens"] += prompt_tokens
        self.prompt_rate.add(now, prompt_tokens)
        if ttft_s is not None:
            self._sample(TTFT, now, ttft_s)

    def produced(self, now: float, tokens: int) -> None:
        """`tokens` output tokens came."""
        self.count("output_tokens", tokens)
        self._second_tokens["output_tokens"] += tokens
        self.output_rate.add(now, tokens)

    def gap(self, now: float, seconds: float, times: int = 1) -> None:
        """That many tokens came `seconds` after the one before."""
        self._sample(ITL, now, seconds, times)

    def finished(self, now: float, reason: FinishReason, e2e_s: float) -> None:
        """A request ended. Only whole answers count into latencies: one that was cut short says nothing of speed."""
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self.finish_rate.add(now)
        if reason in ("stop", "length"):
            self.windows[E2E].add(now, e2e_s)

    def mark(
        self,
        at: float,
        text: str,
        *,
        knob: str = "",
        before: float | None = None,
        after: float | None = None,
        model: str = "",
    ) -> None:
        """Remember what an operator did; see Mark."""
        self._marks.append(Mark(at=at, text=text, knob=knob, before=before, after=after, model=model))

    def settle(self, model: str, at: float) -> None:
        """The workers of a model are as its knobs ask for."""
        for index, mark in enumerate(self._marks):
            if mark.knob and mark.model == model and mark.settled_at is None:
                self._marks[index] = msgspec.structs.replace(mark, settled_at=at)

    def _sample(self, name: str, now: float, value: float, times: int = 1) -> None:
        self.windows[name].add(now, value, times)
        self._second_samples[name][value] += times

    # -- what is shown ------------------------------------------------------------------------------------------

    def tick(
        self,
        now: float,
        at: float,
        *,
        running: int,
        queued: int,
        kv_usage: float,
        device_utilisation: tuple[float | None, ...],
        device_memory: tuple[float, ...] = (),
    ) -> None:
        """Close the second that ends now: add it to the history and bring the percentiles up to date."""
        ttft_p50, ttft_p95 = percentiles(self._second_samples[TTFT], 0.50, 0.95)
        itl_p50, itl_p95 = percentiles(self._second_samples[ITL], 0.50, 0.95)
        second = Second(
            at=at,
            output_tokens=self._second_tokens["output_tokens"],
            prompt_tokens=self._second_tokens["prompt_tokens"],
            running=running,
            queued=queued,
            kv_usage=kv_usage,
            device_utilisation=device_utilisation,
            device_memory=device_memory,
            ttft_p50=ttft_p50,
            ttft_p95=ttft_p95,
            itl_p50=itl_p50,
            itl_p95=itl_p95,
        )
        self.history = (*self.history[-(HISTORY_SECONDS - 1) :], second)
        self.recent = {name: window.percentiles(now) for name, window in self.windows.items()}
        self._second_tokens = dict.fromkeys(self._second_tokens, 0)
        self._second_samples = {name: Counter() for name in self._second_samples}

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What operators did, oldest first."""
        return tuple(self._marks)

    def totals(self) -> Totals:
        """The counters now."""
        return Totals(finished=dict(self._finished), **self._counts)

    def usage(self) -> tuple[ModelUsage, ...]:
        """Each model's numbers."""
        return tuple(meter.freeze() for meter in self._meters.values())
