"""What a reader of foreign bytes may cost: seconds of one processor, and 64 MiB beyond the bytes themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

MAX_CPU_S = 3.0
"""Where a quiet core takes at most one. What these bounds are for takes minutes: reading that grows with the square of
its input. Less would measure the machine, as a core whose caches and memory others use is several times as slow."""
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
    began_s = time.thread_time()
    yield
    took_s = time.thread_time() - began_s
    grew = _resident("VmHWM") - before
    assert took_s <= MAX_CPU_S, f"it took {took_s:.2f} s of a core"
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


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
