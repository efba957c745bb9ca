"""Calls of native code that nobody can interrupt, and that may take hours: they are left to themselves in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_LOOK_S = 0.02
_MAX_LEFT = 2

T = TypeVar("T")


class BoundedCalls:
    """Calls that take so much processor time at most. After _MAX_LEFT that took more and have not ended yet, no other
    begins: each has a processor to itself."""

    def __init__(self) -> None:
        self._left: list[threading.Thread] = []

    def run(self, work: Callable[[], T], limit_s: float) -> T:
        """The result of `work`, which is done in a thread. Raises what it raises, or TimeoutError."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= _MAX_LEFT:
            raise TimeoutError
        call = _Call(work)
        thread = threading.Thread(target=call.run, name="bounded-call", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and call.taken_s() > limit_s:
                self._left.append(thread)
                raise TimeoutError
        return call.result()


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._clock = time.CLOCK_MONOTONIC
        self._began_s = time.clock_gettime(self._clock)

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._clock, self._began_s = time.pthread_getcpuclockid(threading.get_ident()), 0.0
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error

    def taken_s(self) -> float:
        """Processor time so far; 0 once it has ended."""
        try:
            return time.clock_gettime(self._clock) - self._began_s
        except OSError:
            return 0.0

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]
