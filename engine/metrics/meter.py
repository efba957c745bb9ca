"""Meter: counts what happens to requests and in steps, once, by model and by worker. Pure: every call gets the time.

Panels, `/metrics`, insight and benches read it. Three views of the same events: since the engine started, by model, as
Prometheus has them (`usage`, `totals`); since an operator reset the session (`insight`); and the last seconds
(`recent`, `history`, rates).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter

import msgspec

from engine.backends.base import BackendStats, DraftPosition, FinishReason, StepLimit
from engine.metrics.distributions import (
    WINDOW_S,
    HistogramCounter,
    LengthCounter,
    QuantileSketch,
    Rate,
    SampleWindow,
    percentiles,
)
from engine.metrics.history import History
from engine.metrics.slo import Slo
from engine.snapshot import Goodput, Histogram, Insight, Mark, Percentiles, Second, Session, Totals

# Names and bucket bounds of the histograms are those of vLLM's metrics, so that dashboards made for it read right.

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
"""Shown up to the model's longest context, as vLLM does."""

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
MAX_OUTPUT = "request_max_num_generation_tokens"
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
    MAX_OUTPUT: TOKEN_BOUNDS,
    MAX_TOKENS: TOKEN_BOUNDS,
    CHOICES: CHOICES_BOUNDS,
    STEP_TOKENS: STEP_BOUNDS,
}


_STATS_COUNTERS = ("preemptions", "prefix_query_tokens", "prefix_hit_tokens", "draft_tokens", "draft_accepted")
"""Counters of BackendStats that are counted by model under the same name."""

_MAX_MARKS = 100
"""Of each kind: many of one kind displace none of another."""
_MAX_GAPS = 256


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of all models of one name. They only grow: they go on where it is replaced by itself or loaded again.

    computed_tokens, cached_tokens: of prompts, computed and found in the prefix cache.
    drafts: how often tokens were drafted, None where the backend does not report it.  held_by_position: accepted draft
    tokens, by how far ahead they were.  finished: requests by finish reason.  histograms: by metric name.
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
class FinishedRequest:
    """A request that ended. queue_s: until a worker first took it.  prefill_s: from there to its first token.
    decode_s: from there to its last one.  itl_s: its mean; each is None where it did not come so far.

    choices: answers to its prompt that were requested together.  longest: tokens of the longest of them, given with the
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
    def is_whole(self) -> bool:
        """True if its answer was not cut short: others say nothing of speed and length."""
        return self.reason in ("stop", "length")

    @property
    def is_prompt_only(self) -> bool:
        """True if nothing but its prompt was to be computed: it says nothing of answers."""
        return self.is_whole and not self.output_tokens


class Choices:
    """Answers to one prompt that were requested together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._unfinished = count
        self._longest = 0

    def finish(self, output_tokens: int) -> int | None:
        """Count one as ended; return the tokens of the longest where it was the last, else None."""
        self._unfinished -= 1
        self._longest = max(self._longest, output_tokens)
        return None if self._unfinished else self._longest


class BusyClock:
    """How long at least one of several workers computed. Steps are counted in whatever order they are reported: idle
    gaps between those reported so far are remembered for later reports that fill them."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._until = -math.inf
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MAX_GAPS)

    def add(self, began: float, ended: float) -> None:
        """Count that a worker computed from `began` to `ended`."""
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


class _ModelCounters:
    """Counters and histograms with the label of one model."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.drafts: tuple[DraftPosition, ...] = ()
        self.max_context = 0
        self.histograms = {name: HistogramCounter(bounds) for name, bounds in _HISTOGRAM_BOUNDS.items()}

    def finish(self, request: FinishedRequest) -> None:
        """Count the end of a request. Only whole answers count into latencies and lengths."""
        self.finished[request.reason] += 1
        if not request.is_whole:
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
            (MAX_OUTPUT, request.longest or None),
            (CHOICES, request.choices if request.longest is not None else None),
        ):
            if value is not None:
                self.histograms[name].observe(value)

    def freeze(self, name: str) -> ModelUsage:
        """Return the numbers now."""
        drafted = self.drafts[0].drafted if self.drafts else 0
        counts = {each: self.counts[each] for each in ModelUsage.__struct_fields__ if each in self.counts}
        return ModelUsage(
            name=name,
            drafts=drafted if drafted or not self.counts["draft_tokens"] else None,
            held_by_position=tuple(position.accepted for position in self.drafts),
            finished=dict(self.finished),
            histograms={
                name: histogram.freeze(self.max_context if _HISTOGRAM_BOUNDS[name] is TOKEN_BOUNDS else 0)
                for name, histogram in self.histograms.items()
            },
            **counts,
        )


