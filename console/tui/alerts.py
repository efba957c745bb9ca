"""AlertWatch: which alerts of an engine an operator has seen, and which are still to be shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from console.tui.view import View
from engine.snapshot import Alert


@dataclass(slots=True)
class _Seen:
    """Of one engine. shown: ids of alerts that had a toast, or were there before; counts: by id, as they were seen."""

    shown: set[int]
    counts: dict[int, int] = field(default_factory=dict)


class AlertWatch:
    """Belongs to one console; engines go by the names of their links."""

    def __init__(self) -> None:
        self._engines: dict[str, _Seen] = {}

    def follow(self, view: View) -> list[Alert]:
        """Return the alerts that came since the last frame; those from before the first one are no news."""
        if view.link_status.stale:
            return []
        alerts = view.published.alerts
        seen = self._engines.get(view.link_status.name)
        if seen is None:
            self._engines[view.link_status.name] = _Seen({each.id for each in alerts})
            return []
        fresh = [each for each in alerts if each.id not in seen.shown]
        seen.shown.update(each.id for each in fresh)
        return fresh

    def unseen(self, view: View) -> int:
        """Return how many alerts came, or came again, since the operator last looked."""
        seen = self._engines.get(view.link_status.name)
        counts = seen.counts if seen is not None else {}
        return sum(each.count > counts.get(each.id, 0) for each in view.published.alerts)

    def mark_seen(self, view: View) -> None:
        """The operator looks at them now."""
        if (seen := self._engines.get(view.link_status.name)) is not None:
            seen.counts = {each.id: each.count for each in view.published.alerts}
