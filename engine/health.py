"""What is the matter with a worker: whether it is hung, judged by how long it has been silent, and how one ended."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Literal

from engine.backends.base import LoadPhase, LoadProgress
from engine.snapshot import WorkerState
from engine.worker.hosts import WorkerExit

CHECK_S = 1.0
"""How often a worker is to be looked at."""

_LONGEST_TURN_S = 2 * CHECK_S
_SLOW_STEPS = 3.0

Activity = Literal["starting", "loading", "working", "idle"] | LoadPhase

PATIENCE = MappingProxyType[Activity, float](
    {
        "working": 1,
        "idle": 2,  # one that has nothing to do says so every second
        "starting": 2,
        "loading": 5,  # nothing reported yet: libraries are imported, the device is woken
        "download": 10,
        "make": 10,
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
        "idle": "had nothing to do",
        "starting": "started",
        "loading": "began to load",
        "download": "downloaded the model",
        "make": "made the model",
        "inspect": "looked at the model",
        "kernels": "compiled kernels",
        "wait": "waited for the weights that another worker makes",
        "weights": "loaded weights",
        "kv_cache": "allocated its KV cache",
        "warm_up": "warmed up",
    }
)


def activity(state: WorkerState, progress: LoadProgress | None, requests: int) -> Activity:
    """What a worker is at, with so many requests."""
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
    """Why a hung worker is replaced, in one sentence."""
    doing = _DOING.get(activity) or f"worked on {requests} request{'' if requests == 1 else 's'}"
    return f"worker {worker} reported nothing for {silent_s:.0f} s while it {doing}: replaced"


class AwakeClock:
    """Seconds during which our own loop turned. While it stands still (a suspended machine, a stopped process, a long
    callback) nobody hears what workers say, so silence in that time is no evidence and passes as two turns at most."""

    def __init__(self, now: float) -> None:
        self._turned_at = now
        self._awake_s = 0.0

    def turn(self, now: float) -> None:
        """The loop turns at `now`; to be called every CHECK_S."""
        self._awake_s, self._turned_at = self.read(now), now

    def read(self, now: float) -> float:
        """Seconds awake up to `now`."""
        return self._awake_s + min(now - self._turned_at, _LONGEST_TURN_S)


_CAUSES = MappingProxyType({"SIGKILL": "out of memory", "SIGBUS": "a weight file was cut short while it was read"})
"""What usually sends a signal that says nothing else."""


def describe_exit(worker: str, exit_: WorkerExit) -> str:
    """Why a worker ended, in one sentence with the line of its output that says most: a crash's first, or the last."""
    how = f"was ended by {exit_.signal}" if exit_.signal else f"exited with code {exit_.code}"
    if exit_.reason:
        how = f"was lost: {exit_.reason}"
    cause = _CAUSES.get(exit_.signal or "") if os.name == "posix" else None
    if cause is not None:
        how += f" ({cause}, perhaps)"
    lines = exit_.log_tail.strip().splitlines()
    crash = next((line for line in lines if line.startswith("Fatal Python error")), None)
    said = crash or (lines[-1].strip() if lines else "")
    return f"worker {worker} {how}" + (f": {said}" if said else "")
