"""Building a Snapshot out of the engine's parts: the one place where live objects become frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.config import DeviceShare
from engine.desk import Desk
from engine.devices import account
from engine.insight_values import Insight
from engine.metrics import Metrics
from engine.models.deployment import Deployment
from engine.models.manager import ModelManager
from engine.replica import Replica
from engine.snapshot import DeviceReading, ModelReading, ModelStatus, RequestRow, Snapshot
from engine.usage import E2E, ITL, TTFT


def build_snapshot(
    *,
    at: float,
    now: float,
    started: float,
    models: ModelManager,
    desk: Desk,
    metrics: Metrics,
    devices: Sequence[DeviceReading],
    log_total: int,
    insight: Insight,
) -> Snapshot:
    """The engine at unix time `at`, which is `now` on the loop's clock."""
    config, replicas, first = models.config, models.replicas(), models.first
    queued = models.queued
    return Snapshot(
        at=at,
        uptime_s=now - started,
        status=ModelStatus() if first is None else first.status(),
        models=tuple(map(model_reading, models)),
        target_workers=config.num_workers,
        max_prompts=config.max_prompts,
        max_queue=config.max_queue,
        devices=account(devices, _shares(models), models.busy_time.shares(now)),
        workers=tuple(
            msgspec.structs.replace(replica.reading(now, deployment.config.max_prompts), model=deployment.spec.name)
            for deployment in models
            for replica in deployment.replicas()
        ),
        requests=(*_live_rows(desk, replicas, now), *reversed(desk.recent)),
        queued=queued,
        running=len(desk.live) - queued,
        output_tokens_per_s=metrics.output_rate.per_second(now),
        prompt_tokens_per_s=metrics.prompt_rate.per_second(now),
        kv_usage=kv_usage(replicas),
        prefix_hit_rate=prefix_hit_rate(replicas),
        ttft=metrics.recent[TTFT],
        itl=metrics.recent[ITL],
        e2e=metrics.recent[E2E],
        history=metrics.history,
        marks=metrics.marks,
        totals=metrics.totals(),
        log_total=log_total,
        insight=insight,
    )


def kv_usage(replicas: Iterable[Replica]) -> float:
    """The share of all KV pages that live requests hold, 0..1."""
    stats = [replica.stats for replica in replicas]
    total = sum(each.pages_total for each in stats)
    return 1 - sum(each.pages_free for each in stats) / total if total else 0.0


def memory_usage(device: DeviceReading) -> float:
    """The share of a device's memory that is in use, 0..1."""
    return 1 - device.free_bytes / device.total_bytes if device.total_bytes else 0.0


def prefix_hit_rate(replicas: Iterable[Replica]) -> float | None:
    """The share of prompt tokens that were found in the prefix cache; None before the first prompt."""
    stats = [replica.stats for replica in replicas]
    queried = sum(each.prefix_query_tokens for each in stats)
    return sum(each.prefix_hit_tokens for each in stats) / queried if queried else None


def _shares(models: ModelManager) -> dict[str, tuple[DeviceShare, ...]]:
    """What each worker holds; weights that a model's CPU workers have in one mapping count for the first of them."""
    shares: dict[str, tuple[DeviceShare, ...]] = {}
    for deployment in models:
        counted = 0
        for replica in deployment.replicas():
            held = replica.shares
            shared = replica.model.shared_bytes if replica.model is not None else 0
            if shared and len(held) == 1 and held[0].device.endswith("cpu"):
                left = held[0].weights_bytes - min(shared, counted)
                held, counted = (msgspec.structs.replace(held[0], weights_bytes=max(0, left)),), shared
            shares[replica.id] = held
    return shares


def model_reading(deployment: Deployment) -> ModelReading:
    """One model. What was planned and used is the first worker's that was loaded."""
    replicas, config = deployment.replicas(), deployment.config
    loaded = next((replica for replica in replicas if replica.model is not None), None)
    return ModelReading(
        key=deployment.key,
        name=deployment.spec.name,
        status=deployment.status(),
        target_workers=config.num_workers,
        max_prompts=config.max_prompts,
        queued=deployment.lane.queued,
        running=deployment.lane.running,
        idle_unload_s=config.idle_unload_s,
        adapters=deployment.adapters.readings(replicas),
        planned=loaded.planned if loaded is not None else (),
        used=loaded.used if loaded is not None else (),
        longest_context_tokens=deployment.lane.longest_tokens,
    )


def _live_rows(desk: Desk, replicas: Iterable[Replica], now: float) -> list[RequestRow]:
    computed = {
        sequence.request_id: sequence.computed_tokens for replica in replicas for sequence in replica.stats.sequences
    }
    return [request.row(now, computed.get(request.wire_id)) for request in desk.live.values()]
