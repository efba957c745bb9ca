"""Distributions: percentiles, histograms, a sketch of quantiles, and samples and rates of the last seconds. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from engine.snapshot import Histogram, Lengths, Percentiles, Spread

WINDOW_S = 60.0
RATE_WINDOW_S = 4.0
LENGTH_BOUNDS = tuple(2**power for power in range(4, 18))
RELATIVE_ERROR = 0.01
_MAX_SAMPLES = 4096
_MIN_VALUE = 1e-6
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)


def percentiles(
    samples: Iterable[float] | Mapping[float, int], *shares: float, interpolate: bool = False
) -> list[float | None]:
    """Return the values that these shares (0..1) of the samples do not exceed, None each for no samples.

    samples: values, or how often each value occurred.  interpolate: linearly between two samples, as numpy does by
    default; else the nearest rank, which is always one of the samples.
    """
    counts: Mapping[float, int] = samples if isinstance(samples, Mapping) else Counter(samples)
    if not counts:
        return [None] * len(shares)
    values = sorted(counts)
    ranks = list(accumulate(counts[value] for value in values))
    total = ranks[-1]

    def at(rank: int) -> float:
        return values[bisect_left(ranks, max(1, rank))]

    if not interpolate:
        return [at(math.ceil(share * total)) for share in shares]
    found: list[float | None] = []
    for share in shares:
        rank, fraction = divmod(share * (total - 1), 1)
        low, high = at(int(rank) + 1), at(min(int(rank) + 2, total))
        found.append(low + (high - low) * fraction)
    return found


class HistogramCounter:
    """Counts observations by bucket; an observation equal to a bound belongs to that bound's bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def freeze(self, limit: float = 0.0) -> Histogram:
        """Return the cumulative histogram, with bounds up to `limit` where that is not 0."""
        cumulative = tuple(accumulate(self.counts))
        shown = sum(bound <= limit for bound in self._bounds) if limit else len(self._bounds)
        return Histogram(bounds=self._bounds[:shown], counts=cumulative[:shown], count=cumulative[-1], sum=self._sum)


class QuantileSketch:
    """Quantiles of any number of measurements in little memory: DDSketch (Masson, Rim and Lee 2019).

    A measurement is counted in a bucket that ends `RELATIVE_ERROR` of it away on either side; those below a millionth
    count as 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._buckets: Counter[int] = Counter()
        self._zeros = 0
        self._min, self._max = math.inf, 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a measurement, 0 or more, `times` times."""
        self.count += times
        self.sum += value * times
        self._min, self._max = min(self._min, value), max(self._max, value)
        if value < _MIN_VALUE:
            self._zeros += times
        else:
            self._buckets[math.ceil(math.log(value) / _LOG_GAMMA)] += times

    def quantiles(self, *shares: float) -> list[float]:
        """Return the values that these ascending shares do not exceed (nearest rank). Of one measurement at least."""
        found: list[float] = []
        ascending: Iterator[tuple[int | None, int]] = iter([(None, self._zeros), *sorted(self._buckets.items())])
        bucket, passed = next(ascending)
        for share in shares:
            rank = math.ceil(share * self.count)
            while passed < rank:
                bucket, inside = next(ascending)
                passed += inside
            middle = 0.0 if bucket is None else 2 * _GAMMA**bucket / (_GAMMA + 1)
            found.append(min(self._max, max(self._min, middle)))
        return found

    def freeze(self) -> Spread:
        """Return mean, percentiles and the longest."""
        if not self.count:
            return Spread()
        p50, p90, p99 = self.quantiles(0.50, 0.90, 0.99)
        return Spread(count=self.count, mean=self.sum / self.count, p50=p50, p90=p90, p99=p99, longest=self._max)


class LengthCounter:
    """A distribution of lengths in tokens."""

    def __init__(self) -> None:
        self._sketch = QuantileSketch()
        self._histogram = HistogramCounter(LENGTH_BOUNDS)

    def add(self, tokens: int) -> None:
        """Count one length."""
        self._sketch.add(tokens)
        self._histogram.observe(tokens)

    def freeze(self) -> Lengths:
        """Return all that were counted."""
        return Lengths(spread=self._sketch.freeze(), bounds=LENGTH_BOUNDS, counts=tuple(self._histogram.counts))


class Rate:
    """Events per second over the last `window_s`; a rate that began less than a window ago is not diluted."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, now: float, count: int = 1) -> None:
        """Count `count` events at `now`."""
        self._prune(now)
        self._events.append((now, count))
        self._total += count

    def events(self, now: float) -> int:
        """Return the number of events in the window."""
        self._prune(now)
        return self._total

    def per_second(self, now: float) -> float:
        """Return the rate at `now`."""
        self._prune(now)
        if not self._events:
            return 0.0
        return self._total / max(1.0, min(self._window_s, now - self._events[0][0]))

    def _prune(self, now: float) -> None:
        while self._events and self._events[0][0] < now - self._window_s:
            self._total -= self._events.popleft()[1]


class SampleWindow:
    """The samples of the last `window_s` seconds, of the newest `_MAX_SAMPLES` calls at most."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now: float, value: float, times: int = 1) -> None:
        """Take a sample, `times` times."""
        self._samples.append((now, value, times))

    def percentiles(self, now: float) -> Percentiles:
        """Return p50, p95 and p99 of the samples still in the window."""
        while self._samples and self._samples[0][0] < now - self._window_s:
            self._samples.popleft()
        counts: Counter[float] = Counter()
        for _, value, times in self._samples:
            counts[value] += times
        p50, p95, p99 = percentiles(counts, 0.50, 0.95, 0.99)
        return Percentiles(p50=p50, p95=p95, p99=p99)
