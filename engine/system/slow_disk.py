"""Slow disks: when a read of weights or a write of a file counts as slow, and which are."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SLOW_READ_BYTES_PER_S = 50 * 2**20
"""A hard disk reads twice as fast; what is slower is a network, a throttled volume or a disk that fails."""

READ_WINDOW_S = 10.0
"""A rate is the mean over this time."""
_SAMPLE_S = 0.5
_WAIT_BLOCKS = 256

MAX_BUSY_SHARE = 0.5
"""A load that computes for more of the time, quantizing weights say, is not held up by the disk."""

SLOW_WRITE_S = 2.0
"""One write of a log, a recording or a chat takes milliseconds."""


class ProcessUsage(NamedTuple):
    """busy_s: CPU time of this process.  waits: pages of mapped files, or 128 KiB otherwise, that it waited for."""

    busy_s: float
    waits: int


def process_usage() -> ProcessUsage:
    """Return what this process has used since its start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUsage(used.ru_utime + used.ru_stime, used.ru_majflt + used.ru_inblock // _WAIT_BLOCKS)


class ReadWatch:
    """Finds the rate at which one load reads its weights, where the disk is what holds it up."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, usage: Callable[[], ProcessUsage] = process_usage
    ) -> None:
        self._clock = clock
        self._usage = usage
        self._samples: deque[tuple[float, int, ProcessUsage]] = deque()
        self._slow_bytes_per_s: float | None = None

    def slow_bytes_per_s(self, done_bytes: int) -> float | None:
        """Note how many bytes are read; return the rate over READ_WINDOW_S where the disk is slow, else None."""
        now, samples = self._clock(), self._samples
        if not samples or now - samples[-1][0] >= _SAMPLE_S:
            samples.append((now, done_bytes, self._usage()))
            while now - samples[1 if len(samples) > 1 else 0][0] >= READ_WINDOW_S:
                samples.popleft()
            self._slow_bytes_per_s = self._rate()
        return self._slow_bytes_per_s

    def _rate(self) -> float | None:
        (began, done_before, before), (now, done, usage) = self._samples[0], self._samples[-1]
        if now - began < READ_WINDOW_S:
            return None
        rate, busy_share = (done - done_before) / (now - began), (usage.busy_s - before.busy_s) / (now - began)
        waited = usage.waits > before.waits and busy_share < MAX_BUSY_SHARE
        return rate if waited and rate < SLOW_READ_BYTES_PER_S else None


class SlowWrite(NamedTuple):
    """seconds: how long the slowest write took, or takes so far.  lost: lines for which there was no room."""

    seconds: float
    lost: int


class WriteWatch:
    """Writes of this process's logs, recordings and chats that are slow. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began: dict[Path, float] = {}
        self._slowest: dict[Path, float] = {}
        self._lost: Counter[Path] = Counter()

    @contextmanager
    def timed(self, path: Path | None) -> Iterator[None]:
        """Time a write to a file; one thread writes to each. None is no file."""
        if path is None:
            yield
            return
        began = self._clock()
        with self._lock:
            self._began[path] = began
        try:
            yield
        finally:
            took_s = self._clock() - began
            with self._lock:
                self._began.pop(path, None)
                if took_s >= SLOW_WRITE_S:
                    self._slowest[path] = max(took_s, self._slowest.get(path, 0.0))

    def lost(self, path: Path | None) -> None:
        """Count a line that did not fit into the queue of a file's writer."""
        if path is not None:
            with self._lock:
                self._lost[path] += 1

    def take(self) -> dict[Path, SlowWrite]:
        """Return the files with slow writes or lost lines since the last call, writes under way included."""
        with self._lock:
            now, slowest, lost = self._clock(), self._slowest, self._lost
            self._slowest, self._lost = {}, Counter()
            for path, began in self._began.items():
                if now - began >= SLOW_WRITE_S:
                    slowest[path] = max(now - began, slowest.get(path, 0.0))
        return {path: SlowWrite(slowest.get(path, 0.0), lost[path]) for path in {**slowest, **lost}}


writes = WriteWatch()
"""That of this process: its files are written by many parts, and its disks are the same for all of them."""
