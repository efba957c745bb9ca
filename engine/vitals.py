"""Vitals: when one worker last gave signs of life, and what they tell of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.backends.base import LoadProgress
from engine.health import Activity, AwakeClock, patience_s
from engine.worker.protocol import Event, LogLine, StepBatch

_MAX_CLOCK_DRIFT = 1e-4
"""Of the clocks of two machines, as a share of the time that passes."""


@dataclass(slots=True)
class Vitals:
    """Signs of life of one run of a worker, from its start to its end. Times are the event loop's clock, in seconds.

    heard: the awake clock's reading at its last sign, None before its start.  step_at: its last report, or when the
    model was loaded.  step_ended_at: when the steps of that report ended, however late it arrived.
    slowest_step_s: the longest step so far, the warm-up's among them.
    """

    awake: AwakeClock
    heard: float | None = None
    ready_at: float | None = None
    step_at: float | None = None
    step_ended_at: float = 0.0
    step_s: float = 0.0
    slowest_step_s: float = 0.0
    rss_bytes: int = 0
    _warm_up_at: float | None = None
    _sent_s: float = 0.0
    _clock_ahead_s: float = math.inf

    def begin(self, now: float) -> None:
        """The worker is started."""
        self.heard = self.awake.read(now)

    def sign(self, event: Event, now: float) -> None:
        """It said something. Once the model is loaded, a line of output is no sign: a hung worker may still print."""
        if not isinstance(event, LogLine) or self.ready_at is None:
            self.heard = self.awake.read(now)
        if isinstance(event, StepBatch):
            self.step_at, self.step_s, self.rss_bytes = now, event.step_s, event.rss_bytes
            self.step_ended_at = self._ended_at(event.sent_s, now) if event.sent_s else now
            self.slowest_step_s = max(self.slowest_step_s, event.step_s)

    def _ended_at(self, sent_s: float, now: float) -> float:
        """This clock's time at the worker's `sent_s`: the report that took least on its way tells how they differ."""
        drift_s = _MAX_CLOCK_DRIFT * max(0.0, sent_s - self._sent_s)
        self._sent_s, self._clock_ahead_s = sent_s, min(self._clock_ahead_s + drift_s, now - sent_s)
        return sent_s + self._clock_ahead_s

    def progressed(self, progress: LoadProgress, now: float) -> None:
        """The load moved on."""
        if progress.phase == "warm_up" and self._warm_up_at is None:
            self._warm_up_at = now

    def ready(self, now: float, step_s: float = 0.0) -> None:
        """The model is loaded. step_s: what a step of the largest size takes; where that is not told, the warm-up was
        one."""
        self.ready_at = self.step_at = now
        if step_s or self._warm_up_at is None:
            self.slowest_step_s = step_s
        else:
            self.slowest_step_s = now - self._warm_up_at

    def hung_s(self, now: float, activity: Activity, hang_s: float) -> float | None:
        """Seconds of silence that are too many for what it is doing, None while they are not."""
        if self.heard is None or not hang_s:
            return None
        silent_s = self.awake.read(now) - self.heard
        return silent_s if silent_s > patience_s(activity, hang_s, self.slowest_step_s) else None

    @property
    def worked_s(self) -> float:
        """Seconds from when it was ready to its last report."""
        return 0.0 if self.ready_at is None or self.step_at is None else self.step_at - self.ready_at
