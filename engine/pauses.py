"""What a program that draws, serves or computes steps does about pauses that Python itself makes."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)


def collect_rarely() -> None:
    """Look for cycles in memory less often, and never again among what exists by now: with the defaults, one look in
    the middle of a frame takes 0.2 s where much is on the screen, and requests keep servers and workers looking."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
