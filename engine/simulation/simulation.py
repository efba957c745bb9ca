"""A discrete-event simulation of a cluster. What decides in it is the engine's own code: queue, dispatcher, scheduler,
pages and outbox. What takes time is told by step costs, and the front door by what its work costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from engine.backends.base import FinishReason
from engine.requests.request import MAX_DEATHS, Request
from engine.scheduling.queue import Dispatcher, ModelQueue
from engine.simulation.accounting import Ledger
from engine.simulation.agenda import Agenda
from engine.simulation.cluster import Cluster, Death
from engine.simulation.demand import Ask, Demand
from engine.simulation.front_door import FrontDoorLoad
from engine.simulation.outcome import WHOLE, Fate, Outcome, Served, Window
from engine.simulation.requests import request_of
from engine.simulation.worker import SALT, SimulatedWorker, Stretch
from engine.simulation.worker_slot import Station
from engine.worker_process.protocol import RequestOutput, StepBatch

_FATES: dict[FinishReason, Fate] = {"length": "answered", "stop": "answered", "timeout": "timeout"}


def simulate(cluster: Cluster, demand: Demand, window: Window = WHOLE) -> Outcome:
    """Run until every request has ended. The same cluster and demand always give the same. Raises InvalidRequest."""
    return _Simulation(cluster.validate(), demand, window).run()


class _Simulation:
    def __init__(self, cluster: Cluster, demand: Demand, window: Window) -> None:
        self._cluster = cluster
        self._demand = demand
        self._agenda = Agenda()
        self._front = FrontDoorLoad(cluster.front)
        dispatcher = Dispatcher(page_tokens=cluster.page_tokens, salt=SALT)
        self._model_queue = ModelQueue(dispatcher, "simulated", 0.0)
        self._stations = [
            Station(number, SimulatedWorker(f"w{number}", cluster), cluster.max_prompts)
            for number in range(cluster.workers)
        ]
        self._by_id = {station.slot.worker: station for station in self._stations}
        self._slots = [station.slot for station in self._stations]
        self._served: dict[str, Served] = {}
        self._ledger = Ledger(window, self._model_queue, self._front, self._stations)
        self._outcome = self._ledger.outcome
        self._made = 0
        self._stolen_s = 0.0

    def run(self) -> Outcome:
        asks = self._demand.first()
        self._next_ask(asks)
        for death in self._cluster.deaths:
            self._agenda.at(death.at_s, partial(self._die, death))
        for at_s in self._ledger.dates:
            self._agenda.at(at_s, self._ledger.note_busy)
        while self._agenda:
            self._ledger.note_moments(self._agenda.next_s)
            self._agenda.turn()
        return self._ledger.concluded()

    # -- requests come ------------------------------------------------------------------------------------------

    def _next_ask(self, asks: Iterator[Ask]) -> None:
        ask = next(asks, None)
        if ask is not None:
            self._agenda.at(ask.at_s, partial(self._arrive_then_next, ask, asks))

    def _arrive_then_next(self, ask: Ask, asks: Iterator[Ask], now: float) -> None:
        self._arrive(ask, now)
        self._next_ask(asks)

    def _arrive(self, ask: Ask, now: float) -> None:
        done_s = self._front.take(self._front.costs.request_s, now)
        self._agenda.at(done_s, partial(self._admit, ask))

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
        self._ledger.count_live(+1, now)
        self._model_queue.enter(request, now)
        if request.timeout_s > 0:
            self._agenda.at(now + request.timeout_s, partial(self._expire, request))
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
            station = self._by_id[name]
            station.active[request.wire_id] = request
            station.count()
            request.worker, request.taken = name, None
            served = self._served[request.id]
            served.worker = station.index
            if request.dispatched is None:
                request.dispatched = served.placed_s = now
            placed_s = self._front.take(self._front.costs.slot_s * len(self._slots), now)
            self._agenda.at(placed_s + self._cluster.hop_s, partial(self._submit, station, request))

    def _submit(self, station: Station, request: Request, now: float) -> None:
        worker = station.worker
        if worker is None or station.active.get(request.wire_id) is not request or request.taken is not None:
            return  # it died, or the request ended, meanwhile
        request.taken = len(request.generated)
        self._commanded(station, worker.submit(request.for_backend(), now), now)

    def _commanded(self, station: Station, ends_s: float | None, now: float) -> None:
        worker = station.worker
        assert worker is not None, "a dead worker is told nothing"
        if ends_s is not None and worker.stretch is not None:
            self._agenda.at(ends_s, partial(self._ended, station, worker, worker.stretch, ends_s))
        elif worker.idle and not station.wakes:
            station.wakes = True
            self._agenda.at(now, partial(self._wake, station, worker), last=True)

    def _wake(self, station: Station, worker: SimulatedWorker, now: float) -> None:
        station.wakes = False
        if station.worker is worker and worker.idle:
            self._begin(station, worker, now)

    # -- workers step -------------------------------------------------------------------------------------------

    def _begin(self, station: Station, worker: SimulatedWorker, now: float) -> None:
        held = worker.flush()
        if held is not None:
            self._tell(station, worker, held, 1, now)
        stretch = worker.begin(now, self._stolen(now))
        if stretch is None:
            return
        if stretch.pace is not None:
            self._front.stream(self._share(worker, stretch), now)
        self._agenda.at(stretch.ends_s, partial(self._ended, station, worker, stretch, stretch.ends_s))

    def _ended(self, station: Station, worker: SimulatedWorker, stretch: Stretch, planned_s: float, now: float) -> None:
        if station.worker is not worker or worker.stretch is not stretch or stretch.ends_s != planned_s:
            return  # it died, or what it did was cut short
        if stretch.pace is not None:
            self._front.stream(-self._share(worker, stretch), now)
        batch = worker.end()
        if batch is not None:
            self._tell(station, worker, batch, stretch.messages, now)
        self._begin(station, worker, now)

    def _share(self, worker: SimulatedWorker, stretch: Stretch) -> float:
        """Share of the front door that the messages about such a stretch take while it goes on."""
        assert stretch.pace is not None, "only leaps tell evenly"
        message_s = stretch.told_every * stretch.pace.first_s
        return self._front.message_s(len(worker.scheduler.running)) / message_s

    def _stolen(self, now: float) -> float:
        """CPU time that the front door took from a worker since the last step began."""
        shared = self._front.costs.shared
        if not shared:
            return 0.0
        busy_s = self._front.busy_s_until(now)
        taken, self._stolen_s = busy_s - self._stolen_s, busy_s
        return shared * taken

    def _tell(self, station: Station, worker: SimulatedWorker, batch: StepBatch, messages: int, now: float) -> None:
        work_s = self._front.message_s(len(batch.outputs)) if messages == 1 else 0.0
        done_s = self._front.take(work_s, now + self._cluster.hop_s)
        self._agenda.at(done_s, partial(self._told, station, worker, batch, messages))

    def _told(self, station: Station, worker: SimulatedWorker, batch: StepBatch, messages: int, now: float) -> None:
        if station.known is not worker:
            return  # what it told is nobody's any more
        self._model_queue.dispatcher.stepped(station.slot.worker, batch)
        for output in batch.outputs:
            request = station.active.get(output.request_id)
            if request is not None:
                self._take(request, output, messages, now)
                if output.finish is not None:
                    self._finish(station, request, output.finish, now)
        self._assign(now)

    def _take(self, request: Request, output: RequestOutput, messages: int, now: float) -> None:
        if not output.token_ids:
            return
        served = self._served[request.id]
        if request.first_token is None:
            request.first_token = served.first_s = now
            served.cached_tokens = output.cached_tokens or 0
        elif request.last_token is not None:
            self._outcome.gaps.add((now - request.last_token) / messages, messages)
        request.last_token = served.last_s = now
        request.generated += output.token_ids

    # -- requests end -------------------------------------------------------------------------------------------

    def _finish(self, station: Station | None, request: Request, reason: FinishReason, now: float) -> None:
        if request.finish is not None:
            return
        request.finish = reason
        self._model_queue.leave(request, now)
        if station is not None:
            station.active.pop(request.wire_id, None)
            station.count()
        served = self._served.pop(request.id)
        served.output_tokens = len(request.generated)
        self._ledger.count_live(-1, now)
        self._conclude(served, _FATES.get(reason, "failed"), now)

    def _conclude(self, served: Served, fate: Fate, now: float) -> None:
        served.fate, served.ended_s = fate, now
        following = self._demand.answered(served.ask, now)
        if following is not None:
            self._agenda.at(following.at_s, partial(self._arrive, following))

    def _expire(self, request: Request, now: float) -> None:
        if request.finish is not None:
            return
        station = self._by_id[request.worker] if request.worker is not None else None
        self._finish(station, request, "timeout", now)
        if station is not None and station.worker is not None:
            self._commanded(station, station.worker.cancel(request.wire_id, now), now)
        self._assign(now)

    # -- nodes die ----------------------------------------------------------------------------------------------

    def _die(self, death: Death, now: float) -> None:
        for index in self._cluster.of_node(death.node):
            station = self._stations[index]
            worker = station.worker
            if worker is None:
                continue
            if worker.stretch is not None and worker.stretch.pace is not None:
                self._front.stream(-self._share(worker, worker.stretch), now)
            self._ledger.retire(station)
            self._agenda.at(now + death.detected_s, partial(self._lose, station))
            self._agenda.at(now + death.detected_s + death.restart_s, partial(self._restart, station))

    def _lose(self, station: Station, now: float) -> None:
        """The engine knows: its requests go back to the head of the queue, and whoever saw too many deaths fails."""
        station.known = None
        self._slots.remove(station.slot)
        lost, station.active = list(station.active.values()), {}
        station.count()
        self._model_queue.dispatcher.forget_worker(station.slot.worker)
        for request in lost:
            request.worker_died()
            request.worker = None
            self._served[request.id].lost += 1
            if request.deaths >= MAX_DEATHS:
                self._finish(None, request, "error", now)
            else:
                self._model_queue.enter(request, now)
        self._assign(now)

    def _restart(self, station: Station, now: float) -> None:
        station.worker = station.known = SimulatedWorker(station.slot.worker, self._cluster)
        station.wakes = False
        self._slots.append(station.slot)
        self._assign(now)
