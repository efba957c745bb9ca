"""Lane: one model's requests: those that wait for one of its workers, and all that are live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.dispatcher import Dispatcher, Slot
from engine.usage import UsageMeter
from engine.worker.protocol import StepBatch

if TYPE_CHECKING:
    from engine.request import Request


class Lane:
    """The queue of one model with its decisions, and how many of its requests live. Every call is told the time.

    usage: what counts for the model.  longest_tokens: prompt and answer of the longest request that ended.
    """

    def __init__(self, queue: Dispatcher, usage: UsageMeter, now: float) -> None:
        self.usage = usage
        self.last_used = now
        self.longest_tokens = 0
        self._queue = queue
        self._live: dict[str, Request] = {}
        self._prepared: dict[str, asyncio.Task[None]] = {}

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue) + len(self._prepared)

    def has_share_left(self, client: str, max_queue: int) -> bool:
        """Return whether fewer requests of a client wait than its share of a queue of `max_queue`."""
        waiting = Counter(self._queue.queued_by_client())
        waiting.update(self._live[request_id].client for request_id in self._prepared)
        return waiting[client] < max_queue // len(waiting.keys() | {client})

    @property
    def running(self) -> int:
        """Requests that a worker works on."""
        return len(self._live) - self.queued

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        return not self._live

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not ended, in order of arrival here."""
        return iter(self._live.values())

    @property
    def live(self) -> tuple[Request, ...]:
        """Those requests now, whatever becomes of them meanwhile."""
        return tuple(self._live.values())

    def places(self, active: Iterable[Request]) -> Iterator[tuple[str, Request]]:
        """Every request of the model with the place where it is: "prepared", "queued", or its worker's id.

        active: the requests that its workers have. Raises AssertionError where the accounts disagree.
        """
        at_work = {request.wire_id: request for request in active}
        self._queue.check(at_work)
        found = [("queued", request) for request in self._queue.waiting()]
        found += [("prepared", self._live[request_id]) for request_id in self._prepared]
        found += [(request.worker or "no worker", request) for request in at_work.values()]
        assert {request.id for _, request in found} == self._live.keys(), f"{found} are not {list(self._live)}"
        return iter(found)

    def enter(self, request: Request, now: float) -> None:
        """Queue a request, new here, prepared, or back from a worker that was lost."""
        self._admit(request, now)
        self._prepared.pop(request.id, None)
        self._queue.add(request)

    def prepare(self, request: Request, work: asyncio.Task[None], now: float) -> None:
        """Keep a request until `work` is done with it, and queues it; `work` is cancelled where it leaves before."""
        self._admit(request, now)
        self._prepared[request.id] = work

    def _admit(self, request: Request, now: float) -> None:
        request.lane = self
        self.last_used = now
        self._live[request.id] = request

    def leave(self, request: Request, now: float) -> None:
        """A request ended, or goes to another lane."""
        self.last_used = now
        if (work := self._prepared.pop(request.id, None)) is not None:
            work.cancel()
        else:
            self._queue.remove(request)
        self._live.pop(request.id, None)

    def take_waiting(self) -> list[Request]:
        """Take out all that wait, in order; they are in no lane then."""
        waiting = [*self._queue.take_all(), *(self._live[request_id] for request_id in self._prepared)]
        for work in self._prepared.values():
            work.cancel()
        self._prepared.clear()
        for request in waiting:
            self._live.pop(request.id, None)
        return waiting

    def assign(self, slots: Sequence[Slot], now: float) -> list[tuple[Request, str]]:
        """The requests that go to a worker now, each with its worker's id."""
        return self._queue.assign(slots, now)

    def stepped(self, worker: str, batch: StepBatch) -> None:
        """A worker reports a step."""
        self._queue.stepped(worker, batch)

    def forget_workers(self, workers: Iterable[str]) -> None:
        """These workers' pages are gone."""
        for worker in workers:
            self._queue.forget_worker(worker)
