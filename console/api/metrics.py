"""Snapshot as Prometheus metrics: vLLM's names where they mean the same, so that its dashboards work, or ericllm_*."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.insight_metrics import insight_families
from engine.backends.base import BackendStats
from engine.snapshot import Histogram, ModelState, Snapshot, WorkerReading

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from submission to the first token",
    "inter_token_latency_seconds": "Time between tokens",
    "e2e_request_latency_seconds": "Time from submission to the last token",
    "request_queue_time_seconds": "Time until a worker took the request",
    "request_prefill_time_seconds": "Time from there to the first token",
    "request_decode_time_seconds": "Time from the first token to the last",
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_generation_tokens": "Generated tokens of a request",
}
_MODEL_STATES: tuple[ModelState, ...] = get_args(ModelState)


@dataclass(frozen=True, slots=True)
class _WorkerGauge:
    """One number of every worker."""

    name: str
    help: str
    read: Callable[[WorkerReading], float]


_WORKER_GAUGES = (
    _WorkerGauge("ericllm_worker_up", "1 while the worker takes requests", lambda w: float(w.state == "ready")),
    _WorkerGauge("ericllm_worker_active_requests", "Requests it works on", lambda w: w.active),
    _WorkerGauge("ericllm_worker_max_prompts", "Requests it may work on at once", lambda w: w.max_prompts),
    _WorkerGauge(
        "ericllm_worker_prompts_limit",
        "Requests that its memory was found to allow at once, 0 while no limit was met",
        lambda w: w.stats.prompts_limit,
    ),
    _WorkerGauge("ericllm_worker_deaths_in_a_row", "Deaths since it last worked well", lambda w: w.deaths_in_a_row),
    _WorkerGauge("ericllm_worker_tokens_per_second", "Generated, over the last seconds", lambda w: w.tokens_per_s),
    _WorkerGauge("ericllm_worker_step_seconds", "Time its last step took", lambda w: w.step_s),
    _WorkerGauge("ericllm_worker_resident_bytes", "Memory of its process", lambda w: w.rss_bytes),
    _WorkerGauge("ericllm_worker_kv_tokens", "Tokens its KV pages hold", lambda w: w.kv_tokens),
)


class SnapshotCollector(Collector):
    """Reads a snapshot at every scrape. Belongs to a registry of its own."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All metric families of the engine now."""
        snapshot = self._snapshot()
        spec = snapshot.status.spec
        labels = {"model_name": spec.name if spec is not None else ""}
        models = _models(snapshot)
        yield from _gauges(snapshot)
        yield from _counters(snapshot, labels)
        yield from _histograms(snapshot, labels)
        yield from _model_gauges(models)
        yield from _prefix_counters(models)
        yield from _workers(snapshot)
        yield from _devices(snapshot)
        yield from insight_families(snapshot.insight, labels)


@dataclass(slots=True)
class _Model:
    """All that goes by one name: while a model is replaced by itself there are two."""

    name: str
    state: ModelState
    running: int = 0
    queued: int = 0
    workers_wanted: int = 0
    max_prompts: int = 0
    stats: list[BackendStats] = field(default_factory=list)


def _models(snapshot: Snapshot) -> list[_Model]:
    """By name, the first model first. It has what waits for a model that is on its way; without any model, one without
    a name stands for it, so that the families are there."""
    first = _Model(snapshot.status.spec.name if snapshot.status.spec is not None else "", snapshot.status.state)
    found = {first.name: first}
    for reading in snapshot.models:
        model = found.setdefault(reading.name, _Model(reading.name, reading.status.state))
        model.running += reading.running
        model.queued += reading.queued
        model.workers_wanted = max(model.workers_wanted, reading.target_workers)
        model.max_prompts = max(model.max_prompts, reading.max_prompts)
    first.queued += snapshot.queued - sum(model.queued for model in found.values())
    for worker in snapshot.workers:
        if worker.model in found:
            found[worker.model].stats.append(worker.stats)
    return list(found.values())


