"""What a reader of foreign bytes may cost: a second of one processor, and 64 MiB beyond the bytes themselves."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

MAX_CPU_S = 1.0
"""Of a 2.5 GHz core at rest. One whose other thread is busy has half of its speed, or less, and that comes and goes."""
MAX_SLOWDOWN = 3.0
UNIT_S = 0.42e-3
"""What adding up `_UNIT` numbers takes on such a core at rest."""
_UNIT = 10_000
_EVERY_S = 0.02
"""Of processor time, between two looks at the core's speed."""
MAX_BYTES = 64 * 2**20

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")

T = TypeVar("T")


@contextmanager
def within_bounds(num_bytes: int = 0) -> Iterator[None]:
    """Assert that the block takes at most `MAX_CPU_S` of this thread and `MAX_BYTES` beyond `num_bytes`.

    Processor time, not the clock's: a busy machine fails nobody. Memory is this process's peak (Linux). What the files
    of tests before have left is not gone through by the garbage collector meanwhile, as in a console (see conftest.py).
    """
    _CLEAR.write_text("5")  # the peak starts over
    before = _resident("VmRSS")
    with _speed_samples() as samples:
        began_s, before_s = time.thread_time(), sum(samples)
        yield
        took_s = time.thread_time() - began_s - (sum(samples) - before_s)
    grew = _resident("VmHWM") - before
    if took_s > MAX_CPU_S:
        slowdown = min(MAX_SLOWDOWN, max(1.0, sum(samples) / len(samples) / UNIT_S))
        assert took_s <= MAX_CPU_S * slowdown, f"it took {took_s:.2f} s of a core that was {slowdown:.1f} times as slow"
    assert grew <= MAX_BYTES + num_bytes, f"it took {grew / 2**20:.0f} MiB beside {num_bytes / 2**20:.1f} MiB of input"


def outcome(read: Callable[[], T], num_bytes: int, *refusals: type[Exception]) -> T | str:
    """What `read` returns within bounds, or the sentence that it raises as one of `refusals`; any other exception is
    the test's failure, and so is a refusal that is not one clean line."""
    with within_bounds(num_bytes):
        try:
            return read()
        except refusals as error:
            sentence = str(error)
    assert sentence.strip(), "a refusal says what is wrong"
    assert sentence.isprintable(), f"a refusal is one line without control characters: {sentence[:200]!r}"
    assert len(sentence) <= 1000, f"a refusal of {len(sentence)} characters: {sentence[:200]!r}"
    return sentence


@contextmanager
def _speed_samples() -> Iterator[list[float]]:
    """Seconds that `_UNIT` takes, before the block and now and then while it runs."""
    samples: list[float] = []

    def take(*_: object) -> None:
        began_s, total = time.thread_time(), 0
        for number in range(_UNIT):
            total += number
        samples.append(time.thread_time() - began_s)

    take()
    before = signal.signal(signal.SIGPROF, take)
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    try:
        yield samples
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
