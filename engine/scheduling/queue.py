"""ModelQueue: one model's requests, those that wait for one of its workers and all that are live."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Generic, TypeVar

from engine.requests.causes import WaitClock
from engine.requests.forecast import QueuePlace, WaitForecast
from engine.requests.request import Request
from engine.scheduling.routing import Fit, Router, Slot
from engine.worker_process.protocol import StepBatch

# A priority queue whose items may change their key or leave at any time.

Key = TypeVar("Key", float, tuple[float, int])
Item = TypeVar("Item", int, str)

_SLACK = 16


class MutableHeap(Generic[Key, Item]):
    """Items by key, the smallest first, equal keys by item. Every operation is O(log n), amortised.

    An item that changes or leaves is only forgotten; its old entry stays in the heap until it comes up or entries
    outnumber items twice, when the heap is made again.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._keys: dict[Item, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: Item, key: Key) -> None:
        """Add an item, or change its key."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, item))
            self._tidy()

    def discard(self, item: Item) -> Key | None:
        """Take an item out; return its key, None where it was not in."""
        key = self._keys.pop(item, None)
        if key is not None:
            self._tidy()
        return key

    def clear(self) -> None:
        """Take all out."""
        self._keys.clear()
        self._heap.clear()

    def first(self) -> Item | None:
        """The item with the smallest key; None where there is none."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def leading(self, count: int) -> list[Item]:
        """Up to `count` items with the smallest keys, in order; O(count log n)."""
        found: dict[Item, Key] = {}
        while len(found) < count and self.first() is not None:
            key, item = heapq.heappop(self._heap)
            found[item] = key  # one that left and came back with the same key has two entries
        for item, key in found.items():
            heapq.heappush(self._heap, (key, item))
        return list(found)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)


# Waiting requests in order of urgency.


def urgency(request: Request, ageing_s: float) -> float:
    """Smaller goes first: the moment of arrival, moved back by `ageing_s` for each priority.

    The effective priority, priority + waited / ageing_s, grows equally fast for all who wait. So their order never
    changes, one number given at arrival is enough to keep it, and a request gets past any stream of requests that
    are p priorities higher once it has waited p * ageing_s longer than they.
    """
    return request.created - request.priority * ageing_s


class PriorityQueue:
    """Requests by urgency, equal ones by order of arrival. Every operation is O(log n), amortised."""

    __slots__ = ("_ageing_s", "_heap", "_requests")

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: MutableHeap[float, int] = MutableHeap()
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._requests

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order."""
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Put it at its place."""
        self._requests[request.order] = request
        self._heap.put(request.order, urgency(request, self._ageing_s))

    def remove(self, request: Request) -> None:
        """Take it out, if it is in."""
        if self._requests.pop(request.order, None) is not None:
            self._heap.discard(request.order)

    def first(self) -> Request | None:
        """The most urgent one."""
        order = self._heap.first()
        return None if order is None else self._requests[order]

    def leading(self, count: int) -> list[Request]:
        """Up to `count` of the most urgent ones, in order."""
        return [self._requests[order] for order in self._heap.leading(count)]

    def in_order(self) -> list[Request]:
        """All of them, in order; nothing is taken out."""
        return sorted(self._requests.values(), key=lambda each: (urgency(each, self._ageing_s), each.order))

    def take_all(self) -> list[Request]:
        """Take all out, in order."""
        requests = self.in_order()
        self._heap = MutableHeap()
        self._requests.clear()
        return requests


# Whose request is next: clients share the work of the workers fairly.

_REMEMBERED = 8


class _Client:
    """One client's waiting requests, how many of its requests are worked on, the work of its requests in tokens, those
    worked on included, and when it last had a place (a count of such events, not a time)."""

    __slots__ = ("running", "turn", "waiting", "work")

    def __init__(self, waiting: PriorityQueue, turn: int, work: float) -> None:
        self.waiting = waiting
        self.running = 0
        self.turn = turn
        self.work = work


