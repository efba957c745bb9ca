"""SnapshotPublisher: closes a second of history, looks after workers and publishes a Snapshot, over and over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from engine.config import DeviceShare
from engine.devices import account
from engine.devices.health import DeviceWatch, DiskWatch
from engine.devices.sampler import DeviceSampler
from engine.metrics.insight import InsightCollector
from engine.metrics.meter import E2E, ITL, TTFT, Meter
from engine.models.deployment import Deployment
from engine.models.manager import ModelManager
from engine.requests.admission import RequestAdmission
from engine.requests.causes import describe_all, knobs_of
from engine.requests.tracker import RequestTracker
from engine.snapshot import DeviceReading, Insight, ModelReading, ModelStatus, Snapshot
from engine.system.log import LogRing
from engine.system.slow_disk import writes
from engine.workers.replica import Replica

# Building a Snapshot out of the engine's parts: the one place where live objects become frozen values.


def build_snapshot(
    *,
    at: float,
    now: float,
    started: float,
    models: ModelManager,
    tracker: RequestTracker,
    draining_since: float | None,
    meter: Meter,
    devices: Sequence[DeviceReading],
    log_total: int,
    insight: Insight,
) -> Snapshot:
    """The engine at unix time `at`, which is `now` on the loop's clock."""
    config, replicas, first = models.config, models.replicas(), models.first
    knobs = {deployment.key: knobs_of(deployment.config) for deployment in models}
    queued = models.num_queued
    return Snapshot(
        at=at,
        uptime_s=now - started,
        status=ModelStatus() if first is None else first.status(),
        models=tuple(map(model_reading, models)),
        target_workers=config.num_workers,
        max_prompts=config.max_prompts,
        step_tokens=config.step_tokens,
        threads=config.threads,
        idle_unload_s=config.idle_unload_s,
        max_queue=config.max_queue,
        devices=account(devices, _shares(models), models.busy_time.shares(now)),
        workers=tuple(
            msgspec.structs.replace(
                replica.reading(now),
                model=deployment.spec.name,
                max_prompts=deployment.config.max_prompts,
                tokens_per_s=meter.output_tokens_per_s(now, replica.id),
                slowness=deployment.model_queue.dispatcher.router.slowness(replica.id),
                why=describe_all(tracker.causes.recent(replica.id), knobs[deployment.key]),
            )
            for deployment in models
            for replica in deployment.replicas()
        ),
        requests=(*tracker.rows(now), *reversed(tracker.recent)),
        queued=queued,
        running=len(tracker.live) - queued,
        output_tokens_per_s=meter.output_tokens_per_s(now),
        prompt_tokens_per_s=meter.prompt_tokens_per_s(now),
        kv_usage=kv_usage(replicas),
        prefix_hit_rate=prefix_hit_rate(replicas),
        ttft=meter.recent[TTFT],
        itl=meter.recent[ITL],
        e2e=meter.recent[E2E],
        history=meter.history.seconds,
        hour=meter.history.hour,
        marks=meter.marks,
        totals=meter.totals(),
        log_total=log_total,
        insight=insight,
        errors_per_min=meter.errors_per_min(now),
        alerts=models.alerts.latest,
        why=describe_all(tracker.causes.recent(), next(iter(knobs.values())) if len(knobs) == 1 else {}),
        draining_since=draining_since,
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
    """Return the memory of each worker; weights that a model's CPU workers have in one mapping count for the first of
    them."""
    shares: dict[str, tuple[DeviceShare, ...]] = {}
    for deployment in models:
        counted = 0
        for replica in deployment.replicas():
            mine = replica.shares
            shared = replica.model.shared_bytes if replica.model is not None else 0
            if shared and len(mine) == 1 and mine[0].device.endswith("cpu"):
                rest = mine[0].weights_bytes - min(shared, counted)
                mine, counted = (msgspec.structs.replace(mine[0], weights_bytes=max(0, rest)),), shared
            shares[replica.id] = mine
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
        queued=deployment.model_queue.queued,
        running=deployment.model_queue.running,
        step_tokens=config.step_tokens,
        threads=config.threads,
        idle_unload_s=deployment.residency.idle_limit_s(config),
        adapters=deployment.adapters.readings(replicas),
        planned=loaded.planned if loaded is not None else (),
        used=loaded.used if loaded is not None else (),
        longest_context_tokens=deployment.model_queue.longest_tokens,
        waiting=deployment.waiting,
        plan=deployment.plan,
        loaded_by_request=deployment.loaded_by_request,
    )


