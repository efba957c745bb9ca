"""Supervision of a worker: whether it hangs, by how long it has been silent, how one ended, and when it restarts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from engine.backends.base import LoadPhase, LoadProgress
from engine.errors import ErrorInfo, WorkerFailed
from engine.requests.request import QUARANTINE_DEATHS
from engine.snapshot import WorkerState
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import Event, LogLine, StepBatch

CHECK_S = 1.0
"""How often a worker is to be looked at."""

STALL_S = 10.0
"""A worker with requests that makes no step for this time stalls; where a hung one is replaced, for a quarter of the
time until then."""

_MAX_TURN_S = 2 * CHECK_S
_SLOW_STEPS, _STALL_STEPS = 3.0, 2.0

Activity = Literal["starting", "loading", "working", "idle"] | LoadPhase

PATIENCE = MappingProxyType[Activity, float](
    {
        "working": 1,
        "idle": 2,  # one that has nothing to do says so every second
        "starting": 5,  # libraries are imported, perhaps from a slow disk, by it or by what it is forked from
        "loading": 5,  # nothing reported yet: the device is woken
        "download": 10,
        "inspect": 5,
        "kernels": 30,  # compilers say nothing for minutes
        "wait": 5,
        "weights": 5,
        "kv_cache": 5,
        "warm_up": 10,  # kernels are chosen, and compiled where they are not yet
    }
)
"""How long a worker may be silent, as a multiple of the time after which one at work is hung."""

_DOING = MappingProxyType[Activity, str](
    {
        "idle": "was idle",
        "starting": "started",
        "loading": "started to load",
        "download": "downloaded the model",
        "inspect": "inspected the model",
        "kernels": "compiled kernels",
        "wait": "waited for another worker to load the weights",
        "weights": "loaded weights",
        "kv_cache": "allocated its KV cache",
        "warm_up": "warmed up",
    }
)


def activity(state: WorkerState, progress: LoadProgress | None, requests: int) -> Activity:
    """Return the current activity of a worker with this number of requests."""
    if state == "starting":
        return "starting"
    if state == "loading":
        return progress.phase if progress is not None else "loading"
    return "working" if requests else "idle"


def patience_s(activity: Activity, hang_s: float, slowest_step_s: float = 0.0) -> float:
    """Seconds of silence after which a worker is hung.

    One whose steps are slow (a large model on a CPU) gets three times the slowest of them: that is slow, not hung. It
    may still be in a step whose requests were cancelled when it has none.
    """
    return max(hang_s * PATIENCE[activity], _SLOW_STEPS * slowest_step_s)


def describe_silence(worker: str, silent_s: float, activity: Activity, requests: int) -> str:
    """Why a worker is taken for hung, in one sentence."""
    doing = _DOING.get(activity) or f"ran {requests} request{'' if requests == 1 else 's'}"
    return f"worker {worker} hung: no report for {silent_s:.0f} s while it {doing}"


class AwakeClock:
    """Seconds during which our own loop turned. While it stands still (a suspended machine, a stopped process, a long
    callback) no event of a worker is read, so silence in that time is no evidence and passes as two turns at most."""

    def __init__(self, now: float) -> None:
        self._turned_at = now
        self._awake_s = 0.0

    def turn(self, now: float) -> None:
        """The loop turns at `now`; to be called every CHECK_S."""
        self._awake_s, self._turned_at = self.read(now), now

    def read(self, now: float) -> float:
        """Seconds awake up to `now`."""
        return self._awake_s + min(now - self._turned_at, _MAX_TURN_S)


_CAUSES = MappingProxyType({"SIGKILL": "out of memory", "SIGBUS": "a weight file was truncated during reading"})
"""What usually sends a signal that says nothing else."""


def describe_exit(worker: str, exit_: WorkerExit) -> str:
    """Why a worker ended, in one sentence with the line of its output that says most: a crash's first, or the last."""
    how = f"was killed by {exit_.signal}" if exit_.signal else f"exited with code {exit_.code}"
    if exit_.reason:
        how = f"was lost: {exit_.reason}"
    cause = _CAUSES.get(exit_.signal or "") if os.name == "posix" else None
    if cause is not None:
        how += f" (probably {cause})"
    lines = exit_.log_tail.strip().splitlines()
    crash = next((line for line in lines if line.startswith("Fatal Python error")), None)
    line = crash or (lines[-1].strip() if lines else "")
    return f"worker {worker} {how}" + (f": {line}" if line else "")


# Heartbeat: when one worker last gave signs of life, and the pace that they show.

_MAX_CLOCK_DRIFT = 1e-4
"""Of the clocks of two machines, as a share of the time that passes."""


