"""Where a run keeps its models, and how much of everything it does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROUNDS, _QUICK_ROUNDS = 3, 1


@dataclass(frozen=True, slots=True)
class Place:
    """One run's folder and measure. quick: fewer rounds, fewer sizes, the same promises.

    end_s: when the part at hand will be stopped, on time.monotonic's clock.
    """

    folder: Path
    quick: bool = False
    end_s: float = math.inf

    @property
    def models(self) -> Path:
        """The synthetic models of this run."""
        return self.folder / "models"

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of concurrent requests to measure at."""
        return (1, 32) if self.quick else (1, 8, 32, 64)

    def rounds(self, left: int = 1, clock: Callable[[], float] = time.monotonic) -> Iterator[bool]:
        """Interleaved rounds, and whether each counts: the first warms up, the next counts, and further ones are begun
        where there is time for them. left: measurements that share the rest of the time, this one among them."""
        started = clock()
        end_s = started + (self.end_s - started) / left
        yield False
        for done in range(_QUICK_ROUNDS if self.quick else _ROUNDS):
            now = clock()
            if done and now + 1.5 * (now - started) > end_s:
                return
            started = now
            yield True
