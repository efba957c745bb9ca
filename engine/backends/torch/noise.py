"""Random numbers that are a function of a request's seed and a token's position alone."""

from __future__ import annotations

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in (0, 1), never its ends, that is a function of the arguments alone: the position-th output of
    SplitMix64 (Steele, Lea, Flood 2014), started from the mixed seed so that close seeds are unrelated. Another
    `stream` gives numbers that are independent of the first's."""
    start = _mix(seed & _MASK64)
    if stream:
        start = _mix(start ^ _mix(stream))
    bits = _mix((start + position * _GOLDEN) & _MASK64)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
