"""Insight as Prometheus metrics. Counters are those of the session: when an operator counts anew they begin at 0, which
Prometheus takes as a restart. A family of what is not known has no samples."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.insight_values import DeviceWork, Insight


def insight_families(insight: Insight) -> Iterator[Metric]:
    """Goodput, busy time, context, energy and work."""
    yield from _session(insight)
    yield from _energy(insight)
    yield from _work(insight.work)


def _session(insight: Insight) -> Iterator[Metric]:
    session, goodput = insight.session, insight.goodput
    for name, text, value in (
        ("ericllm_busy_seconds", "Time in which a worker computed", session.busy_s),
        ("ericllm_judged_requests", "Requests that ended, without those that were cancelled", goodput.judged),
        ("ericllm_goodput_requests", "Those of them that kept the SLO", goodput.kept),
    ):
        yield CounterMetricFamily(name, text, value=value)
    longest = "Prompt and answer of the longest request that ended"
    yield GaugeMetricFamily("ericllm_longest_context_tokens", longest, value=insight.longest_context_tokens)
    batch = GaugeMetricFamily("ericllm_mean_batch", "Requests in a step, on average")
    if session.batch is not None:
        batch.add_metric([], session.batch)
    yield batch


def _energy(insight: Insight) -> Iterator[Metric]:
    energy = insight.energy
    drawn = "Energy that the devices in use drew"
    session = CounterMetricFamily("ericllm_energy_joules", drawn)
    busy = CounterMetricFamily("ericllm_busy_energy_joules", f"{drawn} while a worker computed")
    today = GaugeMetricFamily("ericllm_energy_today_joules", f"{drawn} since midnight")
    if energy.power_w is not None or energy.today_joules:
        session.add_metric([], energy.session_joules)
        busy.add_metric([], energy.busy_joules)
        today.add_metric([], energy.today_joules)
    yield from (session, busy, today)


def _work(work: tuple[DeviceWork, ...]) -> Iterator[Metric]:
    for name, text, field in (
        ("ericllm_device_flops_per_second", "Operations that models ask of a device", "flops_per_s"),
        ("ericllm_device_flops_limit_per_second", "The most that it can", "flops_limit_per_s"),
        ("ericllm_device_read_bytes_per_second", "Weights and KV that models read of its memory", "bytes_per_s"),
        ("ericllm_device_read_limit_bytes_per_second", "The most that it can read", "bytes_limit_per_s"),
    ):
        family = GaugeMetricFamily(name, text, labels=["device"])
        for each in work:
            if (value := getattr(each, field)) is not None:
                family.add_metric([each.device], value)
        yield family