_log = logging.getLogger("engine")
_PUBLISH_HZ = 4.0
_TICK_S = 1.0
_IDLE_TICKS = 2
"""Seconds between two readings of the devices while no request is live."""


class SnapshotPublisher:
    """Belongs to the loop that `start` ran on, but for `snapshot` and `publish_for`, which any thread may use.

    snapshot: the last publication. It is at most `publish_s` old while requests are live or wait for a model, and after
    anything was counted, logged or reported; while nothing happens it is built once a second.
    """

    def __init__(
        self,
        models: ModelManager,
        tracker: RequestTracker,
        admission: RequestAdmission,
        *,
        meter: Meter,
        sampler: DeviceSampler,
        insight: InsightCollector,
        log: LogRing,
    ) -> None:
        self._models = models
        self._tracker = tracker
        self._admission = admission
        self._meter = meter
        self._sampler = sampler
        self._insight = insight
        self._log = log
        self._device_watch = DeviceWatch(models.alerts)
        self._disk_watch = DiskWatch(models.alerts, writes)
        self._started = 0.0
        self._disagreement = ""
        self._published: tuple[object, ...] = ()
        self._ticks = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.publish_s = 1 / _PUBLISH_HZ
        config = models.config
        self.snapshot = Snapshot(at=time.time(), target_workers=config.num_workers, max_prompts=config.max_prompts)

    def start(self) -> None:
        """Begin."""
        self._started = asyncio.get_running_loop().time()
        self._tick()
        self._publish_and_repeat()

    def stop(self) -> None:
        """Do it no more."""
        for timer in self._timers.values():
            timer.cancel()

    def publish_for(self, hertz: float) -> None:
        """Publish as often as a screen shows it, and 4 times a second at least; from any thread."""
        self.publish_s = 1 / max(_PUBLISH_HZ, hertz)

    def publish(self) -> Snapshot:
        """Build the snapshot of this moment, and return it."""
        self._published = self._events()
        self.snapshot = build_snapshot(
            at=time.time(),
            now=asyncio.get_running_loop().time(),
            started=self._started,
            models=self._models,
            tracker=self._tracker,
            draining_since=self._admission.draining_since,
            meter=self._meter,
            devices=self._sampler.latest,
            log_total=self._log.total,
            insight=self._insight.latest,
        )
        return self.snapshot

    def _publish_and_repeat(self) -> None:
        if self._tracker.live or self._models.num_waiting or self._published != self._events():
            self.publish()
        self._timers["publish"] = asyncio.get_running_loop().call_later(self.publish_s, self._publish_and_repeat)

    def _events(self) -> tuple[object, ...]:
        """Return what differs after anything that is not published at once, as changes of models and workers are; the
        history does each second."""
        meter, alerts = self._meter, self._models.alerts
        return (
            meter.history.seconds[-1:],
            meter.totals(),
            len(self._tracker.live),
            self._log.total,
            alerts.latest,
            len(self._sampler.latest),
        )

    def _check_accounts(self) -> None:
        """Prove the accounts while nothing runs: a defect is logged before a request meets it."""
        try:
            self._models.check()
        except AssertionError as error:
            if str(error) != self._disagreement:
                self._disagreement = str(error)
                _log.error("internal accounting error: %s", error)

    def _tick(self) -> None:
        loop, replicas = asyncio.get_running_loop(), self._models.replicas()
        now = loop.time()
        self._meter.tick(
            now,
            time.time(),
            running=len(self._tracker.live) - self._models.num_queued,
            queued=self._models.num_queued,
            kv_usage=kv_usage(replicas),
            device_utilisation=tuple(device.utilisation for device in self.snapshot.devices),
            device_memory=tuple(map(memory_usage, self.snapshot.devices)),
        )
        if not self._tracker.live:
            self._check_accounts()
        for deployment in self._models:
            devices = {each.id: [share.device for share in each.shares] for each in deployment.replicas()}
            deployment.model_queue.dispatcher.router.compare(devices, now)
        self._tracker.tick([replica.id for replica in replicas])
        self._insight.tick(now, time.time(), replicas)
        self._device_watch.look(self.snapshot.devices)
        self._disk_watch.look()
        self._models.tick(now)
        if self._tracker.live or self._ticks % _IDLE_TICKS == 0:
            self._sampler.poll(self._models.pids())
        self._ticks += 1
        self._timers["tick"] = loop.call_later(_TICK_S, self._tick)
