"""Pulse: what the engine does over and over: closes a second of history, looks after workers, publishes a Snapshot."""

from __future__ import annotations

import asyncio
import logging
import time

from engine.desk import Desk
from engine.log import LogRing
from engine.metrics import Metrics
from engine.models.manager import ModelManager
from engine.observer import Observer
from engine.sampler import DeviceSampler
from engine.snapshot import Snapshot
from engine.view import build_snapshot, kv_usage, memory_usage

_log = logging.getLogger("engine")
_PUBLISH_HZ = 4.0
_TICK_S = 1.0


class Pulse:
    """Belongs to the loop that `start` ran on, but for `snapshot` and `publish_for`."""

    def __init__(
        self,
        models: ModelManager,
        desk: Desk,
        *,
        metrics: Metrics,
        sampler: DeviceSampler,
        observer: Observer,
        log: LogRing,
    ) -> None:
        self._models = models
        self._desk = desk
        self._metrics = metrics
        self._sampler = sampler
        self._observer = observer
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = 0.0
        self._disagreement = ""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.publish_s = 1 / _PUBLISH_HZ
        config = models.config
        self._published = Snapshot(at=time.time(), target_workers=config.num_workers, max_prompts=config.max_prompts)

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._tick()
        self._publish_and_repeat()

    def stop(self) -> None:
        """Do it no more."""
        for timer in self._timers.values():
            timer.cancel()

    def snapshot(self) -> Snapshot:
        """The engine now; from another thread the one published last, at most `publish_s` old."""
        try:
            if asyncio.get_running_loop() is self._loop:
                self.publish()
        except RuntimeError:
            pass  # another thread, with no loop
        return self._published

    @property
    def published(self) -> Snapshot:
        """The one published last, at most `publish_s` old; from any thread."""
        return self._published

    def publish_for(self, hertz: float) -> None:
        """Publish as often as a screen shows it, and 4 times a second at least; from any thread."""
        self.publish_s = 1 / max(_PUBLISH_HZ, hertz)

    def publish(self) -> None:
        """Make the engine as it is now what is shown."""
        self._published = build_snapshot(
            at=time.time(),
            now=asyncio.get_running_loop().time(),
            started=self._started,
            models=self._models,
            desk=self._desk,
            metrics=self._metrics,
            devices=self._sampler.latest,
            log_total=self._log.total,
            insight=self._observer.latest,
        )

    def _publish_and_repeat(self) -> None:
        self.publish()
        self._timers["publish"] = asyncio.get_running_loop().call_later(self.publish_s, self._publish_and_repeat)

    def _prove(self) -> None:
        """Prove the accounts while nothing runs: a defect is said before somebody waits for it."""
        try:
            self._models.check()
        except AssertionError as error:
            if str(error) != self._disagreement:
                self._disagreement = str(error)
                _log.error("the engine's accounts do not agree: %s", error)

    def _tick(self) -> None:
        loop, replicas = asyncio.get_running_loop(), self._models.replicas()
        now = loop.time()
        self._metrics.tick(
            now,
            time.time(),
            running=len(self._desk.live) - self._models.queued,
            queued=self._models.queued,
            kv_usage=kv_usage(replicas),
            device_utilisation=tuple(device.utilisation for device in self._published.devices),
            device_memory=tuple(map(memory_usage, self._published.devices)),
        )
        if not self._desk.live:
            self._prove()
        self._observer.tick(now, time.time(), replicas)
        self._models.tick(now)
        self._sampler.poll(self._models.pids())
        self._timers["tick"] = loop.call_later(_TICK_S, self._tick)
