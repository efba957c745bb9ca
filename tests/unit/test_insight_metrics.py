"""Insight as metrics: the names, and what is unknown is left out."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from console.api.metrics import SnapshotCollector
from engine.backends.base import BackendStats, ItlReport, KvTierStats
from engine.snapshot import DeviceWork, Insight, Snapshot
from tests.fakes import insight_scenes, scenes


def scraped(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """(name, position, device or tier, or "") -> value."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: snapshot))
    return {
        (
            sample.name,
            sample.labels.get("position") or sample.labels.get("device") or sample.labels.get("tier") or "",
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_insight_is_scraped_by_name() -> None:
    values = scraped(insight_scenes.hours_of_work())
    assert values["ericllm_judged_requests_total", ""] == 3981
    assert values["ericllm_goodput_requests_total", ""] == 3703
    assert values["ericllm_busy_seconds_total", ""] == 4953.0
    assert values["ericllm_energy_joules_total", ""] == 3.1e6
    assert values["ericllm_energy_today_joules", ""] == 4.46e6
    assert values["ericllm_longest_context_tokens", ""] == 6904
    assert values["ericllm_device_read_bytes_per_second", "cuda:1"] == 311e9
    assert values["ericllm_device_flops_limit_per_second", "cuda:0"] == 71.1e12


def test_each_tier_of_the_kv_cache_is_scraped_by_its_worker() -> None:
    tiers = (KvTierStats(name="host", used_bytes=5, limit_bytes=9, restored_pages=4, skipped_pages=3, damaged_pages=2),)
    values = scraped(scenes.empty(workers=(scenes.worker(0, stats=BackendStats(kv_tiers=tiers)),)))
    names = ("bytes", "limit_bytes", "restored_pages_total", "skipped_pages_total", "damaged_pages_total")
    assert [values[f"ericllm_kv_tier_{name}", "host"] for name in names] == [5, 9, 4, 3, 2]


def test_how_an_itl_target_is_kept_is_scraped_by_its_worker() -> None:
    def gauges(report: ItlReport | None) -> list[float | None]:
        values = scraped(scenes.empty(workers=(scenes.worker(0, stats=BackendStats(itl=report)),)))
        names = ("ericllm_worker_itl_floor_seconds", "ericllm_worker_step_prediction_error_ratio")
        return [values.get((name, "")) for name in names]

    assert gauges(ItlReport(target_s=0.05, floor_s=0.031, error=0.12)) == [0.031, 0.12]
    assert gauges(ItlReport(target_s=0.05, floor_s=0.031)) == [0.031, None], "not measured yet"
    assert gauges(None) == [None, None], "without a target"


def test_what_nobody_knows_is_left_out() -> None:
    values = scraped(scenes.empty(insight=Insight(work=(DeviceWork(device="cuda:0", flops_per_s=5.0),))))
    assert values["ericllm_device_flops_per_second", "cuda:0"] == 5.0
    assert ("ericllm_device_flops_limit_per_second", "cuda:0") not in values
    assert ("ericllm_energy_joules_total", "") not in values
