"""Everything as Prometheus metrics: vLLM's names where they mean the same (`vllm_metrics`), or ericllm_*."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.backends.base import BackendStats, LoadedModel
from engine.config import ModelSpec
from engine.metrics.meter import ITL, ModelUsage
from engine.snapshot import (
    DeviceReading,
    DeviceSensors,
    DeviceWork,
    Histogram,
    Insight,
    ModelState,
    Snapshot,
    WorkerReading,
)
from engine.text.printable import printable

# vLLM's metrics, with its names, labels and buckets, so that its dashboards and tools work unchanged. Those without a
# source here are absent.
#
# engine: vLLM's label for who schedules; all workers of a model share one queue, so each model is one engine, "0".

LABELS = ("model_name", "engine")
ENGINE = "0"

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from submission to the first token",
    ITL: "Time between tokens",
    "request_time_per_output_token_seconds": "Mean time between tokens, per request",
    "e2e_request_latency_seconds": "Time from submission to the last token",
    "request_queue_time_seconds": "Time in the queue, per request",
    "request_inference_time_seconds": "Time on a worker, per request",
    "request_prefill_time_seconds": "Prefill time, per request",
    "request_decode_time_seconds": "Decode time, per request",
    "request_prompt_tokens": "Prompt tokens per request",
    "request_prefill_kv_computed_tokens": "Prompt tokens not in the prefix cache, per request",
    "request_generation_tokens": "Generated tokens per request",
    "request_max_num_generation_tokens": "Generated tokens of a request's longest answer",
    "request_params_max_tokens": "Max tokens requested (max_tokens)",
    "request_params_n": "Answers requested per prompt (n)",
    "iteration_tokens_total": "Tokens per step, prefill and decode",
}
_FORMER_HISTOGRAMS = {"time_per_output_token_seconds": ITL}
"""Names that older dashboards have, and what they mean now."""

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "Prompt tokens processed", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens from the prefix cache", "cached_tokens"),
    ("generation_tokens", "Tokens generated", "output_tokens"),
    ("num_preemptions", "Preemptions for lack of KV pages", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
    ("gpu_prefix_cache_queries", "As prefix_cache_queries, for older dashboards", "prefix_query_tokens"),
    ("gpu_prefix_cache_hits", "As prefix_cache_hits, for older dashboards", "prefix_hit_tokens"),
    ("spec_decode_num_drafts", "Speculation steps", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Accepted draft tokens", "draft_accepted"),
)
_REASONS = {"cancelled": "abort"}
"""vLLM's words for finish reasons where they differ from ours."""

_KNOWN_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class ModelNow:
    """All that goes by one name: while a model is replaced by itself there are two."""

    name: str
    state: ModelState
    running: int = 0
    queued: int = 0
    workers_wanted: int = 0
    max_prompts: int = 0
    spec: ModelSpec | None = None
    stats: list[BackendStats] = field(default_factory=list)
    loaded: list[LoadedModel] = field(default_factory=list)

    @property
    def kv_usage(self) -> float:
        """The share of its KV pages that live requests hold, 0..1."""
        total = sum(stats.pages_total for stats in self.stats)
        return 1 - sum(stats.pages_free for stats in self.stats) / total if total else 0.0


def models_of(snapshot: Snapshot) -> list[ModelNow]:
    """By name, the first model first. It has what waits for a model that is on its way; without any model, one without
    a name stands for it, so that the families are there."""
    first = ModelNow(snapshot.status.spec.name if snapshot.status.spec is not None else "", snapshot.status.state)
    found = {first.name: first}
    for reading in snapshot.models:
        model = found.setdefault(reading.name, ModelNow(reading.name, reading.status.state))
        model.running += reading.running
        model.queued += reading.queued
        model.workers_wanted = max(model.workers_wanted, reading.target_workers)
        model.max_prompts = max(model.max_prompts, reading.max_prompts)
        model.spec = reading.status.spec or model.spec
        if reading.status.model is not None:
            workers = sum(each.model == reading.name and each.kv_tokens > 0 for each in snapshot.workers)
            model.loaded += [reading.status.model] * max(1, workers)
    first.queued += snapshot.queued - sum(model.queued for model in found.values())
    for worker in snapshot.workers:
        if worker.model in found:
            found[worker.model].stats.append(worker.stats)
    return list(found.values())


