"""How far a run is, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence

Turn = tuple[str, int, str]
"""Shape, number of clients, row."""


class Pace:
    """Counts turns. One that is still to come will take as long as its like did; where there was none, as long a
    client as the turns so far did on average."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._left = list(turns)[::-1]
        self._count = len(turns)
        self._took_s: dict[Turn, float] = {}
        self._now: Turn | None = None

    def next(self, shape: str, clients: int, row: str) -> None:
        """A turn begins."""
        self._now = (shape, clients, row)
        self._left.pop()

    def took(self, seconds: float) -> None:
        """The turn that began took so long."""
        if self._now is not None:
            self._took_s[self._now] = seconds

    @property
    def left_s(self) -> float:
        """Seconds of the turns to come."""
        measured = [seconds / clients for (_, clients, _), seconds in self._took_s.items()]
        a_client_s = sum(measured) / len(measured) if measured else 0.0
        return sum(self._took_s.get(turn, a_client_s * turn[1]) for turn in self._left)

    @property
    def text(self) -> str:
        """In words."""
        return f"{self._count - len(self._left)} of {self._count}, about {self.left_s / 60:.0f} min left"
