"""A discrete-event simulation of a cluster. What decides in it is the engine's own code: queue, dispatcher, scheduler,
pages and outbox. Times come from step costs, and the front end from the costs of its work.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

from engine.backends.base import FinishReason
from engine.config import SamplingParams
from engine.requests.request import MAX_DEATHS, Request
from engine.requests.stream import RequestStream
from engine.scheduling.queue import Dispatcher, ModelQueue
from engine.scheduling.routing import Slot
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.demand import Ask, Demand
from engine.simulation.outcome import WHOLE, Fate, Moment, Outcome, Served, Window
from engine.simulation.worker import SALT, SimulatedWorker, Stretch
from engine.worker_process.protocol import RequestOutput, StepBatch

# What happens next in a simulation.

Event = Callable[[float], None]


class EventQueue:
    """Things to do by time; of those of one time, those that are `last` after the others, else as they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Event]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_s(self) -> float:
        """When the next is due."""
        return self._heap[0][0]

    def at(self, at_s: float, happening: Event, *, last: bool = False) -> None:
        """Do this then."""
        heapq.heappush(self._heap, (at_s, last, next(self._numbers), happening))

    def turn(self) -> float:
        """Do the next; when that was."""
        at_s, _, _, happening = heapq.heappop(self._heap)
        happening(at_s)
        return at_s


# The one loop that every request and every token passes, as a queue with one server.


class FrontDoorQueue:
    """Work ahead of the loop. Work that comes is done in order; a stretch of a stream is work that comes evenly.

    most_behind_s: how much that was at worst, in seconds of work.
    """

    def __init__(self, costs: FrontDoor) -> None:
        self.costs = costs
        self._work_s = 0.0
        self.most_behind_s = 0.0
        self._behind_s = 0.0
        self._even = 0.0
        self._now = 0.0

    def behind_s(self, now: float) -> float:
        """Seconds of work ahead of what comes now."""
        self._pass(now)
        return self._behind_s

    def busy_s_until(self, now: float) -> float:
        """CPU seconds that it spent until now."""
        self._pass(now)
        return self._work_s - self._behind_s

    def take(self, work_s: float, now: float) -> float:
        """Add work that comes now; return when it is done."""
        self._pass(now)
        self._behind_s += work_s
        self._work_s += work_s
        self.most_behind_s = max(self.most_behind_s, self._behind_s)
        return now + self._behind_s

    def message_s(self, outputs: int) -> float:
        """Return the cost of a message about `outputs` requests."""
        return self.costs.message_s + outputs * self.costs.output_s

    def stream(self, share: float, now: float) -> None:
        """Streams take `share` more of the loop from now on, less where it is negative."""
        self._pass(now)
        self._even = max(0.0, self._even + share)

    def _pass(self, now: float) -> None:
        passed = now - self._now
        if passed > 0:
            self._behind_s = max(0.0, self._behind_s + passed * (self._even - 1.0))
            self._work_s += passed * self._even
            self._now = now
            self.most_behind_s = max(self.most_behind_s, self._behind_s)


# A place for a worker, as the engine sees it.


class WorkerSlot:
    """A worker's place: the worker that is there, None while it is dead; and, as the engine sees it, which worker that
    is and its requests."""

    __slots__ = ("active", "busy_s", "index", "seen_worker", "slot", "steps", "wakes", "worker")

    def __init__(self, index: int, worker: SimulatedWorker, max_prompts: int) -> None:
        self.index = index
        self.worker: SimulatedWorker | None = worker
        self.seen_worker: SimulatedWorker | None = worker
        self.slot = Slot(worker=worker.id, active=0, max_prompts=max_prompts)
        self.active: dict[str, Request] = {}
        self.busy_s = 0.0
        self.steps = 0
        self.wakes = False

    def busy_until(self, now: float) -> float:
        """Seconds that its workers were in steps until now."""
        return self.busy_s + (self.worker.busy_until(now) if self.worker is not None else 0.0)

    def count(self) -> None:
        """Update the slot; a worker with a suspect is full."""
        guarded = any(request.is_quarantined for request in self.active.values())
        self.slot.active = self.slot.max_prompts if guarded else len(self.active)


# Notes of a simulation while it runs, and the outcome made of that.

MOMENT_S = 1.0


