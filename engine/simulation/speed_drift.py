"""A machine that others use too is faster now and slower then. How its speed went is measured with the steps, and
played back: steps are slow in bursts, which noise of each step alone would even out within an answer."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from engine.simulation.step_costs import StepCosts, StepSample

STRETCH_S = 0.1
"""For as long the speed stays as it is."""


def measured_course(costs: StepCosts, samples: Sequence[StepSample]) -> tuple[float, ...]:
    """How much slower than `costs` say the steps were, taken one after the other, in stretches of about STRETCH_S. So
    that the costs stay what they are in all, the harmonic mean is 1: a stretch does the less the slower it is."""
    found: list[float] = []
    took_s = told_s = 0.0
    for sample in samples:
        took_s += sample.seconds
        told_s += costs.seconds(sample.shape)
        if took_s >= STRETCH_S:
            found.append(took_s / told_s)
            took_s = told_s = 0.0
    mean = len(found) / sum(1 / each for each in found) if found else 1.0
    return tuple(each / mean for each in found)


class Course:
    """The course of one worker, which begins somewhere else in it than that of others. Seconds are those simulated."""

    __slots__ = ("_factors", "_offset")

    def __init__(self, factors: Sequence[float], worker_id: str) -> None:
        self._factors = factors
        self._offset = zlib.crc32(worker_id.encode())

    def slower(self, now: float) -> float:
        """What prices are to be multiplied by now."""
        return self._factors[(int(now / STRETCH_S) + self._offset) % len(self._factors)] if self._factors else 1.0

    def left_s(self, now: float) -> float:
        """For how long."""
        return STRETCH_S - now % STRETCH_S if self._factors else math.inf