@dataclass(slots=True)
class Heartbeat:
    """Signs of life of one run of a worker, from its start to its end. Times are the event loop's clock, in seconds.

    heard: the awake clock's reading at its last sign, None before its start.
    worked: likewise at its last step, or when it got requests after it had none.
    step_at: its last report, or when the model was loaded.  step_ended_at: when the steps of that report ended, however
    late it arrived.  slowest_step_s: the longest step so far, the warm-up's among them.
    """

    awake: AwakeClock
    heard: float | None = None
    worked: float = 0.0
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
        """Note an event of the worker. Once the model is loaded, a line of output is no sign: a hung worker may still
        print."""
        if not isinstance(event, LogLine) or self.ready_at is None:
            self.heard = self.awake.read(now)
        if isinstance(event, StepBatch):
            self.step_at, self.step_s, self.rss_bytes = now, event.step_s, event.rss_bytes
            self.step_ended_at = self._ended_at(event.sent_s, now) if event.sent_s else now
            self.slowest_step_s = max(self.slowest_step_s, event.step_s)
            if event.steps:
                self.worked = self.awake.read(now)

    def begin_work(self, now: float) -> None:
        """The worker has requests, and had none."""
        self.worked = self.awake.read(now)

    def _ended_at(self, sent_s: float, now: float) -> float:
        """This clock's time at the worker's `sent_s`: the report that took least on its way shows how they differ."""
        drift_s = _MAX_CLOCK_DRIFT * max(0.0, sent_s - self._sent_s)
        self._sent_s, self._clock_ahead_s = sent_s, min(self._clock_ahead_s + drift_s, now - sent_s)
        return sent_s + self._clock_ahead_s

    def progressed(self, progress: LoadProgress, now: float) -> None:
        """The load moved on."""
        if progress.phase == "warm_up" and self._warm_up_at is None:
            self._warm_up_at = now

    def ready(self, now: float, step_s: float = 0.0) -> None:
        """The model is loaded. step_s: what a step of the largest size takes; where that is not reported, the warm-up
        was one."""
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

    def stalled_s(self, now: float, hang_s: float) -> float | None:
        """Seconds without a step that are too many for a worker with requests, None while they are not."""
        idle_s = self.awake.read(now) - self.worked
        limit_s = max(hang_s / 4 if hang_s else STALL_S, _STALL_STEPS * self.slowest_step_s)
        return idle_s if idle_s > limit_s else None

    @property
    def worked_s(self) -> float:
        """Seconds from when it was ready to its last report."""
        return 0.0 if self.ready_at is None or self.step_at is None else self.step_at - self.ready_at


# When a worker that died is started again, and when it is left dead.


class Backoff(msgspec.Struct, frozen=True):
    """Waits between restarts: none after the first death, then doubling from first_s up to last_s."""

    first_s: float
    last_s: float

    def delay_s(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`th death in a row (from 1)."""
        return min(self.last_s, self.first_s * 2.0 ** min(deaths - 2, 32)) if deaths > 1 else 0.0


@dataclass(slots=True)
class CrashCounter:
    """A worker's deaths in a row. One that has worked for longer than the longest wait begins a new row.

    in_a_row: deaths that may be the worker's own fault.  restarts: all since the row began; they lengthen the wait.
    """

    backoff: Backoff
    limit: int
    in_a_row: int = 0
    restarts: int = 0

    def add(self, worked_s: float, *, given_up: bool = False, is_away: bool = False) -> float | None:
        """Count a death after `worked_s` of work; seconds to wait until the next start, None to leave it dead.

        given_up: a request was given up with it as the likely cause: neither this death nor those that led to that
        verdict count against the worker, else a few bad requests would take it down for good.
        is_away: it could not start as its machine is not there, and is tried again until that is back.
        """
        if worked_s > self.backoff.last_s:
            self.forget()
        self.restarts += 1
        if is_away:
            return self.backoff.delay_s(self.restarts)
        self.in_a_row = max(0, self.in_a_row - QUARANTINE_DEATHS) if given_up else self.in_a_row + 1
        return None if self.in_a_row >= self.limit else self.backoff.delay_s(self.restarts)

    def left_dead(self, worker: str, last: ErrorInfo) -> ErrorInfo:
        """Why the worker is not started again. last: what it died of."""
        often = f"{self.in_a_row} times in a row" if self.in_a_row > 1 else "once"
        sentence = f"worker {worker} crashed {often}; not restarted. Last error: {last.message}"
        return WorkerFailed(sentence, **{**last.details, "worker": worker, "deaths": self.in_a_row}).info

    def forget(self) -> None:
        """Begin a new row: an operator wants it to be tried again."""
        self.in_a_row = self.restarts = 0