def _model_gauges(models: list[_Model]) -> Iterator[Metric]:
    for name, text, read in (
        ("vllm:num_requests_running", "Requests that workers work on", lambda model: model.running),
        ("vllm:num_requests_waiting", "Requests in the queue", lambda model: model.queued),
        ("vllm:kv_cache_usage_perc", "KV pages in use; 1 is all of them", _kv_usage),
        ("ericllm_workers_wanted", "Workers that the operator asked for", lambda model: model.workers_wanted),
        ("ericllm_max_prompts", "Requests that a worker may work on at once", lambda model: model.max_prompts),
    ):
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        for model in models:
            gauge.add_metric([model.name], read(model))
        yield gauge
    states = GaugeMetricFamily(
        "ericllm_model_state", "1 for the state that the model is in", labels=["model_name", "state"]
    )
    for model in models:
        for state in _MODEL_STATES:
            states.add_metric([model.name, state], float(state == model.state))
    yield states


def _kv_usage(model: _Model) -> float:
    total = sum(stats.pages_total for stats in model.stats)
    return 1 - sum(stats.pages_free for stats in model.stats) / total if total else 0.0


def _prefix_counters(models: list[_Model]) -> Iterator[Metric]:
    queries = CounterMetricFamily(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", labels=["model_name"]
    )
    hits = CounterMetricFamily(
        "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", labels=["model_name"]
    )
    for model in models:
        queries.add_metric([model.name], sum(stats.prefix_query_tokens for stats in model.stats))
        hits.add_metric([model.name], sum(stats.prefix_hit_tokens for stats in model.stats))
    yield from (queries, hits)


def _gauges(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("ericllm_uptime_seconds", "Age of the engine", snapshot.uptime_s, {})
    yield _gauge("ericllm_queue_limit", "Requests that may wait", snapshot.max_queue, {})


def _counters(snapshot: Snapshot, labels: dict[str, str]) -> Iterator[Metric]:
    totals = snapshot.totals
    yield _counter("vllm:prompt_tokens", "Prompt tokens taken", totals.prompt_tokens, labels)
    yield _counter("vllm:generation_tokens", "Tokens generated", totals.output_tokens, labels)
    yield _counter("vllm:num_preemptions", "Requests put back for want of KV pages", totals.preemptions, labels)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead", totals.draft_tokens, labels)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Guesses that held", totals.draft_accepted, labels)
    finished = CounterMetricFamily(
        "vllm:request_success", "Requests finished, by reason", labels=[*labels, "finished_reason"]
    )
    for reason, count in sorted({"stop": 0, "length": 0, **totals.finished}.items()):
        finished.add_metric([*labels.values(), _REASONS.get(reason, reason)], count)
    yield finished
    yield _counter("ericllm_requests", "Requests submitted", totals.requests, {})
    yield _counter("ericllm_requests_rejected", "Requests refused", totals.rejected, {})
    yield _counter("ericllm_requests_requeued", "Requests that moved on from a lost worker", totals.requeued, {})
    yield _counter("ericllm_worker_restarts", "Workers started again", totals.worker_restarts, {})


_REASONS = {"cancelled": "abort"}
"""vLLM's words for finish reasons where they differ from ours."""


def _histograms(snapshot: Snapshot, labels: dict[str, str]) -> Iterator[Metric]:
    for name, text in _HISTOGRAMS.items():
        if (histogram := snapshot.histograms.get(name)) is not None:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), _buckets(histogram), histogram.sum)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [repr(bound) for bound in histogram.bounds]
    return [*zip(bounds, map(float, histogram.counts), strict=True), ("+Inf", float(histogram.count))]


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    for gauge in _WORKER_GAUGES:
        family = GaugeMetricFamily(gauge.name, gauge.help, labels=["worker", "model_name"])
        for worker in snapshot.workers:
            family.add_metric([worker.id, worker.model], gauge.read(worker))
        yield family


def _devices(snapshot: Snapshot) -> Iterator[Metric]:
    memory = GaugeMetricFamily("ericllm_device_memory_bytes", "Memory by what holds it", labels=["device", "part"])
    used = GaugeMetricFamily("ericllm_device_utilisation", "Share of time at work, 0 to 1", labels=["device"])
    heat = GaugeMetricFamily("ericllm_device_temperature_celsius", "Temperature", labels=["device"])
    power = GaugeMetricFamily("ericllm_device_power_watts", "Power drawn", labels=["device"])
    for device in snapshot.devices:
        for part in ("weights", "kv", "work", "others", "free"):
            memory.add_metric([device.id, part], getattr(device, f"{part}_bytes"))
        for family, value in ((used, device.utilisation), (heat, device.temperature_c), (power, device.power_w)):
            if value is not None:
                family.add_metric([device.id], value)
    yield from (memory, used, heat, power)


def _gauge(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
