"""What is noted of a simulation while it runs, and the outcome made of that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.scheduling.queue import ModelQueue
from engine.simulation.front_door import FrontDoorLoad
from engine.simulation.outcome import Moment, Outcome, Window
from engine.simulation.worker_slot import Station

MOMENT_S = 1.0


class Ledger:
    """Looks at the queue, the front door and the workers as time goes on."""

    def __init__(
        self, window: Window, model_queue: ModelQueue, front: FrontDoorLoad, stations: Sequence[Station]
    ) -> None:
        self.outcome = Outcome(window=window)
        self._model_queue = model_queue
        self._front = front
        self._stations = stations
        self._busy_s: list[tuple[float, ...]] = []
        self._live = 0
        self._counted_s = 0.0

    def note_busy(self, now: float) -> None:
        """How long the front door and each worker were busy until now."""
        front_s = self._front.busy_s_until(now)
        self._busy_s.append((front_s, *(station.busy_until(now) for station in self._stations)))

    def note_moments(self, now: float) -> None:
        """How things stood in every second until now."""
        moments = self.outcome.moments
        while len(moments) * MOMENT_S <= now:
            at_s = len(moments) * MOMENT_S
            behind_s = self._front.behind_s(at_s)
            moments.append(
                Moment(at_s=at_s, queued=self._model_queue.queued, running=self._model_queue.running, behind_s=behind_s)
            )

    def count_live(self, change: int, now: float) -> None:
        """So many more requests are there, or fewer."""
        self.outcome.area += self._live * (now - self._counted_s)
        self._live += change
        self._counted_s = now

    def concluded(self) -> Outcome:
        """All of it, now that nothing happens any more."""
        outcome, window = self.outcome, self.outcome.window
        outcome.seconds = max((each.ended_s for each in outcome.served), default=0.0)
        del outcome.moments[int(outcome.seconds / MOMENT_S) + 1 :]  # deadlines of what had ended long before
        self.note_busy(outcome.seconds)
        began, ended = self._busy_s[0], self._busy_s[1]
        seconds = max(min(window.until_s, outcome.seconds) - window.since_s, 1e-9)
        shares = [max(0.0, later - earlier) / seconds for earlier, later in zip(began, ended, strict=True)]
        outcome.front_busy, outcome.utilisation = shares[0], shares[1:]
        for station in self._stations:
            self.retire(station)
            outcome.steps += station.steps
        outcome.most_behind_s = self._front.most_behind_s
        return outcome

    def retire(self, station: Station) -> None:
        """The worker there is no more: its account goes over to the station."""
        worker, station.worker = station.worker, None
        if worker is not None:
            station.busy_s += worker.busy_s
            station.steps += worker.steps
            self.outcome.preemptions += worker.scheduler.counters.preemptions

    @property
    def dates(self) -> tuple[float, ...]:
        """When `note_busy` is due: where the window begins, and where it ends if it does."""
        window = self.outcome.window
        return (window.since_s,) if window.until_s == math.inf else (window.since_s, window.until_s)
