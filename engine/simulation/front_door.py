"""The one loop that every request and every token passes, as a queue with one server."""

from __future__ import annotations

from engine.simulation.cluster import FrontDoor


class FrontDoorLoad:
    """What the loop has yet to do. Work that comes is done in order; a stretch of a stream is work that comes evenly.

    most_behind_s: how much that was at worst, in seconds of work.
    """

    def __init__(self, costs: FrontDoor) -> None:
        self.costs = costs
        self._work_s = 0.0
        self.most_behind_s = 0.0
        self._behind_s = 0.0
        self._even = 0.0
        self._now = 0.0

    def behind_s(self, now: float) -> float:
        """Seconds of work ahead of what comes now."""
        self._pass(now)
        return self._behind_s

    def busy_s_until(self, now: float) -> float:
        """CPU seconds that it spent until now."""
        self._pass(now)
        return self._work_s - self._behind_s

    def take(self, work_s: float, now: float) -> float:
        """Work comes; when it is done."""
        self._pass(now)
        self._behind_s += work_s
        self._work_s += work_s
        self.most_behind_s = max(self.most_behind_s, self._behind_s)
        return now + self._behind_s

    def message_s(self, outputs: int) -> float:
        """What a message about so many requests costs."""
        return self.costs.message_s + outputs * self.costs.output_s

    def stream(self, share: float, now: float) -> None:
        """Streams take so much more of the loop from now on, or so much less."""
        self._pass(now)
        self._even = max(0.0, self._even + share)

    def _pass(self, now: float) -> None:
        passed = now - self._now
        if passed > 0:
            self._behind_s = max(0.0, self._behind_s + passed * (self._even - 1.0))
            self._work_s += passed * self._even
            self._now = now
            self.most_behind_s = max(self.most_behind_s, self._behind_s)
