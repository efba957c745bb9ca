"""AlertWatch: which alerts and log warnings of an engine an operator has seen, and which are still to be shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from console.tui.view import View
from engine.snapshot import Alert, LogEntry

TOAST_AGAIN_S = 30.0
"""An alert that occurs again has another toast, but not within this time of its last one."""


@dataclass(slots=True)
class _Seen:
    """Counts of one engine's alerts, by id: as of their last toast, with its time; as they were seen, and cleared.

    logged: log lines that were counted or came before the first frame, None before it.  warnings: those of WARNING and
    above that were counted and not seen.
    """

    toasted: dict[int, tuple[int, float]]
    seen: Mapping[int, int] = field(default_factory=dict)
    cleared: Mapping[int, int] = field(default_factory=dict)
    logged: int | None = None
    warnings: int = 0


class AlertWatch:
    """Belongs to one console; engines go by the names of their links."""

    def __init__(self) -> None:
        self._engines: dict[str, _Seen] = {}

    def follow(self, view: View) -> list[Alert]:
        """Return the alerts that are due for a toast: those that came since the last frame, or came again. Those from
        before the first frame are no news."""
        if view.link_status.stale:
            return []
        alerts, now = view.published.alerts, view.published.at
        engine = self._engines.get(view.link_status.name)
        if engine is None:
            self._engines[view.link_status.name] = _Seen({each.id: (each.count, 0.0) for each in alerts})
            return []
        due = []
        for each in alerts:
            count, at = engine.toasted.get(each.id, (0, 0.0))
            if each.count > count and now - at >= TOAST_AGAIN_S:
                engine.toasted[each.id] = each.count, now
                due.append(each)
        return due

    def follow_log(self, view: View, read: Callable[[int], tuple[int, Sequence[LogEntry]]]) -> None:
        """Count the warnings and errors that were logged since the last frame; those from before the first one are no
        news. read: `EngineLink.logs`."""
        engine = self._engines.get(view.link_status.name)
        if engine is None or view.link_status.stale or view.published.log_total == engine.logged:
            return
        before = engine.logged
        engine.logged, entries = read(before if before is not None else view.published.log_total)
        if before is not None and engine.logged >= before:  # not wound back, as a recording may be
            engine.warnings += sum(entry.level >= logging.WARNING for entry in entries)

    def has_badge(self, view: View) -> bool:
        """Return whether there are alerts, or warnings in the log, that the operator has not seen."""
        engine = self._engines.get(view.link_status.name)
        return self.unseen(view) > 0 or (engine is not None and engine.warnings > 0)

    def mark_log_seen(self, view: View) -> None:
        """The operator looks at the log now, which says what the alerts say."""
        self.mark_seen(view)
        if (engine := self._engines.get(view.link_status.name)) is not None:
            engine.warnings = 0

    def listed(self, view: View) -> tuple[Alert, ...]:
        """Return the alerts that were not cleared, or came again since."""
        engine = self._engines.get(view.link_status.name)
        return _beyond(view, engine.cleared if engine is not None else {})

    def unseen(self, view: View) -> int:
        """Return how many alerts came, or came again, since the operator last looked."""
        engine = self._engines.get(view.link_status.name)
        return len(_beyond(view, engine.seen if engine is not None else {}))

    def mark_seen(self, view: View) -> None:
        """The operator looks at them now."""
        if (engine := self._engines.get(view.link_status.name)) is not None:
            engine.seen = _counts(view)

    def clear(self, view: View) -> None:
        """Take them off the list of this console."""
        if (engine := self._engines.get(view.link_status.name)) is not None:
            engine.seen = engine.cleared = _counts(view)


def _counts(view: View) -> dict[int, int]:
    return {each.id: each.count for each in view.published.alerts}


def _beyond(view: View, counts: Mapping[int, int]) -> tuple[Alert, ...]:
    return tuple(each for each in view.published.alerts if each.count > counts.get(each.id, 0))
