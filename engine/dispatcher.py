"""Dispatcher: the one queue of a model, and which worker takes what. It decides; it has no clock and sends nothing.

Order: requests that lost their worker first, as their turn has come before; then clients share the places fairly
(`engine.dispatch.fairness`), and a client's own requests go by priority, which grows with waiting
(`engine.dispatch.line`). A request that lost several workers is a suspect and gets a worker to itself, so that it can
harm no other.

Worker: the one where the request costs least (`engine.dispatch.choose`), given which prefixes each holds, what each has
yet to compute, and what its steps were measured to cost (`engine.dispatch.workers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.dispatch.choose import Slot
from engine.dispatch.fairness import FairQueue
from engine.dispatch.line import Line
from engine.dispatch.workers import Fit, Workers
from engine.request import Request
from engine.worker.protocol import StepBatch

__all__ = ["OVERTAKERS", "Dispatcher", "Slot"]

OVERTAKERS = 16
"""How many of its equals a request lets go first at most, for the sake of its prefix."""

_MAX_PATIENT = 4096


@dataclass(slots=True)
class _Patient:
    """A request that would rather wait for a better place: the keys of its pages, and how many overtook it so far."""

    keys: Sequence[bytes]
    overtaken: int = 0


class Dispatcher:
    """The queue with its decisions. `len()` is how many wait. Every operation is O(log n), amortised, a step's report
    O(requests in it), and a prompt's pages are hashed once.

    ageing_s: waiting so long is worth one priority.  page_tokens, salt: how workers key the pages that they report
    (LoadedModel.page_tokens, ModelSpec.prefix_salt); where they report none, any will do.
    """

    def __init__(self, *, ageing_s: float = 30.0, page_tokens: int = 16, salt: bytes = b"") -> None:
        self._queue = FairQueue(ageing_s)
        self._lost = Line(ageing_s)
        self._suspects = Line(ageing_s)
        self._patient: dict[int, _Patient] = {}
        self._workers = Workers(page_tokens, salt)

    def __len__(self) -> int:
        return len(self._queue) + len(self._lost) + len(self._suspects)

    def queued_by_client(self) -> dict[str, int]:
        """How many requests of each client wait."""
        lost = Counter(request.client for line in (self._lost, self._suspects) for request in line)
        return dict(lost + Counter(self._queue.by_client()))

    def waiting(self) -> Iterator[Request]:
        """Every request that waits, in no particular order."""
        return chain(self._suspects, self._lost, self._queue)

    def check(self, active: Mapping[str, Request]) -> None:
        """Prove the accounts; active: the requests that workers have, by wire id. Raises AssertionError."""
        running = {wire_id: request.worker for wire_id, request in active.items()}
        assert self._workers.running == running, f"sent out {self._workers.running}, at work {running}"
        self._queue.check(Counter(request.client for request in active.values()))

    # -- in and out ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that had a worker goes to the head."""
        had_worker = self._release(request) or request.dispatched is not None
        if request.suspect:
            self._suspects.add(request)
        elif had_worker:
            self._lost.add(request)
        else:
            self._queue.add(request)

    def remove(self, request: Request) -> None:
        """A request has ended, or goes elsewhere: forget it, whether it waits or a worker works on it."""
        if not self._release(request):
            self._take_out(request)

    def take_all(self) -> list[Request]:
        """Take out all that wait, in order."""
        self._patient.clear()
        return [*self._suspects.take_all(), *self._lost.take_all(), *self._queue.take_all()]

    # -- who goes where -----------------------------------------------------------------------------------------

    def assign(self, slots: Sequence[Slot], now: float) -> list[tuple[Request, str]]:
        """Take the next requests out of the queue, each with the worker that is to have it, until all slots are full
        or none waits. Counts them into `slots`.

        A place is never kept empty for the sake of a prefix. But while the worker that holds a request's prefix is
        full, the request lets up to OVERTAKERS of its equals go first, if they fit better into the place there is
        (delay scheduling, Zaharia et al. 2010, counted in requests instead of seconds).

        One whose time is up at `now` is taken out and goes nowhere: whoever keeps its deadline is about to end it.
        """
        assigned: list[tuple[Request, str]] = []
        others = self._place_suspects(slots, now, assigned)
        while any(slot.free for slot in others) and (chosen := self._choose(others, now)) is not None:
            request, fit = chosen
            self._send(request, fit, assigned)
        return assigned

    def stepped(self, worker: str, batch: StepBatch) -> None:
        """A worker reports a step; before `remove` is called for the requests that ended in it."""
        self._workers.stepped(worker, batch)

    def forget_worker(self, worker: str) -> None:
        """The worker is gone, and its pages with it."""
        self._workers.forget(worker)

    def _place_suspects(self, slots: Sequence[Slot], now: float, assigned: list[tuple[Request, str]]) -> Sequence[Slot]:
        """Give suspects empty workers. Where one finds none, the least busy worker gets nothing more until it is empty;
        the slots of the others are returned."""
        while (request := self._suspects.first()) is not None:
            if _expired(request, now):
                self._take_out(request)
                continue
            empty = [slot for slot in slots if slot.free and not slot.active]
            if not empty:
                emptying = min(slots, key=lambda slot: slot.active, default=None)
                return [slot for slot in slots if slot is not emptying]
            fit = self._workers.fit(request, empty)
            self._send(request, fit, assigned)
            fit.slot.active = fit.slot.max_prompts
        return slots

    def _choose(self, slots: Sequence[Slot], now: float) -> tuple[Request, Fit] | None:
        """The request that goes next, and where to; None where none waits. One slot at least is free."""
        first: tuple[Request, Fit] | None = None
        patient: list[_Patient] = []
        for request in self._candidates(now):
            known = self._patient.get(request.order)
            fit = self._workers.fit(request, slots, known.keys if known else None)
            if not fit.may_wait or (known and known.overtaken >= OVERTAKERS):
                for each in patient:
                    each.overtaken += 1
                return request, fit
            patient.append(known or self._remember(request, fit))
            first = first or (request, fit)
        return first

    def _remember(self, request: Request, fit: Fit) -> _Patient:
        if len(self._patient) >= _MAX_PATIENT:
            self._patient.clear()
        patient = self._patient[request.order] = _Patient(fit.keys)
        return patient

    def _candidates(self, now: float) -> Iterator[Request]:
        """The next request, and then its equals that may overtake it, in order."""
        while (head := self._lost.first() or self._queue.first()) is not None:
            if not _expired(head, now):
                break
            self._take_out(head)
        if head is None:
            return
        yield head
        equals = (self._lost if head in self._lost else self._queue).leading(OVERTAKERS + 1)
        for request in equals:
            if request is not head and request.priority >= head.priority and not _expired(request, now):
                yield request

    def _send(self, request: Request, fit: Fit, assigned: list[tuple[Request, str]]) -> None:
        self._take_out(request)
        self._workers.send(request, fit)
        self._queue.began(request.client)
        assigned.append((request, fit.slot.worker))

    def _release(self, request: Request) -> bool:
        """Count a request as running no more; False where it did not run."""
        ran = self._workers.release(request)
        if ran:
            self._queue.ended(request.client)
        return ran

    def _take_out(self, request: Request) -> None:
        """Take a request out of the line it waits in."""
        self._patient.pop(request.order, None)
        if not self._queue.remove(request):
            self._lost.remove(request)
            self._suspects.remove(request)


def _expired(request: Request, now: float) -> bool:
    return 0 < request.timeout_s <= now - request.created
