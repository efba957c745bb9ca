"""Times of day, as text."""

from __future__ import annotations

import time

MAX_TIME = 253_402_300_800.0
"""Unix time at which the year 10,000 begins: no calendar here goes further."""


def local_time(at: float, pattern: str = "%H:%M:%S") -> str:
    """Return a unix time as the clock on the wall has it; "–" for one, from elsewhere, that no calendar has."""
    try:
        return time.strftime(pattern, time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "–"