@dataclass(slots=True)
class _Session:
    """The part of the meter that a reset starts again. *_before: the counters since the engine's start, as they were at
    the reset."""

    since: float = 0.0
    started: float = 0.0
    counts_before: Mapping[str, int] = field(default_factory=Counter)
    finished_before: Counter[str] = field(default_factory=Counter)
    drafts_before: tuple[DraftPosition, ...] = ()
    busy_before_s: float = 0.0
    queue: QuantileSketch = field(default_factory=QuantileSketch)
    prefill: QuantileSketch = field(default_factory=QuantileSketch)
    decode: QuantileSketch = field(default_factory=QuantileSketch)
    prompts: LengthCounter = field(default_factory=LengthCounter)
    outputs: LengthCounter = field(default_factory=LengthCounter)
    longest_tokens: int = 0
    judged: int = 0
    num_met: int = 0
    met_rate: Rate = field(default_factory=lambda: Rate(WINDOW_S))

    def finish(self, now: float, request: FinishedRequest, slo: Slo) -> None:
        """Count the end of a request."""
        self.longest_tokens = max(self.longest_tokens, request.prompt_tokens + request.output_tokens)
        if request.reason != "cancelled" and not request.is_prompt_only:
            self.judged += 1
            if request.is_whole and slo.is_met(request.ttft_s, request.itl_s):
                self.num_met += 1
                self.met_rate.add(now)
        if not request.is_whole:
            return
        self.prompts.add(request.prompt_tokens)
        if not request.is_prompt_only:
            self.outputs.add(request.output_tokens)
        for sketch, phase_s in (
            (self.queue, request.queue_s),
            (self.prefill, request.prefill_s),
            (self.decode, request.decode_s),
        ):
            if phase_s is not None:
                sketch.add(phase_s)