def vllm_families(models: list[ModelNow], usage: Iterable[ModelUsage]) -> Iterator[Metric]:
    """All of vLLM's families. usage: of every model that there is or was."""
    used = list(usage) or [ModelUsage(name=model.name) for model in models]
    yield from _vllm_gauges(models)
    yield from _vllm_counters(used)
    yield from _histograms(used)


def _vllm_gauges(models: list[ModelNow]) -> Iterator[Metric]:
    for name, text, values in (
        ("num_requests_running", "Running requests", [float(model.running) for model in models]),
        ("num_requests_waiting", "Queued requests", [float(model.queued) for model in models]),
        ("kv_cache_usage_perc", "KV cache usage, 0 to 1", [model.kv_usage for model in models]),
        ("gpu_cache_usage_perc", "As kv_cache_usage_perc, for older dashboards", [model.kv_usage for model in models]),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for model, value in zip(models, values, strict=True):
            gauge.add_metric([model.name, ENGINE], value)
        yield gauge
    yield _cache_config(models)


def _cache_config(models: list[ModelNow]) -> Metric:
    """How KV is kept by each loaded model, over its workers, in labels; the value is always 1."""
    names = ("block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_memory_bytes", "enable_prefix_caching")
    gauge = GaugeMetricFamily("vllm:cache_config_info", "KV cache configuration", labels=[*LABELS, *names])
    for model in models:
        if not model.loaded or model.spec is None:
            continue
        page_tokens = model.loaded[0].page_tokens
        blocks = sum(each.kv_tokens // each.page_tokens for each in model.loaded)
        dtype = "auto" if model.spec.cache_bits == 16 else f"int{model.spec.cache_bits}"
        kv_bytes = sum(each.kv_bytes for each in model.loaded)
        values = (page_tokens, blocks, dtype, kv_bytes, True)
        gauge.add_metric([model.name, ENGINE, *map(str, values)], 1)
    return gauge


def _vllm_counters(usage: list[ModelUsage]) -> Iterator[Metric]:
    for name, text, field_name in _COUNTERS:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for model in usage:
            if (value := getattr(model, field_name)) is not None:
                family.add_metric([model.name, ENGINE], value)
        yield family
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source", "Prompt tokens, by source of their KV cache", labels=[*LABELS, "source"]
    )
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by position",
        labels=[*LABELS, "position"],
    )
    finished = CounterMetricFamily(
        "vllm:request_success", "Requests finished, by reason", labels=[*LABELS, "finished_reason"]
    )
    for model in usage:
        own = [model.name, ENGINE]
        sources.add_metric([*own, "local_compute"], model.computed_tokens)
        sources.add_metric([*own, "local_cache_hit"], model.cached_tokens)
        for position, count in enumerate(model.held_by_position):
            accepted.add_metric([*own, str(position)], count)
        reasons = {_REASONS.get(reason, reason): count for reason, count in model.finished.items()}
        for reason, count in sorted({**dict.fromkeys(_KNOWN_REASONS, 0), **reasons}.items()):
            finished.add_metric([*own, reason], count)
    yield from (sources, accepted, finished)


def _histograms(usage: list[ModelUsage]) -> Iterator[Metric]:
    for name, text in _HISTOGRAMS.items():
        yield _histogram(name, text, name, usage)
    for name, now in _FORMER_HISTOGRAMS.items():
        yield _histogram(name, f"As {now}, for older dashboards", now, usage)


