"""Snapshot as Prometheus metrics: vLLM's names where they mean the same, so that its dashboards work, or ericllm_*."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.backends.base import BackendStats
from engine.snapshot import Histogram, Snapshot, WorkerReading

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from submission to the first token",
    "inter_token_latency_seconds": "Time between tokens",
    "e2e_request_latency_seconds": "Time from submission to the last token",
    "request_queue_time_seconds": "Time until a worker took the request",
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_generation_tokens": "Generated tokens of a request",
}
_MODEL_STATES = ("unloaded", "loading", "ready", "draining", "unloading", "failed")


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
        yield from _gauges(snapshot, labels)
        yield from _counters(snapshot, labels)
        yield from _histograms(snapshot, labels)
        yield from _model(snapshot)
        yield from _workers(snapshot)
        yield from _devices(snapshot)


def _gauges(snapshot: Snapshot, labels: dict[str, str]) -> Iterator[Metric]:
    yield _gauge("vllm:num_requests_running", "Requests that workers work on", snapshot.running, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests in the queue", snapshot.queued, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "KV pages in use; 1 is all of them", snapshot.kv_usage, labels)
    yield _gauge("ericllm_uptime_seconds", "Age of the engine", snapshot.uptime_s, {})
    yield _gauge("ericllm_workers_wanted", "Workers that the operator asked for", snapshot.target_workers, {})
    yield _gauge("ericllm_queue_limit", "Requests that may wait", snapshot.max_queue, {})


def _counters(snapshot: Snapshot, labels: dict[str, str]) -> Iterator[Metric]:
    totals = snapshot.totals
    stats = [worker.stats for worker in snapshot.workers]
    yield _counter("vllm:prompt_tokens", "Prompt tokens taken", totals.prompt_tokens, labels)
    yield _counter("vllm:generation_tokens", "Tokens generated", totals.output_tokens, labels)
    yield _counter("vllm:num_preemptions", "Requests put back for want of KV pages", totals.preemptions, labels)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead", totals.draft_tokens, labels)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Guesses that held", totals.draft_accepted, labels)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", _queries(stats), labels)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", _hits(stats), labels)
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


def _queries(stats: list[BackendStats]) -> int:
    return sum(part.prefix_query_tokens for part in stats)


def _hits(stats: list[BackendStats]) -> int:
    return sum(part.prefix_hit_tokens for part in stats)


def _histograms(snapshot: Snapshot, labels: dict[str, str]) -> Iterator[Metric]:
    for name, text in _HISTOGRAMS.items():
        if (histogram := snapshot.histograms.get(name)) is not None:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), _buckets(histogram), histogram.sum)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [repr(bound) for bound in histogram.bounds]
    return [*zip(bounds, map(float, histogram.counts), strict=True), ("+Inf", float(histogram.count))]


def _model(snapshot: Snapshot) -> Iterator[Metric]:
    family = GaugeMetricFamily("ericllm_model_state", "1 for the state that the model is in", labels=["state"])
    for state in _MODEL_STATES:
        family.add_metric([state], float(state == snapshot.status.state))
    yield family


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    for gauge in _WORKER_GAUGES:
        family = GaugeMetricFamily(gauge.name, gauge.help, labels=["worker"])
        for worker in snapshot.workers:
            family.add_metric([worker.id], gauge.read(worker))
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
