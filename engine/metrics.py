"""Counters, cumulative histograms, recent percentiles and one-second history. Pure: every method is told the time.

Bucket bounds are those of vLLM's metrics of the same names, so that dashboards made for it read right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, repeat

import msgspec

from engine.backends.base import FinishReason
from engine.snapshot import Histogram, Mark, Percentiles, Second, Totals

HISTORY_SECONDS = 600
WINDOW_S = 60.0
RATE_WINDOW_S = 4.0
_MAX_SAMPLES = 4096
_MAX_MARKS = 100

# fmt: off
TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0)
LATENCY_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                    480.0, 960.0, 1920.0, 7680.0)
# fmt: on
TOKEN_BOUNDS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE_TIME = "request_queue_time_seconds"
PREFILL_TIME = "request_prefill_time_seconds"
DECODE_TIME = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
OUTPUT_TOKENS = "request_generation_tokens"

_BOUNDS = {
    TTFT: TTFT_BOUNDS_S,
    ITL: ITL_BOUNDS_S,
    E2E: LATENCY_BOUNDS_S,
    QUEUE_TIME: LATENCY_BOUNDS_S,
    PREFILL_TIME: LATENCY_BOUNDS_S,
    DECODE_TIME: LATENCY_BOUNDS_S,
    PROMPT_TOKENS: TOKEN_BOUNDS,
    OUTPUT_TOKENS: TOKEN_BOUNDS,
}


class HistogramCounter:
    """Counts observations by bucket; an observation equal to a bound belongs to that bound's bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self._buckets[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def freeze(self) -> Histogram:
        """The cumulative histogram."""
        cumulative = tuple(accumulate(self._buckets))
        return Histogram(bounds=self._bounds, counts=cumulative[:-1], count=cumulative[-1], sum=self._sum)


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
    """The samples of the last `window_s` seconds (of the newest few thousand at most)."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now: float, value: float, times: int = 1) -> None:
        """Take a sample, `times` times."""
        self._samples.extend(repeat((now, value), times))

    def percentiles(self, now: float) -> Percentiles:
        """p50, p95 and p99 of the samples still in the window."""
        while self._samples and self._samples[0][0] < now - self._window_s:
            self._samples.popleft()
        ordered = sorted(value for _, value in self._samples)
        return Percentiles(p50=percentile(ordered, 0.50), p95=percentile(ordered, 0.95), p99=percentile(ordered, 0.99))


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value that `share` of the sorted samples do not exceed (nearest rank); None for no samples."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


class Metrics:
    """Everything that is counted. Times are seconds of one monotonic clock, except where `at` says unix time."""

    def __init__(self) -> None:
        self.histograms = {name: HistogramCounter(bounds) for name, bounds in _BOUNDS.items()}
        self.output_rate = Rate()
        self.prompt_rate = Rate()
        self.finish_rate = Rate(WINDOW_S)
        self.windows = {name: Window() for name in (TTFT, ITL, E2E)}
        self.recent = {name: Percentiles() for name in (TTFT, ITL, E2E)}
        self.history: tuple[Second, ...] = ()
        self._marks: deque[Mark] = deque(maxlen=_MAX_MARKS)
        self._finished: dict[str, int] = {}
        self._counts = dict.fromkeys((name for name in Totals.__struct_fields__ if name != "finished"), 0)
        self._second_tokens = {"prompt_tokens": 0, "output_tokens": 0}
        self._second_samples: dict[str, list[float]] = {TTFT: [], ITL: []}

    # -- what happens -------------------------------------------------------------------------------------------

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter of Totals of that name."""
        self._counts[name] += amount

    def started(self, now: float, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None:
        """A request's first token came: its prompt is computed."""
        self.count("prompt_tokens", prompt_tokens)
        self.count("cached_tokens", cached_tokens)
        self._second_tokens["prompt_tokens"] += prompt_tokens
        self.prompt_rate.add(now, prompt_tokens)
        self.histograms[PROMPT_TOKENS].observe(prompt_tokens)
        self._sample(TTFT, now, ttft_s)

    def produced(self, now: float, tokens: int) -> None:
        """`tokens` output tokens came."""
        self.count("output_tokens", tokens)
        self._second_tokens["output_tokens"] += tokens
        self.output_rate.add(now, tokens)

    def gap(self, now: float, seconds: float, tokens: int, requests: int = 1) -> None:
        """For each of `requests` requests, `tokens` tokens came `seconds` after those before, all at once."""
        self._sample(ITL, now, seconds / tokens, tokens=tokens, requests=requests)

    def dispatched(self, queued_s: float) -> None:
        """A worker took a request for the first time."""
        self.histograms[QUEUE_TIME].observe(queued_s)

    def finished(
        self,
        now: float,
        reason: FinishReason,
        e2e_s: float,
        output_tokens: int,
        *,
        prefill_s: float | None = None,
        decode_s: float | None = None,
    ) -> None:
        """A request ended. Only whole answers count into latencies: one that was cut short says nothing of speed."""
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self.finish_rate.add(now)
        if reason not in ("stop", "length"):
            return
        self.windows[E2E].add(now, e2e_s)
        self.histograms[E2E].observe(e2e_s)
        self.histograms[OUTPUT_TOKENS].observe(output_tokens)
        for name, spent_s in ((PREFILL_TIME, prefill_s), (DECODE_TIME, decode_s)):
            if spent_s is not None:
                self.histograms[name].observe(spent_s)

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

    def _sample(self, name: str, now: float, value: float, *, tokens: int = 1, requests: int = 1) -> None:
        self.histograms[name].observe(value, tokens * requests)
        self.windows[name].add(now, value, requests)
        self._second_samples[name].extend(repeat(value, requests))

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
        ttft = sorted(self._second_samples[TTFT])
        itl = sorted(self._second_samples[ITL])
        second = Second(
            at=at,
            output_tokens=self._second_tokens["output_tokens"],
            prompt_tokens=self._second_tokens["prompt_tokens"],
            running=running,
            queued=queued,
            kv_usage=kv_usage,
            device_utilisation=device_utilisation,
            device_memory=device_memory,
            ttft_p50=percentile(ttft, 0.50),
            ttft_p95=percentile(ttft, 0.95),
            itl_p50=percentile(itl, 0.50),
            itl_p95=percentile(itl, 0.95),
        )
        self.history = (*self.history[-(HISTORY_SECONDS - 1) :], second)
        self.recent = {name: window.percentiles(now) for name, window in self.windows.items()}
        self._second_tokens = dict.fromkeys(self._second_tokens, 0)
        self._second_samples = {name: [] for name in self._second_samples}

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What operators did, oldest first."""
        return tuple(self._marks)

    def totals(self) -> Totals:
        """The counters now."""
        return Totals(finished=dict(self._finished), **self._counts)

    def freeze_histograms(self) -> dict[str, Histogram]:
        """All histograms by metric name."""
        return {name: histogram.freeze() for name, histogram in self.histograms.items()}