class FairQueue:
    """A line of requests per client. The next request is that of the client whose requests took the least work; among
    equals, of the one that has gone longest without a place. Within a client it is the most urgent one.

    Work is counted in tokens, as the caller weighs them: the virtual token counter of Sheng et al., "Fairness in
    Serving Large Language Models" (OSDI 2024). What a request is expected to take is counted when it gets a place, so
    that clients with equal requests hold equally many places; it is corrected as the request takes more or less. The
    work of two clients that both wait differs by no more than that of their largest request.

    A client that begins to wait is level with the one that got a place last, as that one was before it, so nothing is
    saved up. The work of one that is gone still counts while it is more than that: sending long requests one after the
    other is no way around it. As many absent clients are remembered as there are others, _REMEMBERED at least, those
    with most work; the level rises to that of the rest, so that ever new clients cannot lock out one that had more than
    they. Where no client has a request, all is forgotten.

    Every operation is O(log n), amortised.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._clients: dict[str, _Client] = {}
        self._next: MutableHeap[tuple[float, int], str] = MutableHeap()
        self._absent: MutableHeap[float, str] = MutableHeap()
        self._level = 0.0
        self._turns = count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, in no particular order."""
        return (request for client in self._clients.values() for request in client.waiting)

    def check(self, running: Mapping[str, int]) -> None:
        """Prove the accounts; running: requests at work of each client. Raises AssertionError."""
        waiting = {name: len(client.waiting) for name, client in self._clients.items()}
        assert self._waiting == sum(waiting.values()), f"{self._waiting} requests counted, {waiting} wait"
        counted = {name: client.running for name, client in self._clients.items() if client.running}
        assert counted == running, f"clients have {counted} requests at work, not {running}"

    def add(self, request: Request) -> None:
        """Queue a request."""
        client = self._client(request.client)
        if not len(client.waiting):
            client.work = max(client.work, self._level)
        self._waiting -= len(client.waiting)
        client.waiting.add(request)
        self._waiting += len(client.waiting)
        self._rank(request.client, client)

    def remove(self, request: Request) -> bool:
        """Take a waiting request out; False where it is not in."""
        client = self._clients.get(request.client)
        if client is None or request not in client.waiting:
            return False
        client.waiting.remove(request)
        self._waiting -= 1
        self._rank(request.client, client)
        return True

    def first(self) -> Request | None:
        """The next request; None where none waits."""
        name = self._next.first()
        return None if name is None else self._clients[name].waiting.first()

    def leading(self, count: int) -> list[Request]:
        """The next request and up to `count` - 1 that might as well be: those of clients whose work is more than that
        of its client by no more than its prompt."""
        requests: list[Request] = []
        clients = [self._clients[name] for name in self._next.leading(count)]
        for client in clients:
            if not requests or client.work <= clients[0].work + len(requests[0].prompt_ids):
                requests += client.waiting.leading(count - len(requests))
        return requests

    def heads(self, count: int) -> list[Request]:
        """The next request of each client, up to `count`, in order."""
        heads = (self._clients[name].waiting.first() for name in self._next.leading(count))
        return [request for request in heads if request is not None]

    def start(self, name: str, work: float) -> None:
        """Count that a request of this client got a place, and is expected to take this much work."""
        client = self._client(name)
        first = self._next.first()
        least = client.work if first is None else min(client.work, self._clients[first].work)
        self._level = max(self._level, least)
        client.running += 1
        client.turn = next(self._turns)
        self.charge(name, work)

    def charge(self, name: str, work: float) -> None:
        """Count more work of a client that has requests here; less where it is negative."""
        client = self._clients[name]
        client.work += work
        self._rank(name, client)

    def finish(self, name: str, unused: float = 0.0) -> None:
        """Count that a request of this client, which had a place, has it no more. unused: work that it did not take."""
        client = self._clients[name]
        client.running -= 1
        client.turn = next(self._turns)
        self.charge(name, -unused)

    def take_all(self, work_of: Callable[[Request], float]) -> list[Request]:
        """Take all waiting requests out, in the order of `in_order`."""
        requests = self.in_order(work_of)
        for request in requests:
            self.remove(request)
        return requests

    def in_order(self, work_of: Callable[[Request], float]) -> list[Request]:
        """All waiting requests in the order in which they would get places if none ended; nothing is taken out.

        work_of: what a request is expected to take.
        """
        lines = {name: iter(client.waiting.in_order()) for name, client in self._clients.items()}
        turns = count(1 + max((client.turn for client in self._clients.values()), default=0))
        heap = [(client.work, client.turn, name) for name, client in self._clients.items()]
        heapq.heapify(heap)
        requests: list[Request] = []
        while heap:
            work, _, name = heap[0]
            if (request := next(lines[name], None)) is None:
                heapq.heappop(heap)
            else:
                requests.append(request)
                heapq.heapreplace(heap, (work + work_of(request), next(turns), name))
        return requests

    def by_client(self) -> dict[str, int]:
        """How many requests of each client wait, of those that have any."""
        return {name: len(client.waiting) for name, client in self._clients.items() if len(client.waiting)}

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            work = max(self._absent.discard(name) or 0.0, self._level)
            client = self._clients[name] = _Client(PriorityQueue(self._ageing_s), next(self._turns), work)
        return client

    def _rank(self, name: str, client: _Client) -> None:
        """Put a changed client at its place; one without a request is absent."""
        if len(client.waiting):
            self._next.put(name, (client.work, client.turn))
            return
        self._next.discard(name)
        if not client.running:
            del self._clients[name]
            self._leave(name, client.work)

    def _leave(self, name: str, work: float) -> None:
        """A client has no request here any more."""
        if not self._clients:
            self._absent.clear()
            self._level = 0.0
        elif work > self._level:
            self._absent.put(name, work)
            if len(self._absent) > max(_REMEMBERED, len(self._clients)):
                least = self._absent.first()
                assert least is not None
                self._level = max(self._level, self._absent.discard(least) or 0.0)