class OutcomeRecorder:
    """Looks at the queue, the front end and the workers as time goes on."""

    def __init__(
        self, window: Window, model_queue: ModelQueue, front: FrontDoorQueue, worker_slots: Sequence[WorkerSlot]
    ) -> None:
        self.outcome = Outcome(window=window)
        self._model_queue = model_queue
        self._front = front
        self._worker_slots = worker_slots
        self._busy_s: list[tuple[float, ...]] = []
        self._live = 0
        self._counted_s = 0.0

    def note_busy(self, now: float) -> None:
        """How long the front end and each worker were busy until now."""
        front_s = self._front.busy_s_until(now)
        self._busy_s.append((front_s, *(worker_slot.busy_until(now) for worker_slot in self._worker_slots)))

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
        """Change the number of live requests."""
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
        for worker_slot in self._worker_slots:
            self.retire(worker_slot)
            outcome.steps += worker_slot.steps
        outcome.most_behind_s = self._front.most_behind_s
        return outcome

    def retire(self, worker_slot: WorkerSlot) -> None:
        """The worker there is no more: its account goes over to the worker_slot."""
        worker, worker_slot.worker = worker_slot.worker, None
        if worker is not None:
            worker_slot.busy_s += worker.busy_s
            worker_slot.steps += worker.steps
            self.outcome.preemptions += worker.scheduler.counters.preemptions

    @property
    def dates(self) -> tuple[float, ...]:
        """When `note_busy` is due: where the window begins, and where it ends if it does."""
        window = self.outcome.window
        return (window.since_s,) if window.until_s == math.inf else (window.since_s, window.until_s)


# The engine's own requests, made of what simulated clients ask.

_OWN_TOKENS = 0x8000_0000
"""Tokens from here on are of one prompt alone, those below of a group."""


def request_of(ask: Ask, number: int, model_queue: ModelQueue, timeout_s: float, now: float) -> Request:
    """Request `number`, admitted at `now`. Its tokens say nothing but with which other prompts it begins alike."""
    shared = array("I", [ask.group]) * ask.shared_tokens if ask.group >= 0 else array("I")
    prompt_ids = shared + array("I", [_OWN_TOKENS + number]) * (ask.prompt_tokens - len(shared))
    params = SamplingParams(max_tokens=ask.output_tokens, ignore_eos=True, seed=0)
    name = str(number)
    return Request(
        id=name,
        source="simulation",
        priority=0,
        order=number,
        prompt_ids=prompt_ids,
        params=params,
        requested_params=params,
        end_token_ids=(),
        timeout_s=timeout_s,
        created=now,
        stream=RequestStream(name, len(prompt_ids), _nothing),
        model_queue=model_queue,
        client=ask.client,
        created_at=0.0,
    )


def _nothing() -> None:
    """The cancel function of a simulated stream, which has no reader."""


_FATES: dict[FinishReason, Fate] = {"length": "answered", "stop": "answered", "timeout": "timeout"}


def simulate(cluster: Cluster, demand: Demand, window: Window = WHOLE) -> Outcome:
    """Run until every request has ended. The same cluster and demand always give the same. Raises InvalidRequest."""
    return _Simulation(cluster.validate(), demand, window).run()