def _histogram(name: str, text: str, of: str, usage: list[ModelUsage]) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
    for model in usage:
        if (histogram := model.histograms.get(of)) is not None:
            family.add_metric([model.name, ENGINE], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [repr(bound) for bound in histogram.bounds]
    return [*zip(bounds, map(float, histogram.counts), strict=True), ("+Inf", float(histogram.count))]


# Insight as Prometheus metrics. Counters are those of the session: when an operator resets them they begin at 0,
# which Prometheus takes as a restart. A family of unknown values has no samples.


def insight_families(insight: Insight) -> Iterator[Metric]:
    """Goodput, busy time, context, energy and work."""
    yield from _session(insight)
    yield from _energy(insight)
    yield from _work(insight.work)


def _session(insight: Insight) -> Iterator[Metric]:
    session, goodput = insight.session, insight.goodput
    for name, text, value in (
        ("ericllm_busy_seconds", "Time with at least one worker computing", session.busy_s),
        ("ericllm_judged_requests", "Requests ended, except cancelled", goodput.judged),
        ("ericllm_goodput_requests", "Requests ended within the SLO", goodput.within_slo),
    ):
        yield CounterMetricFamily(name, text, value=value)
    longest = "Tokens of the longest request, prompt and answer"
    yield GaugeMetricFamily("ericllm_longest_context_tokens", longest, value=insight.longest_context_tokens)
    batch = GaugeMetricFamily("ericllm_mean_batch", "Mean batch size, in requests")
    if session.batch is not None:
        batch.add_metric([], session.batch)
    yield batch


def _energy(insight: Insight) -> Iterator[Metric]:
    energy = insight.energy
    drawn = "Energy drawn by the devices in use"
    session = CounterMetricFamily("ericllm_energy_joules", drawn)
    busy = CounterMetricFamily("ericllm_busy_energy_joules", f"{drawn} while a worker computed")
    today = GaugeMetricFamily("ericllm_energy_today_joules", f"{drawn} since midnight")
    if energy.power_w is not None or energy.today_joules:
        session.add_metric([], energy.session_joules)
        busy.add_metric([], energy.busy_joules)
        today.add_metric([], energy.today_joules)
    yield from (session, busy, today)


def _work(work: tuple[DeviceWork, ...]) -> Iterator[Metric]:
    for name, text, attribute in (
        ("ericllm_device_flops_per_second", "Operations per second of the models on a device", "flops_per_s"),
        ("ericllm_device_flops_limit_per_second", "Peak operations per second of a device", "flops_limit_per_s"),
        (
            "ericllm_device_read_bytes_per_second",
            "Bytes of weights and KV read per second from a device's memory",
            "bytes_per_s",
        ),
        ("ericllm_device_read_limit_bytes_per_second", "Peak memory bandwidth of a device", "bytes_limit_per_s"),
    ):
        family = GaugeMetricFamily(name, text, labels=["device"])
        for each in work:
            if (value := getattr(each, attribute)) is not None:
                family.add_metric([each.device], value)
        yield family


_MODEL_STATES: tuple[ModelState, ...] = get_args(ModelState)


@dataclass(frozen=True, slots=True)
class _WorkerGauge:
    """One number of every worker that has it."""

    name: str
    help: str
    read: Callable[[WorkerReading], float | None]


_WORKER_GAUGES = (
    _WorkerGauge("ericllm_worker_up", "1 while the worker is ready", lambda w: float(w.state == "ready")),
    _WorkerGauge("ericllm_worker_active_requests", "Running requests of the worker", lambda w: w.active),
    _WorkerGauge("ericllm_worker_max_prompts", "Slots of the worker (max_prompts)", lambda w: w.max_prompts),
    _WorkerGauge(
        "ericllm_worker_prompts_limit",
        "Max requests that fit in memory, 0 if not limited",
        lambda w: w.stats.prompts_limit,
    ),
    _WorkerGauge("ericllm_worker_deaths_in_a_row", "Crashes in a row", lambda w: w.deaths_in_a_row),
    _WorkerGauge("ericllm_worker_tokens_per_second", "Generated tokens per second", lambda w: w.tokens_per_s),
    _WorkerGauge("ericllm_worker_step_seconds", "Duration of the last step", lambda w: w.step_s),
    _WorkerGauge(
        "ericllm_worker_resident_bytes", "RAM of the worker process, its files in RAM included", lambda w: w.rss_bytes
    ),
    _WorkerGauge("ericllm_worker_kv_tokens", "KV cache capacity, in tokens", lambda w: w.kv_tokens),
    _WorkerGauge(
        "ericllm_worker_itl_floor_seconds",
        "Duration of a step of the running answers without a prompt, where an ITL target is set",
        lambda w: w.stats.itl.floor_s if w.stats.itl else None,
    ),
    _WorkerGauge(
        "ericllm_worker_step_prediction_error_ratio",
        "Median error of the predicted step durations that keep the ITL target",
        lambda w: w.stats.itl.error if w.stats.itl else None,
    ),
)


class SnapshotCollector(Collector):
    """Reads a snapshot, and what models were used for, at every scrape. Belongs to a registry of its own."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], usage: Callable[[], Iterable[ModelUsage]] = lambda: ()
    ) -> None:
        self._snapshot = snapshot
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """All metric families of the engine now, their labels as text that a terminal shows and does not obey."""
        for family in self._families():
            for at, sample in enumerate(family.samples):
                if not all(map(str.isprintable, sample.labels.values())):
                    labels = {name: printable(value) for name, value in sample.labels.items()}
                    family.samples[at] = sample._replace(labels=labels)
            yield family

    def _families(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        models = models_of(snapshot)
        yield from vllm_families(models, self._usage())
        yield from _gauges(snapshot)
        yield from _counters(snapshot)
        yield from _model_gauges(models)
        yield from _workers(snapshot)
        yield from _devices(snapshot)
        yield from insight_families(snapshot.insight)


def _model_gauges(models: list[ModelNow]) -> Iterator[Metric]:
    wanted = GaugeMetricFamily("ericllm_workers_wanted", "Workers set by the operator", labels=["model_name"])
    most = GaugeMetricFamily("ericllm_max_prompts", "Slots per worker (max_prompts)", labels=["model_name"])
    states = GaugeMetricFamily(
        "ericllm_model_state", "1 for the current state of the model", labels=["model_name", "state"]
    )
    for model in models:
        wanted.add_metric([model.name], model.workers_wanted)
        most.add_metric([model.name], model.max_prompts)
        for state in _MODEL_STATES:
            states.add_metric([model.name, state], float(state == model.state))
    yield from (wanted, most, states)


def _gauges(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("ericllm_uptime_seconds", "Uptime of the engine", snapshot.uptime_s)
    yield _gauge("ericllm_queue_limit", "Max queued requests", snapshot.max_queue)
    yield _gauge(
        "ericllm_draining", "1 while draining (new requests are refused)", float(snapshot.draining_since is not None)
    )


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    yield _counter("ericllm_requests", "Requests submitted", totals.requests)
    yield _counter("ericllm_requests_rejected", "Requests refused", totals.rejected)
    yield _counter("ericllm_requests_requeued", "Requests requeued after a worker was lost", totals.requeued)
    yield _counter("ericllm_worker_restarts", "Worker restarts", totals.worker_restarts)


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    for gauge in _WORKER_GAUGES:
        family = GaugeMetricFamily(gauge.name, gauge.help, labels=["worker", "model_name"])
        for worker in snapshot.workers:
            if (value := gauge.read(worker)) is not None:
                family.add_metric([worker.id, worker.model], value)
        yield family
    labels = ["tier", "worker", "model_name"]
    used = GaugeMetricFamily("ericllm_kv_tier_bytes", "KV pages in a tier, of all that share it", labels=labels)
    limit = GaugeMetricFamily("ericllm_kv_tier_limit_bytes", "Size limit of a tier of the KV cache", labels=labels)
    restored = CounterMetricFamily("ericllm_kv_tier_restored_pages", "KV pages read back from a tier", labels=labels)
    skipped = CounterMetricFamily("ericllm_kv_tier_skipped_pages", "KV pages not written to a tier", labels=labels)
    damaged = CounterMetricFamily(
        "ericllm_kv_tier_damaged_pages", "Damaged KV pages removed from a tier", labels=labels
    )
    for worker in snapshot.workers:
        for tier in worker.stats.kv_tiers:
            values = (tier.name, worker.id, worker.model)
            used.add_metric(values, tier.used_bytes)
            limit.add_metric(values, tier.limit_bytes)
            restored.add_metric(values, tier.restored_pages)
            skipped.add_metric(values, tier.skipped_pages)
            damaged.add_metric(values, tier.damaged_pages)
    yield from (used, limit, restored, skipped, damaged)


def _devices(snapshot: Snapshot) -> Iterator[Metric]:
    memory = GaugeMetricFamily("ericllm_device_memory_bytes", "Memory, by use", labels=["device", "part"])
    used = GaugeMetricFamily("ericllm_device_utilisation", "Device utilisation, 0 to 1", labels=["device"])
    heat = GaugeMetricFamily("ericllm_device_temperature_celsius", "Temperature", labels=["device"])
    power = GaugeMetricFamily("ericllm_device_power_watts", "Power drawn", labels=["device"])
    yield from _sensors(snapshot)
    for device in snapshot.devices:
        for part in ("weights", "kv", "work", "others", "free"):
            memory.add_metric([device.id, part], getattr(device, f"{part}_bytes"))
        for family, value in ((used, device.utilisation), (heat, device.temperature_c), (power, device.power_w)):
            if value is not None:
                family.add_metric([device.id], value)
    yield from (memory, used, heat, power)


_SENSORS: tuple[tuple[str, str, Callable[[DeviceReading, DeviceSensors], float | None]], ...] = (
    ("power_limit_watts", "Power limit", lambda device, _: device.power_limit_w),
    ("memory_utilisation", "Memory interface utilisation, 0 to 1", lambda _, s: s.memory_utilisation),
    ("sm_clock_mhz", "SM clock", lambda _, s: s.sm_clock_mhz),
    ("memory_clock_mhz", "Memory clock", lambda _, s: s.memory_clock_mhz),
    (
        "throttled",
        "1 while the clock is throttled",
        lambda _, s: None if (r := s.throttle_reasons) is None else bool(r),
    ),
    ("pcie_generation", "PCIe generation in use", lambda _, s: s.pcie_generation),
    ("pcie_width", "PCIe lanes in use", lambda _, s: s.pcie_width),
    ("pcie_rx_bytes_per_second", "Bytes received over PCIe", lambda _, s: s.pcie_rx_bytes_per_s),
    ("pcie_tx_bytes_per_second", "Bytes sent over PCIe", lambda _, s: s.pcie_tx_bytes_per_s),
    ("ecc_errors", "Uncorrected ECC errors since the driver was loaded", lambda _, s: s.ecc_errors),
    ("xid_errors", "Xid errors since the engine started", lambda _, s: _count(s.xid_errors)),
    ("fan_ratio", "Fan speed, 0 to 1", lambda _, s: s.fan),
)
"""Gauges of a device. One that it does not report has no sample."""


def _sensors(snapshot: Snapshot) -> Iterator[Metric]:
    for name, text, read in _SENSORS:
        family = GaugeMetricFamily(f"ericllm_device_{name}", text, labels=["device"])
        for device in snapshot.devices:
            if device.sensors is not None and (value := read(device, device.sensors)) is not None:
                family.add_metric([device.id], float(value))
        yield family


def _count(found: Sequence[object] | None) -> int | None:
    return None if found is None else len(found)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