# Dispatcher: the one queue of a model, and which worker takes what. It decides; it has no clock and sends nothing.
#
# Order: requests that lost their worker first, as their turn has come before; then clients share the work fairly
# (FairQueue), and a client's own requests go by priority, which grows with waiting (`urgency`). A request that lost
# several workers is quarantined: it gets a worker to itself, so that it can harm no other.
#
# Worker: the one where the request costs least (`engine.scheduling.routing`), given which prefixes each holds, what
# each has yet to compute, and what its steps were measured to cost (`engine.scheduling.routing`).

__all__ = ["MAX_OVERTAKERS", "Dispatcher", "Slot"]

MAX_OVERTAKERS = 16
"""How many of its equals a request lets go first at most, for the sake of its prefix."""

ANSWER_WEIGHT = 2.0
"""Work of a generated token, in prompt tokens: computed one at a time, it costs more (as in Sheng et al., 2024)."""

_MAX_PREFIX_WAITERS = 4096


@dataclass(slots=True)
class _PrefixWaiter:
    """A request that would rather wait for a better place: the keys of its pages, and how many overtook it so far."""

    keys: Sequence[bytes]
    overtaken: int = 0


class Dispatcher:
    """The queue with its decisions. `len()` is how many wait. Every operation is O(log n), amortised, a step's report
    O(requests in it), and a prompt's pages are hashed once.

    ageing_s: waiting so long is worth one priority.  page_tokens, salt: how workers key the pages that they report
    (LoadedModel.page_tokens, ModelSpec.prefix_salt); where they report none, any will do.
    router: where a request fits, from what workers report.  holds_back: a place is free that the clients which wait may
    not have yet, see `_open_to`; `assign` has to be called with the next report.
    """

    def __init__(self, *, ageing_s: float = 30.0, page_tokens: int = 16, salt: bytes = b"") -> None:
        self._queue = FairQueue(ageing_s)
        self._lost = PriorityQueue(ageing_s)
        self._quarantined = PriorityQueue(ageing_s)
        self._patient: dict[int, _PrefixWaiter] = {}
        self.router = Router(page_tokens, salt)
        self.holds_back = False

    def __len__(self) -> int:
        return len(self._queue) + len(self._lost) + len(self._quarantined)

    def queued_by_client(self) -> dict[str, int]:
        """How many requests of each client wait."""
        lost = Counter(request.client for line in (self._lost, self._quarantined) for request in line)
        return dict(lost + Counter(self._queue.by_client()))

    def waiting(self) -> Iterator[Request]:
        """Every request that waits, in no particular order."""
        return chain(self._quarantined, self._lost, self._queue)

    def in_order(self) -> list[Request]:
        """Every request that waits, in the order in which they would get places if none ended: O(n log n)."""
        return [*self._quarantined.in_order(), *self._lost.in_order(), *self._queue.in_order(self._expected_work)]

    def check(self, active: Mapping[str, Request]) -> None:
        """Prove the accounts; active: the requests that workers have, by wire id. Raises AssertionError."""
        running = {wire_id: request.worker for wire_id, request in active.items()}
        assert self.router.running == running, f"sent out {self.router.running}, at work {running}"
        self._queue.check(Counter(request.client for request in active.values()))

    # -- enter and leave ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that had a worker goes to the head."""
        had_worker = self._release(request) or request.dispatched is not None
        if request.is_quarantined:
            self._quarantined.add(request)
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
        return [*self._quarantined.take_all(), *self._lost.take_all(), *self._queue.take_all(self._expected_work)]

    def stepped(self, worker: str, batch: StepBatch) -> None:
        """A worker's report, before the requests that ended in it are removed: what `Router.stepped` learns from it,
        and the work of answers that get longer than expected."""
        for client, tokens in self.router.stepped(worker, batch):
            self._queue.charge(client, ANSWER_WEIGHT * tokens)

    def _expected_work(self, request: Request) -> float:
        """Return the work of a waiting request where nothing of its prompt is cached."""
        prompt_tokens = len(request.prompt_ids) + len(request.generated)
        return prompt_tokens + ANSWER_WEIGHT * self.router.expected_answer(request)

    # -- assignment ---------------------------------------------------------------------------------------------

    def assign(self, slots: Sequence[Slot], now: float) -> list[tuple[Request, str]]:
        """Take the next requests out of the queue, each with the worker that is to have it, until all slots are full
        or none waits. Counts them into `slots`.

        A place is never kept empty for the sake of a prefix. But while the worker that holds a request's prefix is
        full, the request lets up to OVERTAKERS of its equals go first, if they fit better into the place there is
        (delay scheduling, Zaharia et al. 2010, counted in requests instead of seconds).

        One whose time is up at `now` is taken out and goes nowhere: its deadline is about to end it.
        """
        assigned: list[tuple[Request, str]] = []
        others = self._place_quarantined(slots, now, assigned)
        while any(slot.free for slot in others) and (chosen := self._choose(others, now)) is not None:
            request, fit = chosen
            self._send(request, fit, assigned)
        self.holds_back = len(self._queue) > 0 and any(slot.free for slot in others)
        return assigned

    def _place_quarantined(
        self, slots: Sequence[Slot], now: float, assigned: list[tuple[Request, str]]
    ) -> Sequence[Slot]:
        """Give quarantined requests empty workers. Where one finds none, the least busy worker gets nothing more until
        it is empty; the slots of the others are returned."""
        while (request := self._quarantined.first()) is not None:
            if _expired(request, now):
                self._take_out(request)
                continue
            empty = [slot for slot in slots if slot.free and not slot.active]
            if not empty:
                emptying = min(slots, key=lambda slot: slot.active, default=None)
                return [slot for slot in slots if slot is not emptying]
            fit = self.router.fit(request, empty)
            self._send(request, fit, assigned)
            fit.slot.active = fit.slot.max_prompts
        return slots

    def _choose(self, slots: Sequence[Slot], now: float) -> tuple[Request, Fit] | None:
        """The request that goes next, and where to; None where none waits that may have a place. One slot at least is
        free."""
        first: tuple[Request, Fit] | None = None
        patient: list[_PrefixWaiter] = []
        for request in self._candidates(now):
            open_slots = self._open_to(request, slots)
            if not open_slots:
                continue
            waiter = self._patient.get(request.order)
            fit = self.router.fit(request, open_slots, waiter.keys if waiter else None)
            if not fit.may_wait or (waiter and waiter.overtaken >= MAX_OVERTAKERS):
                for each in patient:
                    each.overtaken += 1
                return request, fit
            patient.append(waiter or self._remember(request, fit))
            first = first or (request, fit)
        return first or self._choose_of_others(slots, now)

    def _choose_of_others(self, slots: Sequence[Slot], now: float) -> tuple[Request, Fit] | None:
        """The same among all clients, where those whose turn it is may not have the places that are free."""
        for request in self._queue.heads(MAX_OVERTAKERS):
            if not _expired(request, now) and (open_slots := self._open_to(request, slots)):
                return request, self.router.fit(request, open_slots)
        return None

    def _open_to(self, request: Request, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Return the slots, one of them free, that a request may have; none where it may have no free one.

        The last quarter of a worker's places is not for a client whose prompts keep the worker busy for a while: more
        of them would only wait there, and a short prompt of another client would wait until one of them is answered.
        """
        scarce = [slot for slot in slots if 0 < slot.free <= -(-slot.max_prompts // 4)]
        busy = [slot for slot in scarce if self.router.keeps_busy(slot.worker, request.client)]
        if busy and request not in self._lost:
            slots = [slot for slot in slots if slot not in busy]
        return slots if any(slot.free for slot in slots) else ()

    def _remember(self, request: Request, fit: Fit) -> _PrefixWaiter:
        if len(self._patient) >= _MAX_PREFIX_WAITERS:
            self._patient.clear()
        patient = self._patient[request.order] = _PrefixWaiter(fit.keys)
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
        equals = (self._lost if head in self._lost else self._queue).leading(MAX_OVERTAKERS + 1)
        for request in equals:
            if request is not head and request.priority >= head.priority and not _expired(request, now):
                yield request

    def _send(self, request: Request, fit: Fit, assigned: list[tuple[Request, str]]) -> None:
        answer_tokens = self.router.send(request, fit)
        self._queue.start(request.client, fit.missing_tokens + ANSWER_WEIGHT * answer_tokens)
        self._take_out(request)
        assigned.append((request, fit.slot.worker))

    def _release(self, request: Request) -> bool:
        """Count a request as running no more; False where it did not run."""
        unused = self.router.release(request)
        if unused is None:
            return False
        self._queue.finish(request.client, unused.prompt_tokens + ANSWER_WEIGHT * unused.answer_tokens)
        return True

    def _take_out(self, request: Request) -> None:
        """Take a request out of the line it waits in."""
        self._patient.pop(request.order, None)
        if not self._queue.remove(request):
            self._lost.remove(request)
            self._quarantined.remove(request)


def _expired(request: Request, now: float) -> bool:
    return 0 < request.timeout_s <= now - request.created


def has_share_left(waiting: Mapping[str, int], client: str, limit: int) -> bool:
    """Return whether fewer requests of a client wait than its share of `limit` places. waiting: requests by client."""
    return waiting.get(client, 0) < limit // len(waiting.keys() | {client})


class ModelQueue:
    """The queue of one model with its decisions, and how many of its requests live. Pure: every call gets the time.

    model: its name.  dispatcher: who is next, and where to.  longest_tokens: prompt and answer of the longest request
    that ended.  waits: what its requests wait for.  forecast: when they are likely to get a place.
    """

    def __init__(self, dispatcher: Dispatcher, model: str, now: float) -> None:
        self.model = model
        self.dispatcher = dispatcher
        self.last_used = now
        self.longest_tokens = 0
        self.waits = WaitClock(now)
        self.forecast = WaitForecast()
        self._live: dict[str, Request] = {}
        self._prepared: dict[str, asyncio.Task[None]] = {}

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self.dispatcher) + len(self._prepared)

    def has_share_left(self, client: str, max_queue: int) -> bool:
        """Return whether fewer requests of a client wait than its share of a queue of `max_queue`."""
        waiting = Counter(self.dispatcher.queued_by_client())
        waiting.update(self._live[request_id].client for request_id in self._prepared)
        return has_share_left(waiting, client, max_queue)

    @property
    def running(self) -> int:
        """Requests that a worker works on."""
        return len(self._live) - self.queued

    def is_waiting(self, request: Request) -> bool:
        """Return whether a request waits here for a worker; one whose prompt is still prepared does not."""
        return request.worker is None and request.id in self._live and request.id not in self._prepared

    def place(self, request: Request, now: float) -> QueuePlace | None:
        """Return where a request waits here, as `WaitForecast.place` does."""
        return self.forecast.place(request, self, now)

    @property
    def idle(self) -> bool:
        """True if no request is live."""
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
        self.dispatcher.check(at_work)
        found = [("queued", request) for request in self.dispatcher.waiting()]
        found += [("prepared", self._live[request_id]) for request_id in self._prepared]
        found += [(request.worker or "no worker", request) for request in at_work.values()]
        assert {request.id for _, request in found} == self._live.keys(), f"{found} are not {list(self._live)}"
        return iter(found)

    def enter(self, request: Request, now: float) -> None:
        """Queue a request, new here, prepared, or back from a worker that was lost."""
        self._admit(request, now)
        self._prepared.pop(request.id, None)
        self.dispatcher.add(request)

    def prepare(self, request: Request, work: asyncio.Task[None], now: float) -> None:
        """Keep a request until `work` is done with it, and queues it; `work` is cancelled where it leaves before."""
        self._admit(request, now)
        self._prepared[request.id] = work

    def _admit(self, request: Request, now: float) -> None:
        request.model_queue = self
        self.last_used = now
        self._live[request.id] = request

    def leave(self, request: Request, now: float) -> None:
        """A request ended, or goes to another queue."""
        self.last_used = now
        if (work := self._prepared.pop(request.id, None)) is not None:
            work.cancel()
        else:
            self.dispatcher.remove(request)
        self._live.pop(request.id, None)

    def take_waiting(self) -> list[Request]:
        """Take out all that wait, in order; they are in no queue then."""
        waiting = [*self.dispatcher.take_all(), *(self._live[request_id] for request_id in self._prepared)]
        for work in self._prepared.values():
            work.cancel()
        self._prepared.clear()
        for request in waiting:
            self._live.pop(request.id, None)
        return waiting
