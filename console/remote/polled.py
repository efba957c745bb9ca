"""Polled: answers for screens that cannot wait. They get the last one known, and asking has the next one fetched."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from engine.errors import EngineError

log = logging.getLogger(__name__)

FRESH_S = 0.75
KEPT = 4
"""Questions of one call whose answers are kept, those asked last: each may be as long as another instance has it."""


@dataclass(slots=True)
class _Answer:
    value: object
    asked_at: float = float("-inf")
    under_way: bool = False


class Polled:
    """Nothing is fetched that nobody asks for. submit: runs a coroutine elsewhere, from any thread."""

    def __init__(
        self, submit: Callable[[Coroutine[Any, Any, None]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._answers: dict[str, OrderedDict[Hashable, _Answer]] = {}
        self._lock = Lock()

    def get(
        self, call: str, arguments: Hashable, fetch: Callable[[], Coroutine[Any, Any, object]], blank: object
    ) -> object:
        """The last answer to a call with these arguments, `blank` before the first one."""
        now = self._clock()
        with self._lock:
            answers = self._answers.setdefault(call, OrderedDict())
            answer = answers.setdefault(arguments, _Answer(blank))
            answers.move_to_end(arguments)
            if len(answers) > KEPT:
                answers.popitem(last=False)
            due = not answer.under_way and now - answer.asked_at >= FRESH_S
            if due:
                answer.under_way, answer.asked_at = True, now
        if due:
            self._submit(self._fetch(answer, fetch))
        return answer.value

    def known(self, call: str, arguments: Hashable, blank: object) -> object:
        """The last answer, and nothing is fetched."""
        with self._lock:
            answer = self._answers.get(call, OrderedDict[Hashable, _Answer]()).get(arguments)
        return blank if answer is None else answer.value

    def forget(self) -> None:
        """Have everything fetched anew the next time it is asked for; what is known is shown until then."""
        with self._lock:
            for answers in self._answers.values():
                for answer in answers.values():
                    answer.asked_at = float("-inf")

    async def _fetch(self, answer: _Answer, fetch: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            answer.value = await fetch()
        except EngineError as error:  # a screen that polls shows what is known; what is asked for is told why
            log.debug("not fetched: %s", error.message)
        finally:
            answer.under_way = False
