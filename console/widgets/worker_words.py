"""What there is to say about a worker in a few words: why it died, when it starts again, how much it may take on."""

from __future__ import annotations

import math

from console.load_pace import Pace
from console.widgets import text
from console.widgets.states import is_dead
from engine.snapshot import WorkerReading


def places(worker: WorkerReading) -> int:
    """Requests it may work on at once: max prompts, or fewer where a step ran out of memory."""
    return min(worker.max_prompts, worker.stats.prompts_limit or worker.max_prompts)


def reason(worker: WorkerReading) -> str:
    """Why it died: "SIGKILL", "exit 1", "hung, silent for 31 s", else the whole sentence; "" where it did not."""
    if worker.last_error is None:
        return ""
    details = worker.last_error.details
    if signal := details.get("signal"):
        return str(signal)
    if (code := details.get("code")) is not None:
        return f"exit {code}"
    if isinstance(silent_s := details.get("silent_s"), float | int):
        return f"hung, silent for {silent_s:.0f} s"
    last = worker.last_error.message.rpartition("the last time: ")[2]  # of one that is left dead
    return last.removeprefix(f"worker {worker.id} ")


def trouble(worker: WorkerReading) -> str:
    """What follows the state's word: " in 4 s: SIGKILL", " after 5 deaths: exit 1"; "" where all is well."""
    if worker.state not in ("restarting", "failed"):
        return ""
    why = text.clip(reason(worker), 160)
    if worker.state == "restarting":
        wait = f" in {countdown(worker.retry_in_s)}" if worker.retry_in_s is not None else ""
        return f"{wait}: {why}" if why else wait
    if is_dead(worker) and worker.deaths_in_a_row:
        return f" after {text.plural(worker.deaths_in_a_row, 'death')}: {why}"
    return f" {why}"


def countdown(left_s: float) -> str:
    """Whole seconds, never 0 while there is anything left: "4 s"."""
    return f"{max(1, math.ceil(left_s))} s" if left_s > 0 else "0 s"


def left(pace: Pace | None) -> str:
    """ ", 12 s left", ", 2:05 left"; "" where it cannot be told."""
    if pace is None or pace.left_s is None:
        return ""
    whole_s = max(1, math.ceil(pace.left_s))
    return f", {f'{whole_s} s' if whole_s < 100 else text.seconds(whole_s)} left"
