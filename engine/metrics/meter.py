"""Counters, recent percentiles and one-second history over all models. Pure: every method is told the time.

What /metrics tells of each model is counted in `engine.metrics.meter`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import msgspec

from engine.backends.base import BackendStats, DraftPosition, FinishReason
from engine.snapshot import Histogram, Mark, Percentiles, Second, Totals

# What each model was used for since the engine started, as /metrics tells it: counters and cumulative histograms.
#
# Pure. Names and bucket bounds are those of vLLM's metrics, so that dashboards made for it read right. The numbers of a
# model go on where it is replaced by itself, loaded again or has lost a worker.

# fmt: off
TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_TIME_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                       40.0, 80.0)
LATENCY_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                    480.0, 960.0, 1920.0, 7680.0)
# fmt: on
STEP_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BOUNDS = tuple(float(step * 10**power) for power in range(8) for step in (1, 2, 5))
"""Told up to the model's longest context, as vLLM does."""

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
REQUEST_ITL = "request_time_per_output_token_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE_TIME = "request_queue_time_seconds"
INFERENCE_TIME = "request_inference_time_seconds"
PREFILL_TIME = "request_prefill_time_seconds"
DECODE_TIME = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
COMPUTED_TOKENS = "request_prefill_kv_computed_tokens"
OUTPUT_TOKENS = "request_generation_tokens"
LONGEST_OUTPUT = "request_max_num_generation_tokens"
MAX_TOKENS = "request_params_max_tokens"
CHOICES = "request_params_n"
STEP_TOKENS = "iteration_tokens_total"

_HISTOGRAM_BOUNDS = {
    TTFT: TTFT_BOUNDS_S,
    ITL: TOKEN_TIME_BOUNDS_S,
    REQUEST_ITL: TOKEN_TIME_BOUNDS_S,
    E2E: LATENCY_BOUNDS_S,
    QUEUE_TIME: LATENCY_BOUNDS_S,
    INFERENCE_TIME: LATENCY_BOUNDS_S,
    PREFILL_TIME: LATENCY_BOUNDS_S,
    DECODE_TIME: LATENCY_BOUNDS_S,
    PROMPT_TOKENS: TOKEN_BOUNDS,
    COMPUTED_TOKENS: TOKEN_BOUNDS,
    OUTPUT_TOKENS: TOKEN_BOUNDS,
    LONGEST_OUTPUT: TOKEN_BOUNDS,
    MAX_TOKENS: TOKEN_BOUNDS,
    CHOICES: CHOICES_BOUNDS,
    STEP_TOKENS: STEP_BOUNDS,
}


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of all models of one name. They only grow.

    computed_tokens, cached_tokens: of prompts, what was computed and what the prefix cache had.
    drafts: how often tokens were guessed ahead, None where the backend does not tell.  held_by_position: guesses that
    held, by how far ahead they were.  finished: requests by finish reason.  histograms: by metric name.
    """

    name: str
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    drafts: int | None = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    held_by_position: tuple[int, ...] = ()
    finished: dict[str, int] = {}
    histograms: dict[str, Histogram] = {}


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended. queue_s: until a worker first took it.  prefill_s: from there to its first token.
    decode_s: from there to its last one.  itl_s: its mean; each is None where it did not come so far.

    choices: answers to its prompt that were asked for together.  longest: tokens of the longest of them, told with the
    one that ended last, None with the others.
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float = 0.0
    cached_tokens: int = 0
    max_tokens: int = 0
    choices: int = 1
    longest: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is an answer that was not cut short: others say nothing of speed and length."""
        return self.reason in ("stop", "length")

    @property
    def answerless(self) -> bool:
        """Whether nothing but its prompt was to be computed: it says nothing of answers."""
        return self.whole and not self.output_tokens


