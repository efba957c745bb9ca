"""AlertLog: what went wrong lately, one entry for each cause, kept for every screen and for /admin/alerts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from engine.errors import EngineError, ErrorInfo, LoadCancelled
from engine.snapshot import Alert, AlertLevel

if TYPE_CHECKING:
    from engine.metrics.meter import Meter

MAX_ALERTS = 200
MERGE_S = 120.0
"""The same cause within this time of its last occurrence counts in the same alert."""

MARK_S = 10.0
"""An alert that occurs again after a pause of this time is another mark in graphs: a client that is always refused
would fill them."""

LESS_MEMORY = "Lower max prompts or the context, or load with fewer KV cache bits."
"""Advice where memory ran out while a model served."""

_NO_MEMORY = ("out of memory", "insufficient_memory")


class AlertLog:
    """The newest alerts, oldest first, each with a mark in the history of `meter`. Belongs to the engine's loop;
    `latest` is a value that any thread may read."""

    def __init__(self, meter: Meter | None = None, clock: Callable[[], float] = time.time) -> None:
        self.latest: tuple[Alert, ...] = ()
        self._meter = meter
        self._clock = clock

    def add(
        self, cause: str, subject: str, text: str, *, done: str = "", advice: str = "", level: AlertLevel = "error"
    ) -> Alert:
        """Add an alert, or count it in the one that has the same cause and subject. Returns it."""
        now = self._clock()
        same = self._find(cause, subject)
        if self._meter is not None and (same is None or now - same.last_at >= MARK_S):
            words = _WORKER_MARKS.get(cause) or cause.replace("_", " ")
            self._meter.mark(now, f"{subject}: {words}", kind=_mark_kind(cause, level))
        if same is not None and now - same.last_at <= MERGE_S:
            alert = msgspec.structs.replace(
                same, last_at=now, text=text, done=done, advice=advice, level=level, count=same.count + 1
            )
            self._replace(same, alert)
            return alert
        newest = self.latest[-1].id if self.latest else 0
        alert = Alert(
            id=max(newest + 1, int(now * 1000)),
            at=now,
            last_at=now,
            cause=cause,
            subject=subject,
            text=text,
            done=done,
            advice=advice,
            level=level,
        )
        self.latest = (*self.latest, alert)[-MAX_ALERTS:]
        return alert

    def add_done(self, alert_id: int, done: str) -> None:
        """Replace what was done about an alert, where it is still kept."""
        alert = next((each for each in self.latest if each.id == alert_id), None)
        if alert is not None:
            self._replace(alert, msgspec.structs.replace(alert, done=done))

    def _find(self, cause: str, subject: str) -> Alert | None:
        return next((each for each in reversed(self.latest) if (each.cause, each.subject) == (cause, subject)), None)

    def _replace(self, old: Alert, new: Alert) -> None:
        self.latest = tuple(new if each is old else each for each in self.latest)


# Causes, and what an operator can do about each.


_WORKER_MARKS = {"worker_died": "crashed", "worker_hung": "hung"}


def _mark_kind(cause: str, level: AlertLevel) -> str:
    """Return the kind of an alert's mark, as in Mark.kind."""
    if cause in _WORKER_MARKS:
        return "worker"
    return "failure" if level == "error" or cause == "out_of_memory" else "warning"


def cause_of_death(error: ErrorInfo) -> str:
    """Return why a worker ended: out_of_memory, worker_hung or worker_died."""
    if is_out_of_memory(error):
        return "out_of_memory"
    return "worker_hung" if "silent_s" in error.details else "worker_died"


def is_out_of_memory(error: ErrorInfo) -> bool:
    """Return whether an error says that memory ran out. One of a kill from outside only guesses that."""
    sentence = f"{error.code} {error.message}".lower()
    return error.details.get("signal") is None and any(sign in sentence for sign in _NO_MEMORY)


def advice_after_death(error: ErrorInfo) -> str:
    """Return what an operator can do about a worker that ended."""
    cause = cause_of_death(error)
    if cause == "out_of_memory":
        return LESS_MEMORY
    if cause == "worker_hung":
        return "Read its last log lines. If its steps are slow, raise --hang-seconds."
    if error.details.get("signal") == "SIGKILL":
        return "Check the kernel log for the OOM killer. If it was that, load fewer workers or a smaller context."
    return "Read its last output: open the worker on the Dashboard, or Logs."


def add_failed_load(alerts: AlertLog, name: str, error: EngineError, done: str) -> None:
    """Add an alert of a model's load that failed; one that was cancelled did not."""
    if isinstance(error, LoadCancelled):
        return
    short = PurePath(name).name  # an error of a folder names it so
    is_named = error.message.startswith((name, f"{short} "))
    text = error.message if is_named else f"{name} could not be loaded: {error.message}"
    cause = "out_of_memory" if is_out_of_memory(error.info) else "load_failed"
    alerts.add(cause, name, text, done=done, advice=advice_after_load(error.info))


def advice_after_load(error: ErrorInfo) -> str:
    """Return what an operator can do about a load that failed."""
    if is_out_of_memory(error):
        return "Load it with fewer workers, a smaller context or fewer KV cache bits; Models shows what fits."
    return "Correct the cause and load it again; Logs has the details."
