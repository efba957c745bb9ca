"""Speed and remaining time of loads and downloads, from their progress over the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.backends.base import LoadPhase, LoadProgress

WINDOW_S = 8.0
_MIN_S = 0.9


@dataclass(frozen=True, slots=True)
class Pace:
    """per_s: in the progress's unit.  left_s: None while nothing moves."""

    per_s: float
    left_s: float | None


class LoadPaces:
    """The last seconds of everything that loads, by any key."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def observe(self, at: float, loads: Mapping[str, LoadProgress]) -> dict[str, Pace]:
        """Note the progress of each load at `at` (seconds); return the measurable paces. Loads not named have ended."""
        self._tracks = {key: self._tracks.get(key) or _Track() for key in loads}
        paces = {key: self._tracks[key].observe(at, progress) for key, progress in loads.items()}
        return {key: pace for key, pace in paces.items() if pace is not None}


class _Track:
    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._of: tuple[LoadPhase, int] | None = None

    def observe(self, at: float, progress: LoadProgress) -> Pace | None:
        of = progress.phase, progress.total
        if of != self._of or (self._points and progress.done < self._points[-1][1]):
            self._points.clear()
            self._of = of
        if not self._points or at > self._points[-1][0]:
            self._points.append((at, progress.done))
        while len(self._points) > 2 and at - self._points[1][0] >= WINDOW_S:
            self._points.popleft()
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        if progress.total <= 0 or last_at - first_at < _MIN_S or progress.phase == "kernels":
            return None  # a compiler's files are few, and each takes seconds
        per_s = (last - first) / (last_at - first_at)
        return Pace(per_s, (progress.total - last) / per_s if per_s > 0 else None)
