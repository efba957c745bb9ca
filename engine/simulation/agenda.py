"""What happens next in a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Happening = Callable[[float], None]


class Agenda:
    """Things to do by time; of those of one time, those that are `last` after the others, else as they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Happening]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_s(self) -> float:
        """When the next is due."""
        return self._heap[0][0]

    def at(self, at_s: float, happening: Happening, *, last: bool = False) -> None:
        """Do this then."""
        heapq.heappush(self._heap, (at_s, last, next(self._numbers), happening))

    def turn(self) -> float:
        """Do the next; when that was."""
        at_s, _, _, happening = heapq.heappop(self._heap)
        happening(at_s)
        return at_s