class _Simulation:
    def __init__(self, cluster: Cluster, demand: Demand, window: Window) -> None:
        self._cluster = cluster
        self._demand = demand
        self._events = EventQueue()
        self._front = FrontDoorQueue(cluster.front)
        dispatcher = Dispatcher(page_tokens=cluster.page_tokens, salt=SALT)
        self._model_queue = ModelQueue(dispatcher, "simulated", 0.0)
        self._worker_slots = [
            WorkerSlot(number, SimulatedWorker(f"w{number}", cluster), cluster.max_prompts)
            for number in range(cluster.workers)
        ]
        self._by_id = {worker_slot.slot.worker: worker_slot for worker_slot in self._worker_slots}
        self._slots = [worker_slot.slot for worker_slot in self._worker_slots]
        self._served: dict[str, Served] = {}
        self._recorder = OutcomeRecorder(window, self._model_queue, self._front, self._worker_slots)
        self._outcome = self._recorder.outcome
        self._made = 0
        self._stolen_s = 0.0

    def run(self) -> Outcome:
        asks = self._demand.first()
        self._next_ask(asks)
        for death in self._cluster.deaths:
            self._events.at(death.at_s, partial(self._die, death))
        for at_s in self._recorder.dates:
            self._events.at(at_s, self._recorder.note_busy)
        while self._events:
            self._recorder.note_moments(self._events.next_s)
            self._events.turn()
        return self._recorder.concluded()

    # -- requests come ------------------------------------------------------------------------------------------

    def _next_ask(self, asks: Iterator[Ask]) -> None:
        ask = next(asks, None)
        if ask is not None:
            self._events.at(ask.at_s, partial(self._arrive_then_next, ask, asks))

    def _arrive_then_next(self, ask: Ask, asks: Iterator[Ask], now: float) -> None:
        self._arrive(ask, now)
        self._next_ask(asks)

    def _arrive(self, ask: Ask, now: float) -> None:
        done_s = self._front.take(self._front.costs.request_s, now)
        self._events.at(done_s, partial(self._admit, ask))

    def _admit(self, ask: Ask, now: float) -> None:
        served = Served(ask)
        self._outcome.served.append(served)
        cluster = self._cluster
        if ask.prompt_tokens > cluster.longest_prompt or self._full():
            self._conclude(served, "too long" if ask.prompt_tokens > cluster.longest_prompt else "refused", now)
            return
        served.admitted_s = now
        self._made += 1
        request = request_of(ask, self._made, self._model_queue, cluster.timeout_s, now)
        self._served[request.id] = served
        self._recorder.count_live(+1, now)
        self._model_queue.enter(request, now)
        if request.timeout_s > 0:
            self._events.at(now + request.timeout_s, partial(self._expire, request))
        self._assign(now)

    def _full(self) -> bool:
        queued = self._model_queue.queued
        limit = self._cluster.max_queue
        return queued >= limit and queued >= limit + sum(slot.free for slot in self._slots)

    # -- requests go to workers ---------------------------------------------------------------------------------

    def _assign(self, now: float) -> None:
        if not self._model_queue.queued or not self._slots:
            return
        for request, name in self._model_queue.dispatcher.assign(self._slots, now):
            worker_slot = self._by_id[name]
            worker_slot.active[request.wire_id] = request
            worker_slot.count()
            request.worker, request.tokens_at_start = name, None
            served = self._served[request.id]
            served.worker = worker_slot.index
            if request.dispatched is None:
                request.dispatched = served.placed_s = now
            placed_s = self._front.take(self._front.costs.slot_s * len(self._slots), now)
            self._events.at(placed_s + self._cluster.hop_s, partial(self._submit, worker_slot, request))

    def _submit(self, worker_slot: WorkerSlot, request: Request, now: float) -> None:
        worker = worker_slot.worker
        if (
            worker is None
            or worker_slot.active.get(request.wire_id) is not request
            or request.tokens_at_start is not None
        ):
            return  # it died, or the request ended, meanwhile
        request.tokens_at_start = len(request.generated)
        self._commanded(worker_slot, worker.submit(request.for_backend(), now), now)

    def _commanded(self, worker_slot: WorkerSlot, ends_s: float | None, now: float) -> None:
        worker = worker_slot.worker
        assert worker is not None, "a dead worker takes no commands"
        if ends_s is not None and worker.stretch is not None:
            self._events.at(ends_s, partial(self._ended, worker_slot, worker, worker.stretch, ends_s))
        elif worker.idle and not worker_slot.wakes:
            worker_slot.wakes = True
            self._events.at(now, partial(self._wake, worker_slot, worker), last=True)

    def _wake(self, worker_slot: WorkerSlot, worker: SimulatedWorker, now: float) -> None:
        worker_slot.wakes = False
        if worker_slot.worker is worker and worker.idle:
            self._begin(worker_slot, worker, now)

    # -- workers step -------------------------------------------------------------------------------------------

    def _begin(self, worker_slot: WorkerSlot, worker: SimulatedWorker, now: float) -> None:
        batch = worker.flush()
        if batch is not None:
            self._send(worker_slot, worker, batch, 1, now)
        stretch = worker.begin(now, self._stolen(now))
        if stretch is None:
            return
        if stretch.pace is not None:
            self._front.stream(self._share(worker, stretch), now)
        self._events.at(stretch.ends_s, partial(self._ended, worker_slot, worker, stretch, stretch.ends_s))

    def _ended(
        self, worker_slot: WorkerSlot, worker: SimulatedWorker, stretch: Stretch, planned_s: float, now: float
    ) -> None:
        if worker_slot.worker is not worker or worker.stretch is not stretch or stretch.ends_s != planned_s:
            return  # it died, or what it did was cut short
        if stretch.pace is not None:
            self._front.stream(-self._share(worker, stretch), now)
        batch = worker.end()
        if batch is not None:
            self._send(worker_slot, worker, batch, stretch.messages, now)
        self._begin(worker_slot, worker, now)

    def _share(self, worker: SimulatedWorker, stretch: Stretch) -> float:
        """Share of the front end that the messages about such a stretch take while it goes on."""
        assert stretch.pace is not None, "only leaps have evenly spaced messages"
        message_s = stretch.message_steps * stretch.pace.first_s
        return self._front.message_s(len(worker.scheduler.running)) / message_s

    def _stolen(self, now: float) -> float:
        """CPU time that the front end took from a worker since the last step began."""
        shared = self._front.costs.shared
        if not shared:
            return 0.0
        busy_s = self._front.busy_s_until(now)
        stolen_s, self._stolen_s = busy_s - self._stolen_s, busy_s
        return shared * stolen_s

    def _send(
        self, worker_slot: WorkerSlot, worker: SimulatedWorker, batch: StepBatch, messages: int, now: float
    ) -> None:
        work_s = self._front.message_s(len(batch.outputs)) if messages == 1 else 0.0
        done_s = self._front.take(work_s, now + self._cluster.hop_s)
        self._events.at(done_s, partial(self._receive, worker_slot, worker, batch))

    def _receive(self, worker_slot: WorkerSlot, worker: SimulatedWorker, batch: StepBatch, now: float) -> None:
        if worker_slot.seen_worker is not worker:
            return  # a message of a worker that the engine has lost
        self._model_queue.dispatcher.stepped(worker_slot.slot.worker, batch)
        for output in batch.outputs:
            request = worker_slot.active.get(output.request_id)
            if request is not None:
                self._take(request, output, now)
                if output.finish is not None:
                    self._finish(worker_slot, request, output.finish, now)
        self._assign(now)

    def _take(self, request: Request, output: RequestOutput, now: float) -> None:
        if not output.token_ids:
            return
        served = self._served[request.id]
        if request.first_token is None:
            served.first_s = now
            served.cached_tokens = output.cached_tokens or 0
        for seconds, times in Counter(request.add_tokens(output.token_ids, output.gaps, now)).items():
            self._outcome.gaps.add(seconds, times)
        served.last_s, served.tpot_s = now, request.itl_s

    # -- requests end -------------------------------------------------------------------------------------------

    def _finish(self, worker_slot: WorkerSlot | None, request: Request, reason: FinishReason, now: float) -> None:
        if request.finish is not None:
            return
        request.finish = reason
        self._model_queue.leave(request, now)
        if worker_slot is not None:
            worker_slot.active.pop(request.wire_id, None)
            worker_slot.count()
        served = self._served.pop(request.id)
        served.output_tokens = len(request.generated)
        self._recorder.count_live(-1, now)
        self._conclude(served, _FATES.get(reason, "failed"), now)

    def _conclude(self, served: Served, fate: Fate, now: float) -> None:
        served.fate, served.ended_s = fate, now
        following = self._demand.answered(served.ask, now)
        if following is not None:
            self._events.at(following.at_s, partial(self._arrive, following))

    def _expire(self, request: Request, now: float) -> None:
        if request.finish is not None:
            return
        worker_slot = self._by_id[request.worker] if request.worker is not None else None
        self._finish(worker_slot, request, "timeout", now)
        if worker_slot is not None and worker_slot.worker is not None:
            self._commanded(worker_slot, worker_slot.worker.cancel(request.wire_id, now), now)
        self._assign(now)

    # -- nodes die ----------------------------------------------------------------------------------------------

    def _die(self, death: Death, now: float) -> None:
        for index in self._cluster.of_node(death.node):
            worker_slot = self._worker_slots[index]
            worker = worker_slot.worker
            if worker is None:
                continue
            if worker.stretch is not None and worker.stretch.pace is not None:
                self._front.stream(-self._share(worker, worker.stretch), now)
            self._recorder.retire(worker_slot)
            self._events.at(now + death.detected_s, partial(self._lose, worker_slot))
            self._events.at(now + death.detected_s + death.restart_s, partial(self._restart, worker_slot))

    def _lose(self, worker_slot: WorkerSlot, now: float) -> None:
        """The engine knows: its requests go back to the head of the queue, and one that saw too many deaths fails."""
        worker_slot.seen_worker = None
        self._slots.remove(worker_slot.slot)
        lost, worker_slot.active = list(worker_slot.active.values()), {}
        worker_slot.count()
        self._model_queue.dispatcher.router.forget(worker_slot.slot.worker)
        for request in lost:
            request.worker_died()
            request.worker = None
            self._served[request.id].lost += 1
            if request.deaths >= MAX_DEATHS:
                self._finish(None, request, "error", now)
            else:
                self._model_queue.enter(request, now)
        self._assign(now)

    def _restart(self, worker_slot: WorkerSlot, now: float) -> None:
        worker_slot.worker = worker_slot.seen_worker = SimulatedWorker(worker_slot.slot.worker, self._cluster)
        worker_slot.wakes = False
        self._slots.append(worker_slot.slot)
        self._assign(now)
