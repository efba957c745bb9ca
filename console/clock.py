"""Times of day, as text."""

from __future__ import annotations

import time


def local_time(at: float, pattern: str = "%H:%M:%S") -> str:
    """Return a unix time as the clock on the wall has it; "–" for one, from elsewhere, that no calendar has."""
    try:
        return time.strftime(pattern, time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "–"