class Meter:
    """Everything that is counted. Times are seconds of one monotonic clock, except where `at` says unix time.

    recent: percentiles of TTFT, ITL and E2E over the last minute, as of the last `tick`.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        self.recent = {name: Percentiles() for name in (TTFT, ITL, E2E)}
        self.history = History()
        self._slo = slo or Slo()
        self._models: dict[str, _ModelCounters] = {}
        self._unlabelled = _ModelCounters()
        self._session = _Session()
        self._busy = BusyClock()
        self._output_rate, self._prompt_rate, self._finish_rate = Rate(), Rate(), Rate(WINDOW_S)
        self._error_rate = Rate(WINDOW_S)
        self._worker_rates: dict[str, Rate] = {}
        self._windows = {name: SampleWindow() for name in self.recent}
        self._second_counts: Counter[str] = Counter()
        self._second_samples: dict[str, Counter[float]] = {TTFT: Counter(), ITL: Counter()}
        self._second_limits: defaultdict[StepLimit | None, float] = defaultdict(float)
        self._limit: StepLimit | None = None
        self._marks: defaultdict[str, deque[Mark]] = defaultdict(partial(deque, maxlen=_MAX_MARKS))

    # -- events -------------------------------------------------------------------------------------------------

    def add_model(self, model: str, max_model_len: int = 0) -> None:
        """Have numbers of a model. max_model_len: tokens that it takes once it is loaded, prompt and answer."""
        counters = self._models.setdefault(model, _ModelCounters())
        counters.max_context = max(counters.max_context, max_model_len)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter of Totals of that name that belongs to no model."""
        self._unlabelled.counts[name] += amount

    def count_dispatch(self, model: str, queued_s: float) -> None:
        """Count that a worker took a request for the first time."""
        self._models[model].histograms[QUEUE_TIME].observe(queued_s)

    def count_prefill(
        self, now: float, model: str, prompt_tokens: int, cached_tokens: int, ttft_s: float | None
    ) -> None:
        """Count a prompt that is computed. ttft_s: None where no token is to come of it."""
        counters = self._models[model]
        counters.counts["prompt_tokens"] += prompt_tokens
        counters.counts["cached_tokens"] += cached_tokens
        counters.counts["computed_tokens"] += max(0, prompt_tokens - cached_tokens)
        self._second_counts["prompt_tokens"] += prompt_tokens
        self._prompt_rate.add(now, prompt_tokens)
        if ttft_s is not None:
            self._observe(counters, TTFT, now, ttft_s)

    def count_steps(
        self,
        now: float,
        model: str,
        worker: str,
        *,
        steps: int,
        step_s: float,
        ended_at: float,
        sequences: int,
        output_tokens: int,
        gaps: Mapping[float, int],
        stats: BackendStats,
        before: BackendStats,
        queued: bool = False,
    ) -> None:
        """Count a worker's report of `steps` of `step_s` each with `sequences` requests, the last of which ended at
        `ended_at`. gaps: seconds between output tokens, and how often each; stats: after them, and before.
        queued: True if requests wait for a slot of the worker."""
        counters = self._models[model]
        for name in _STATS_COUNTERS:
            if grown := getattr(stats, name) - getattr(before, name):
                counters.counts[name] += max(0, grown)
        if steps > 0:
            computed = max(0, stats.prompt_tokens_computed - before.prompt_tokens_computed)
            counters.counts["prefill_tokens"] += computed
            counters.counts["steps"] += steps
            counters.counts["sequence_steps"] += steps * sequences
            counters.histograms[STEP_TOKENS].observe((computed + output_tokens) / steps, steps)
            self._busy.add(ended_at - steps * step_s, ended_at)
            if not stats.limited:
                self._second_limits[None] += steps * step_s
            for limit, times in stats.limited.items():
                if (more := times - before.limited.get(limit, 0)) > 0:
                    self._second_limits["max_prompts" if queued and limit == "none" else limit] += more * step_s
        if stats.drafts != before.drafts:
            counters.drafts = _add_drafts(counters.drafts, _draft_increase(stats.drafts, before.drafts))
        if output_tokens:
            counters.counts["output_tokens"] += output_tokens
            self._second_counts["output_tokens"] += output_tokens
            self._output_rate.add(now, output_tokens)
            self._worker_rates.setdefault(worker, Rate()).add(now, output_tokens)
        for seconds, times in gaps.items():
            self._observe(counters, ITL, now, seconds, times)

    def count_finish(self, now: float, model: str, request: FinishedRequest) -> None:
        """Count the end of a request. Only whole answers count into latencies: one cut short says nothing of speed."""
        self._models[model].finish(request)
        self._session.finish(now, request, self._slo)
        self._finish_rate.add(now)
        if request.reason in ("error", "timeout"):
            self._error_rate.add(now)
        if request.is_whole:
            self._windows[E2E].add(now, request.e2e_s)

    def mark(
        self,
        at: float,
        text: str,
        *,
        knob: str = "",
        before: float | None = None,
        after: float | None = None,
        model: str = "",
        kind: str = "knob",
    ) -> None:
        """Remember an operator's action or an event; see Mark."""
        mark = Mark(at=at, text=text, knob=knob, before=before, after=after, model=model, kind=kind)
        self._marks[kind].append(mark)

    def settle(self, model: str, at: float) -> None:
        """Note that the workers of a model are as its knobs say."""
        knobs = self._marks["knob"]
        for index, mark in enumerate(knobs):
            if mark.model == model and mark.settled_at is None:
                knobs[index] = msgspec.structs.replace(mark, settled_at=at)

    def _observe(self, counters: _ModelCounters, name: str, now: float, value: float, times: int = 1) -> None:
        counters.histograms[name].observe(value, times)
        self._windows[name].add(now, value, times)
        self._second_samples[name][value] += times

    # -- the session --------------------------------------------------------------------------------------------

    def reset_session(self, now: float, at: float) -> None:
        """Begin a session at unix time `at`."""
        self._session = _Session(
            since=at,
            started=now,
            counts_before=self._counts(),
            finished_before=self._finished(),
            drafts_before=self._drafts(),
            busy_before_s=self.busy_s,
        )

    def set_slo(self, slo: Slo) -> None:
        """Judge by another SLO from now on; the goodput by the old one is forgotten."""
        if slo != self._slo:
            self._slo = slo
            self._session.judged = self._session.num_met = 0
            self._session.met_rate = Rate(WINDOW_S)

    @property
    def busy_s(self) -> float:
        """Seconds in which a worker computed since the engine started: no reset touches it."""
        return self._busy.busy_s

    def insight(self, now: float) -> Insight:
        """Return the session's numbers; those of devices are left for others to add."""
        session, counts = self._session, self._counts()
        counts.subtract(session.counts_before)
        finished = self._finished() - session.finished_before
        drafts = _draft_increase(self._drafts(), session.drafts_before)
        return Insight(
            session=Session(
                since=session.since,
                elapsed_s=now - session.started,
                busy_s=self.busy_s - session.busy_before_s,
                requests=finished.total(),
                output_tokens=counts["output_tokens"],
                prompt_tokens=counts["prefill_tokens"],
                steps=counts["steps"],
                batch=counts["sequence_steps"] / counts["steps"] if counts["steps"] else None,
            ),
            queue=session.queue.freeze(),
            prefill=session.prefill.freeze(),
            decode=session.decode.freeze(),
            prompts=session.prompts.freeze(),
            outputs=session.outputs.freeze(),
            longest_context_tokens=session.longest_tokens,
            finished=dict(finished),
            goodput=Goodput(
                slo_ttft_s=self._slo.ttft_s,
                slo_itl_s=self._slo.itl_s,
                judged=session.judged,
                within_slo=session.num_met,
                per_s=session.met_rate.events(now) / max(1.0, min(WINDOW_S, now - session.started)),
            ),
            drafts=drafts if any(position.drafted for position in drafts) else (),
        )

    # -- the last seconds ---------------------------------------------------------------------------------------

    def errors_per_min(self, now: float) -> int:
        """Return how many requests failed or timed out in the last minute."""
        return self._error_rate.events(now)

    def output_tokens_per_s(self, now: float, worker: str | None = None) -> float:
        """Return the rate of output tokens, of one worker or of all."""
        if worker is None:
            return self._output_rate.per_second(now)
        rate = self._worker_rates.get(worker)
        return 0.0 if rate is None else rate.per_second(now)

    def prompt_tokens_per_s(self, now: float) -> float:
        """Return the rate of prompt tokens."""
        return self._prompt_rate.per_second(now)

    def finished_per_s(self, now: float) -> float:
        """Return the rate of requests that end."""
        return self._finish_rate.per_second(now)

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
        if self._second_limits:
            self._limit = max(self._second_limits, key=self._second_limits.__getitem__)
        elif not running + queued:
            self._limit = "none"
        second = Second(
            at=at,
            output_tokens=self._second_counts["output_tokens"],
            prompt_tokens=self._second_counts["prompt_tokens"],
            running=running,
            queued=queued,
            kv_usage=kv_usage,
            device_utilisation=device_utilisation,
            device_memory=device_memory,
            ttft_p50=ttft_p50,
            ttft_p95=ttft_p95,
            itl_p50=itl_p50,
            itl_p95=itl_p95,
            limit=self._limit,
        )
        self.history.add(second)
        self.recent = {name: window.percentiles(now) for name, window in self._windows.items()}
        self._second_counts.clear()
        self._second_limits.clear()
        self._second_samples = {name: Counter() for name in self._second_samples}
        self._worker_rates = {worker: rate for worker, rate in self._worker_rates.items() if rate.events(now)}

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Actions of operators and events, oldest first."""
        return tuple(sorted(chain(*self._marks.values()), key=attrgetter("at")))

    # -- since the start ----------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Return the counters of all models together."""
        counts = self._counts()
        names = (name for name in Totals.__struct_fields__ if name != "finished")
        return Totals(finished=dict(self._finished()), **{name: counts[name] for name in names})

    def usage(self) -> tuple[ModelUsage, ...]:
        """Return each model's numbers, also of those that are loaded no more."""
        return tuple(counters.freeze(name) for name, counters in self._models.items())

    def _all(self) -> tuple[_ModelCounters, ...]:
        return (*self._models.values(), self._unlabelled)

    def _counts(self) -> Counter[str]:
        return _sum(each.counts for each in self._all())

    def _finished(self) -> Counter[str]:
        return _sum(each.finished for each in self._all())

    def _drafts(self) -> tuple[DraftPosition, ...]:
        drafts: tuple[DraftPosition, ...] = ()
        for each in self._all():
            drafts = _add_drafts(drafts, each.drafts)
        return drafts


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return total


def _draft_increase(drafts: tuple[DraftPosition, ...], before: tuple[DraftPosition, ...]) -> tuple[DraftPosition, ...]:
    """Return what was added by position; a backend that was loaded again counts from 0."""
    return tuple(
        DraftPosition(drafted=max(0, now.drafted - old.drafted), accepted=max(0, now.accepted - old.accepted))
        for now, old in zip_longest(drafts, before, fillvalue=DraftPosition())
    )


def _add_drafts(drafts: tuple[DraftPosition, ...], more: tuple[DraftPosition, ...]) -> tuple[DraftPosition, ...]:
    return tuple(
        DraftPosition(drafted=one.drafted + other.drafted, accepted=one.accepted + other.accepted)
        for one, other in zip_longest(drafts, more, fillvalue=DraftPosition())
    )
