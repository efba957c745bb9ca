"""What each model was used for since the engine started, as /metrics tells it: counters and cumulative histograms.

Pure. Names and bucket bounds are those of vLLM's metrics, so that dashboards made for it read right. The numbers of a
model go on where it is replaced by itself, loaded again or has lost a worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import msgspec

from engine.backends.base import BackendStats, DraftPosition, FinishReason
from engine.snapshot import Histogram

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

_BOUNDS = {
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
        self._histograms = {name: HistogramCounter(bounds) for name, bounds in _BOUNDS.items()}

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
        grown = grown_drafts(stats, before)
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
                name: histogram.freeze(self._longest_context if _BOUNDS[name] is TOKEN_BOUNDS else 0)
                for name, histogram in self._histograms.items()
            },
            **counts,
        )


def grown_drafts(stats: BackendStats, before: BackendStats) -> list[DraftPosition]:
    """What was added by position; a backend that was loaded anew has counted from the start."""
    return [
        DraftPosition(guessed=max(0, now.guessed - old.guessed), held=max(0, now.held - old.held))
        for now, old in zip_longest(stats.drafts, before.drafts, fillvalue=DraftPosition())
    ]
