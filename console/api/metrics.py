"""Everything as Prometheus metrics: vLLM's names where they mean the same (`vllm_metrics`), or ericllm_*."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.insight_metrics import insight_families
from console.api.vllm_metrics import ModelNow, models_of, vllm_families
from engine.snapshot import ModelState, Snapshot, WorkerReading
from engine.text.printable import printable
from engine.usage import ModelUsage

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
    wanted = GaugeMetricFamily("ericllm_workers_wanted", "Workers that the operator asked for", labels=["model_name"])
    most = GaugeMetricFamily("ericllm_max_prompts", "Requests that a worker may work on at once", labels=["model_name"])
    states = GaugeMetricFamily(
        "ericllm_model_state", "1 for the state that the model is in", labels=["model_name", "state"]
    )
    for model in models:
        wanted.add_metric([model.name], model.workers_wanted)
        most.add_metric([model.name], model.max_prompts)
        for state in _MODEL_STATES:
            states.add_metric([model.name, state], float(state == model.state))
    yield from (wanted, most, states)


def _gauges(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("ericllm_uptime_seconds", "Age of the engine", snapshot.uptime_s)
    yield _gauge("ericllm_queue_limit", "Requests that may wait", snapshot.max_queue)


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    yield _counter("ericllm_requests", "Requests submitted", totals.requests)
    yield _counter("ericllm_requests_rejected", "Requests refused", totals.rejected)
    yield _counter("ericllm_requests_requeued", "Requests that moved on from a lost worker", totals.requeued)
    yield _counter("ericllm_worker_restarts", "Workers started again", totals.worker_restarts)


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


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
