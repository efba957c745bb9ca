"""A place for a worker, as the engine sees it."""

from __future__ import annotations

from engine.requests.request import Request
from engine.scheduling.routing import Slot
from engine.simulation.worker import SimulatedWorker


class Station:
    """A worker's place: the worker that is there, None while it is dead; and, as the engine sees it, which worker that
    is and its requests."""

    __slots__ = ("active", "busy_s", "index", "known", "slot", "steps", "wakes", "worker")

    def __init__(self, index: int, worker: SimulatedWorker, max_prompts: int) -> None:
        self.index = index
        self.worker: SimulatedWorker | None = worker
        self.known: SimulatedWorker | None = worker
        self.slot = Slot(worker=worker.id, active=0, max_prompts=max_prompts)
        self.active: dict[str, Request] = {}
        self.busy_s = 0.0
        self.steps = 0
        self.wakes = False

    def busy_until(self, now: float) -> float:
        """Seconds that its workers were in steps until now."""
        return self.busy_s + (self.worker.busy_until(now) if self.worker is not None else 0.0)

    def count(self) -> None:
        """Tell the slot how many requests there are; one that works on a suspect is full."""
        guarded = any(request.suspect for request in self.active.values())
        self.slot.active = self.slot.max_prompts if guarded else len(self.active)
