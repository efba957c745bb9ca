"""AlertLog: what went wrong lately, one entry for each cause, kept for every screen and for /admin/alerts."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from engine.errors import ErrorInfo
from engine.snapshot import Alert, AlertLevel

MAX_ALERTS = 200
MERGE_S = 120.0
"""The same cause within this time of its last occurrence counts in the same alert."""

_NO_MEMORY = ("out of memory", "insufficient_memory")


class AlertLog:
    """The newest alerts, oldest first. Belongs to the engine's loop; `latest` is a value that any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.latest: tuple[Alert, ...] = ()
        self._clock = clock

    def add(
        self, cause: str, subject: str, text: str, *, done: str = "", advice: str = "", level: AlertLevel = "error"
    ) -> Alert:
        """Add an alert, or count it in the one that has the same cause and subject. Returns it."""
        now = self._clock()
        same = self._find(cause, subject)
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
        return "Lower max prompts or the context, or load with fewer KV cache bits."
    if cause == "worker_hung":
        return "Read its last log lines. If its steps are only slow, raise --hang-seconds."
    if error.details.get("signal") == "SIGKILL":
        return "Check the kernel log for the OOM killer. If it was that, load fewer workers or a smaller context."
    return "Read what it wrote last: open the worker on the Dashboard, or Logs."


def advice_after_load(error: ErrorInfo) -> str:
    """Return what an operator can do about a load that failed."""
    if is_out_of_memory(error):
        return "Load it with fewer workers, a smaller context or fewer KV cache bits; Models shows what fits."
    return "Correct what the message names and load it again; Logs has the details."
