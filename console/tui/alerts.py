"""AlertWatch: which alerts of an engine an operator has seen, and which are still to be shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from console.tui.view import View
from engine.snapshot import Alert

TOAST_AGAIN_S = 30.0
"""An alert that occurs again has another toast, but not within this time of its last one."""


@dataclass(slots=True)
class _Seen:
    """Counts of one engine's alerts, by id: as of their last toast, with its time; as they were seen, and cleared."""

    toasted: dict[int, tuple[int, float]]
    seen: Mapping[int, int] = field(default_factory=dict)
    cleared: Mapping[int, int] = field(default_factory=dict)


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
