"""Building a Snapshot out of the engine's parts: the one place where live objects become frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.desk import Desk
from engine.devices import Claim, split_memory
from engine.fleet import Fleet
from engine.metrics import E2E, ITL, TTFT, Metrics
from engine.replica import Replica
from engine.snapshot import DeviceReading, ModelStatus, RequestRow, Snapshot


def build_snapshot(
    *,
    at: float,
    now: float,
    started: float,
    fleet: Fleet,
    desk: Desk,
    metrics: Metrics,
    devices: Sequence[DeviceReading],
    log_total: int,
) -> Snapshot:
    """The engine at unix time `at`, which is `now` on the loop's clock."""
    replicas, config, first = fleet.replicas(), fleet.config, fleet.first
    queued = fleet.queued
    return Snapshot(
        at=at,
        uptime_s=now - started,
        status=ModelStatus() if first is None else first.status(),
        models=tuple(deployment.reading() for deployment in fleet),
        target_workers=config.num_workers,
        max_prompts=config.max_prompts,
        max_queue=config.max_queue,
        devices=tuple(split_memory(device, claim_on(device.id, replicas)) for device in devices),
        workers=tuple(
            msgspec.structs.replace(replica.reading(now, deployment.config.max_prompts), model=deployment.spec.name)
            for deployment in fleet
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
        histograms=metrics.freeze_histograms(),
        log_total=log_total,
    )


def kv_usage(replicas: Iterable[Replica]) -> float:
    """The share of all KV pages that live requests hold, 0..1."""
    stats = [replica.stats for replica in replicas]
    total = sum(each.pages_total for each in stats)
    return 1 - sum(each.pages_free for each in stats) / total if total else 0.0


def prefix_hit_rate(replicas: Iterable[Replica]) -> float | None:
    """The share of prompt tokens that were found in the prefix cache; None before the first prompt."""
    stats = [replica.stats for replica in replicas]
    queried = sum(each.prefix_query_tokens for each in stats)
    return sum(each.prefix_hit_tokens for each in stats) / queried if queried else None


def claim_on(device: str, replicas: Iterable[Replica]) -> Claim:
    """Weights and KV pages of all replicas on one device; one that does not say how it shares several out is taken to
    share them evenly."""
    weights = kv = 0
    for replica in replicas:
        shares = [share for share in replica.shares if share.device == device]
        devices = replica.model.devices if replica.model else (replica.device,)
        if replica.shares:
            loaded = replica.model is not None
            weights += sum(share.weights_bytes for share in shares) if loaded else replica.stats.weights_bytes
            kv += sum(share.kv_bytes for share in shares) if loaded else replica.stats.kv_bytes
        elif device in devices:
            weights += replica.stats.weights_bytes // len(devices)
            kv += replica.stats.kv_bytes // len(devices)
    return Claim(weights_bytes=weights, kv_bytes=kv)


def _live_rows(desk: Desk, replicas: Iterable[Replica], now: float) -> list[RequestRow]:
    computed = {
        sequence.request_id: sequence.computed_tokens for replica in replicas for sequence in replica.stats.sequences
    }
    return [request.row(now, computed.get(request.wire_id)) for request in desk.live.values()]
