"""When a worker that died is started again, and when it is left dead."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.errors import ErrorInfo, WorkerFailed
from engine.request import SUSPECT_DEATHS


class Backoff(msgspec.Struct, frozen=True):
    """Waits between restarts: doubling from first_s up to last_s."""

    first_s: float
    last_s: float

    def delay_s(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`th death in a row (from 1)."""
        return min(self.last_s, self.first_s * 2.0 ** min(deaths - 1, 32))


@dataclass(slots=True)
class Deaths:
    """A worker's deaths in a row. One that has worked for longer than the longest wait begins a new row.

    in_a_row: deaths that may be the worker's own fault.  restarts: all since the row began; they lengthen the wait.
    """

    backoff: Backoff
    limit: int
    in_a_row: int = 0
    restarts: int = 0

    def add(self, worked_s: float, *, given_up: bool = False) -> float | None:
        """Count a death after `worked_s` of work; seconds to wait until the next start, None to leave it dead.

        given_up: a request was given up with it as the likely cause: neither this death nor those that led to that
        verdict count against the worker, else a few bad requests would take it down for good.
        """
        if worked_s > self.backoff.last_s:
            self.forget()
        self.restarts += 1
        self.in_a_row = max(0, self.in_a_row - SUSPECT_DEATHS) if given_up else self.in_a_row + 1
        return None if self.in_a_row >= self.limit else self.backoff.delay_s(self.restarts)

    def left_dead(self, worker: str, last: ErrorInfo) -> ErrorInfo:
        """Why the worker is not started again. last: what it died of."""
        often = f"{self.in_a_row} times in a row" if self.in_a_row > 1 else "once"
        sentence = f"worker {worker} died {often} and is left dead; the last time: {last.message}"
        return WorkerFailed(sentence, **{**last.details, "worker": worker, "deaths": self.in_a_row}).info

    def forget(self) -> None:
        """Begin a new row: an operator wants it to be tried again."""
        self.in_a_row = self.restarts = 0
