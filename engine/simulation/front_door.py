"""The one loop that every request and every token passes, as a queue with one server."""

from __future__ import annotations

from engine.simulation.cluster import FrontDoor


class FrontDoorLoad:
    """What the loop has yet to do. Work that comes is done in order; a stretch of a stream is work that comes evenly.

    busy_s: CPU seconds that it had to spend so far.
    """

    def __init__(self, costs: FrontDoor) -> None:
        self.costs = costs
        self.busy_s = 0.0
        self.most_behind_s = 0.0
        self._behind_s = 0.0
        self._even = 0.0
        self._now = 0.0

    @property
    def even_load(self) -> float:
        """Share of the loop that streams take now."""
        return self._even

    def behind_s(self, now: float) -> float:
        """Seconds of work ahead of what comes now."""
        self._pass(now)
        return self._behind_s

    def take(self, work_s: float, now: float) -> float:
        """Work comes; when it is done."""
        self._pass(now)
        self._behind_s += work_s
        self.busy_s += work_s
        self.most_behind_s = max(self.most_behind_s, self._behind_s)
        return now + self._behind_s

    def stream(self, share: float, now: float) -> None:
        """Streams take so much more of the loop from now on, or so much less."""
        self._pass(now)
        self._even = max(0.0, self._even + share)

    def _pass(self, now: float) -> None:
        passed = now - self._now
        if passed > 0:
            self._behind_s = max(0.0, self._behind_s + passed * (self._even - 1.0))
            self.busy_s += passed * self._even
            self._now = now
            self.most_behind_s = max(self.most_behind_s, self._behind_s)