class Choices:
    """Answers to one prompt that were asked for together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._left = count
        self._longest = 0

    def ended(self, output_tokens: int) -> int | None:
        """One of them ended; the tokens of the longest where it was the last, else None."""
        self._left -= 1
        self._longest = max(self._longest, output_tokens)
        return None if self._left else self._longest


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

    def freeze(self, most: float = 0.0) -> Histogram:
        """The cumulative histogram, with bounds up to `most` where that is given."""
        cumulative = tuple(accumulate(self._buckets))
        told = sum(bound <= most for bound in self._bounds) if most else len(self._bounds)
        return Histogram(bounds=self._bounds[:told], counts=cumulative[:told], count=cumulative[-1], sum=self._sum)


class UsageMeter:
    """Counts for all models of one name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._longest_context = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._held: tuple[int, ...] = ()
        self._histograms = {name: HistogramCounter(bounds) for name, bounds in _HISTOGRAM_BOUNDS.items()}

    def loaded(self, max_model_len: int) -> None:
        """A model of this name takes so many tokens, prompt and answer."""
        self._longest_context = max(self._longest_context, max_model_len)

    def dispatched(self, queued_s: float) -> None:
        """A worker took a request for the first time."""
        self._histograms[QUEUE_TIME].observe(queued_s)

    def started(self, prompt_tokens: int, cached_tokens: int, ttft_s: float | None) -> None:
        """A request's prompt is computed. ttft_s: None where no token is to come of it."""
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_tokens"] += cached_tokens
        self._counts["computed_tokens"] += max(0, prompt_tokens - cached_tokens)
        if ttft_s is not None:
            self._histograms[TTFT].observe(ttft_s)

    def gap(self, seconds: float, times: int = 1) -> None:
        """That many tokens came `seconds` after the one before."""
        self._histograms[ITL].observe(seconds, times)

    def stepped(self, steps: int, output_tokens: int, stats: BackendStats, before: BackendStats) -> None:
        """A worker did `steps`, which brought so many tokens; stats are those after them and before."""
        self._counts["output_tokens"] += output_tokens
        for name in ("preemptions", "prefix_query_tokens", "prefix_hit_tokens", "draft_tokens", "draft_accepted"):
            if grown := getattr(stats, name) - getattr(before, name):
                self._counts[name] += max(0, grown)
        if steps > 0:
            computed = max(0, stats.prompt_tokens_computed - before.prompt_tokens_computed)
            self._histograms[STEP_TOKENS].observe((computed + output_tokens) / steps, steps)
        if stats.drafts != before.drafts:
            self._drafted(stats, before)

    def _drafted(self, stats: BackendStats, before: BackendStats) -> None:
        grown = draft_increase(stats, before)
        self._counts["drafts"] += grown[0].guessed
        held = (position.held for position in grown)
        self._held = tuple(one + other for one, other in zip_longest(self._held, held, fillvalue=0))

    def ended(self, request: Ended) -> None:
        """A request ended. Only whole answers count into latencies and lengths."""
        self._finished[request.reason] += 1
        if not request.whole:
            return
        inference = [each for each in (request.prefill_s, request.decode_s) if each is not None]
        for name, value in (
            (E2E, request.e2e_s),
            (INFERENCE_TIME, sum(inference) if inference else None),
            (PREFILL_TIME, request.prefill_s),
            (DECODE_TIME, request.decode_s),
            (REQUEST_ITL, request.itl_s),
            (PROMPT_TOKENS, request.prompt_tokens),
            (COMPUTED_TOKENS, max(0, request.prompt_tokens - request.cached_tokens)),
            (OUTPUT_TOKENS, request.output_tokens or None),
            (MAX_TOKENS, request.max_tokens or None),
            (LONGEST_OUTPUT, request.longest or None),
            (CHOICES, request.choices if request.longest is not None else None),
        ):
            if value is not None:
                self._histograms[name].observe(value)

    def freeze(self) -> ModelUsage:
        """The numbers now."""
        counts = dict(self._counts)
        guessed = counts.pop("drafts", 0)
        return ModelUsage(
            name=self._name,
            drafts=guessed if guessed or not counts.get("draft_tokens") else None,
            held_by_position=self._held,
            finished=dict(self._finished),
            histograms={
                name: histogram.freeze(self._longest_context if _HISTOGRAM_BOUNDS[name] is TOKEN_BOUNDS else 0)
                for name, histogram in self._histograms.items()
            },
            **counts,
        )


def draft_increase(stats: BackendStats, before: BackendStats) -> list[DraftPosition]:
    """What was added by position; a backend that was loaded anew has counted from the start."""
    return [
        DraftPosition(guessed=max(0, now.guessed - old.guessed), held=max(0, now.held - old.held))
        for now, old in zip_longest(stats.drafts, before.drafts, fillvalue=DraftPosition())
    ]


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
