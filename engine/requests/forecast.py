"""WaitForecast: where the waiting requests of one model are in its queue, and when they are likely to get a worker."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.requests.request import Request
    from engine.scheduling.queue import ModelQueue

FRESH_S = 1.0
"""A forecast is made for all at most so often, and of each FRESH_QUEUE requests that wait: 3 us for each of them."""
FRESH_QUEUE = 1000
SHORT_QUEUE = 100
"""A request that comes into a queue of no more has its forecast at once."""
_WEIGHT = 0.95
"""Of what was measured before, with each new measurement: the last twenty or so count."""


class QueuePlace(msgspec.Struct, frozen=True):
    """Where a request waits. position: 1 is the next to get a worker.  expected_wait_s: None where it is unknown."""

    position: int
    expected_wait_s: float | None = None


class RecentMean:
    """Mean of an amount per unit, of the last measurements; None before the first."""

    __slots__ = ("_amount", "_units")

    def __init__(self) -> None:
        self._amount = 0.0
        self._units = 0.0

    def add(self, amount: float, units: float = 1.0) -> None:
        """Count a measurement."""
        self._amount = self._amount * _WEIGHT + amount
        self._units = self._units * _WEIGHT + units

    @property
    def value(self) -> float | None:
        """The mean now."""
        return self._amount / self._units if self._units else None


class WaitForecast:
    """Plays the queue forward: each place on a worker becomes free when the request that has it is likely to end, and
    goes to the next one.

    An answer is expected to become as long as those that ended lately, or as max_tokens allows. Where none has ended,
    only a max_tokens that its client chose says something, and a request without one is expected to end never, as one
    is whose speed is not yet measured. Pure: every call gets the time.
    num_places: requests that the workers can work on at once.
    """

    def __init__(self) -> None:
        self.num_places = 0
        self._prompt_token_s = RecentMean()
        self._gap_s = RecentMean()
        self._answer_tokens = RecentMean()
        self._places: dict[int, QueuePlace] = {}
        self._next_wait_s: float | None = None
        self._made_at = -math.inf

    def add_prompt(self, tokens: int, seconds: float) -> None:
        """Count a prompt whose first token came `seconds` after a worker took it."""
        self._prompt_token_s.add(seconds, tokens)

    def add_answer(self, request: Request) -> None:
        """Count an answer that ended by itself."""
        self._answer_tokens.add(len(request.generated))
        if request.num_gaps:
            self._gap_s.add(request.gaps_s, request.num_gaps)

    def place(self, request: Request, queue: ModelQueue, now: float) -> QueuePlace | None:
        """Return the place of a request, as of the last forecast; None where it does not wait for a worker.

        One that came into a long queue since the last forecast is taken to be its last.
        """
        if not queue.is_waiting(request):
            return None
        if request.order not in self._places and queue.queued <= SHORT_QUEUE:
            self._make(queue, now)
        self._refresh(queue, now)
        return self._places.get(request.order) or QueuePlace(queue.queued, self._next_wait_s)

    def next_wait_s(self, queue: ModelQueue, now: float) -> float | None:
        """Return the seconds that a request would wait that came now; None where that is unknown."""
        self._refresh(queue, now)
        return self._next_wait_s

    def _refresh(self, queue: ModelQueue, now: float) -> None:
        if now - self._made_at >= FRESH_S * max(1.0, queue.queued / FRESH_QUEUE):
            self._make(queue, now)

    def _make(self, queue: ModelQueue, now: float) -> None:
        waiting, running = queue.dispatcher.in_order(), [each for each in queue if each.worker is not None]
        gap_s = _mean_gap_s(running) or self._gap_s.value
        free_at = [math.inf]  # who waits for a worker that is lost, or for a model that loads, waits for no place
        if queue.waits.reason == "slot" and self.num_places:
            ends = sorted(self._prompt_left_s(each, now) + self._answer_s(each, gap_s) for each in running)
            free_at = [0.0] * (self.num_places - len(running)) + ends[max(0, len(running) - self.num_places) :]
        self._made_at, self._places = now, {}
        for position, request in enumerate(waiting, 1):
            wait_s = free_at[0]
            self._places[request.order] = QueuePlace(position, _finite(wait_s))
            if wait_s < math.inf:
                heapq.heapreplace(free_at, wait_s + self._prompt_s(request) + self._answer_s(request, gap_s))
        self._next_wait_s = _finite(free_at[0])

    def _prompt_s(self, request: Request) -> float:
        token_s = self._prompt_token_s.value
        return math.inf if token_s is None else len(request.prompt_ids) * token_s

    def _prompt_left_s(self, request: Request, now: float) -> float:
        if request.first_token is not None or request.dispatched is None:
            return 0.0
        return max(0.0, self._prompt_s(request) - (now - request.dispatched))

    def _answer_s(self, request: Request, gap_s: float | None) -> float:
        """Return the seconds of the tokens that it is likely to get from now on: of answers whose length is random, the
        rest is as long as the whole was."""
        left = (request.params.max_tokens or 0) - len(request.generated)
        expected = self._answer_tokens.value
        if left <= 0:
            return 0.0
        if gap_s is None or (expected is None and request.requested_params.max_tokens is None):
            return math.inf
        return gap_s * (left if expected is None else min(left, expected))


def _mean_gap_s(running: Sequence[Request]) -> float | None:
    """Return the mean time between tokens of the requests at work; None without any."""
    gaps = sum(each.num_gaps for each in running)
    return sum(each.gaps_s for each in running) / gaps if gaps else None


def _finite(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None
