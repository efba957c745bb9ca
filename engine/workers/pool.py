"""Pool: the replicas of the loaded model, grown and shrunk to what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.backends.base import BackendStats, LoadedModel, LoadProgress
from engine.config import AdapterSpec, DeviceShare, EngineConfig, ModelSpec
from engine.devices import BusyTime
from engine.errors import ErrorInfo, from_info
from engine.metrics.meter import Meter
from engine.placement.plan import Placement
from engine.requests.request import Request
from engine.requests.tracker import RequestTracker
from engine.scheduling.queue import ModelQueue, Slot
from engine.worker_process.hosts import NewHost
from engine.worker_process.protocol import StepBatch
from engine.workers.desired_state import ModelDesiredState
from engine.workers.replica import Replica
from engine.workers.supervision import Backoff

_log = logging.getLogger("engine")


class Pool:
    """Replicas by worker id, oldest first. It is the owner that each replica reports to.

    place_anew: where a worker goes whose devices are not there any more; None while they are, or where none has room.
    new_id: a worker id that no model uses.  count: the workers of all models, which share the CPU cores.
    on_loaded: with what a new worker's load took of each device, and the bytes of its process.
    on_change: after every change of a replica's state or progress, and when requests came back to the queue.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        *,
        new_host: NewHost,
        place_anew: Callable[[ModelSpec], Placement | None],
        new_id: Callable[[], str],
        count: Callable[[], int],
        model_queue: ModelQueue,
        tracker: RequestTracker,
        meter: Meter,
        busy: BusyTime,
        on_loaded: Callable[[Placement, Sequence[DeviceShare], int], None],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._orders = ModelDesiredState(spec, config)
        self._new_host = new_host
        self._place_anew = place_anew
        self._new_id = new_id
        self._count = count
        self._model_queue = model_queue
        self._tracker = tracker
        self._meter = meter
        self._busy = busy
        self._on_loaded = on_loaded
        self._on_change = on_change
        self._replicas: dict[str, Replica] = {}
        self._unnoted: dict[str, Placement] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._first: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, worker_id: str) -> Replica:
        return self._replicas[worker_id]

    # -- what is asked of it ------------------------------------------------------------------------------------

    async def first_ready(self) -> LoadedModel:
        """Wait until one replica is ready; raises the first one's error once all of them have failed."""
        return await asyncio.shield(self._first)

    def all_dead(self) -> ErrorInfo | None:
        """The last reason why no worker is left that could answer; None while there is one."""
        if any(replica.state not in ("failed", "stopping") for replica in self):
            return None
        return next((replica.last_error for replica in self if replica.last_error is not None), None)

    @property
    def staying(self) -> list[Replica]:
        """Replicas that are to stay, oldest first."""
        return [replica for replica in self if replica.state not in ("draining", "stopping")]

    @property
    def size(self) -> int:
        """How many are to stay."""
        return len(self.staying)

    def grow(self, placements: Sequence[Placement]) -> None:
        """Start a replica for each placement, in the background; none once `stop` was called."""
        total = self._count() + len(placements)
        for placement in () if self._stopped else placements:
            worker_id = self._new_id()
            replica = Replica(
                worker_id,
                self._orders.load(placement, total),
                device=placement.device,
                new_host=self._new_host,
                owner=self,
                backoff=Backoff(self._config.restart_backoff_s, self._config.max_restart_backoff_s),
                max_deaths=self._config.max_deaths,
                hang_s=self._config.hang_s,
            )
            self._replicas[worker_id] = replica
            self._unnoted[worker_id] = placement
            replica.start()

    def revive(self, limit: int) -> int:
        """Keep up to `limit` draining replicas after all; how many it kept."""
        draining = [replica for replica in self if replica.state == "draining"][:limit]
        for replica in draining:
            replica.undrain()
        return len(draining)

    def shrink(self, number: int) -> None:
        """Let go of the `number` youngest."""
        staying = self.staying
        for replica in staying[len(staying) - number :]:
            self.shed(replica)

    def shed(self, replica: Replica) -> None:
        """Let go of one: a ready one takes nothing new and stops when empty, others stop now."""
        if replica.state == "ready":
            replica.drain()
        elif replica.state not in ("draining", "stopping"):
            self._leave(replica)

    def resize(self, workers: int, placements: Sequence[Placement]) -> None:
        """Be `workers` many: failed ones go, draining ones are kept rather than new ones started at `placements`."""
        self.drop_failed()
        missing = workers - self.size
        if missing < 0:
            self.shrink(-missing)
        else:
            missing -= self.revive(missing)
            self.grow(placements[:missing])

    def drop_failed(self) -> None:
        """Let go of replicas that never got ready."""
        for replica in [replica for replica in self if replica.state == "failed"]:
            self._leave(replica)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Let each replica work on at most this many requests."""
        self._orders.max_prompts = max_prompts
        for replica in self:
            replica.orders.set_max_prompts(max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """Let each replica compute at most this many tokens in a step."""
        self._orders.step_tokens = step_tokens
        for replica in self:
            replica.orders.set_step_tokens(step_tokens)

    def set_threads(self, threads: int) -> None:
        """Let each replica compute on this many threads; 0 shares the cores out."""
        self._orders.threads = threads
        self.share_cores()

    def slots(self) -> list[Slot]:
        """The replicas that take requests, each as many as its memory allows; one that works on a suspect is full."""
        slots = []
        for replica in self:
            if replica.state == "ready":
                places = replica.places(self._orders.max_prompts)
                active = places if replica.guarded else len(replica.active)
                slots.append(Slot(worker=replica.id, active=active, max_prompts=places))
        return slots

    def attach(self, adapter: AdapterSpec) -> None:
        """Give every replica the adapter, those to come included."""
        self._orders.adapters[adapter.key] = adapter
        for replica in self:
            replica.orders.attach(adapter)

    def detach(self, key: str) -> None:
        """Take the adapter from every replica."""
        self._orders.adapters.pop(key, None)
        for replica in self:
            replica.orders.detach(key)

    def release(self, request: Request) -> None:
        """A request leaves its worker, which stops computing it."""
        with contextlib.suppress(KeyError):  # stopped meanwhile
            replica = self._replicas[request.worker or ""]
            replica.forget(request)
            self.settle(replica)

    def settle(self, replica: Replica) -> None:
        """A place became free: a draining replica that is empty leaves."""
        if replica.state == "draining" and not replica.active:
            self._leave(replica)

    async def stop(self) -> None:
        """Stop every replica; returns when nothing of them is left."""
        self._stopped = True
        if not self._first.done():
            self._first.cancel()
        for replica in list(self):
            self._leave(replica)
        while self._leaving:
            await asyncio.wait(self._leaving)

    # -- what replicas report -----------------------------------------------------------------------------------

    def placed(self, replica: Replica, spec: ModelSpec) -> ModelSpec:
        """ReplicaOwner: a worker whose devices went away with their machine starts on others."""
        placement = self._place_anew(spec)
        if placement is None:
            return self._orders.restarted(spec)
        _log.warning("%s is placed anew", replica.id, extra={"source": replica.id})
        return self._orders.placed(placement)

    def replica_changed(self, replica: Replica) -> None:
        """ReplicaOwner: the first one ready ends `first_ready`; so does the last one's failure."""
        if replica.state == "ready" and replica.model is not None and not self._orders.follow(replica.model):
            _log.warning("%s is restarted: it computes unlike the other workers of its model", replica.id)
            replica.restart()
            return
        if not self._first.done():
            if replica.model is not None:
                self._first.set_result(replica.model)
            elif all(each.state in ("failed", "stopping") for each in self):
                self._fail(each.last_error for each in self)
        self.settle(replica)
        self._on_change()

    def replica_stepped(self, replica: Replica, batch: StepBatch, before: BackendStats) -> None:
        """ReplicaOwner: outputs go to their requests."""
        self._model_queue.stepped(replica.id, batch)
        devices = [share.device for share in replica.shares]
        self._busy.stepped(devices, ended=replica.step_ended_at, step_s=batch.steps * batch.step_s)
        if replica.model is not None and replica.id in self._unnoted:
            self._on_loaded(self._unnoted.pop(replica.id), replica.model.shares, batch.rss_bytes)
        self._tracker.stepped(replica, batch, before, self._model_queue.model)

    def replica_lost(self, replica: Replica, requests: list[Request], error: ErrorInfo) -> None:
        """ReplicaOwner: its requests go back to the queue. A draining one does not come back."""
        restarts = replica.state == "restarting"
        if restarts:
            self._meter.count("worker_restarts")
        follows = ("; it is restarted" if restarts else "") + (
            f"; {len(requests)} of its requests go back to the queue" if requests else ""
        )
        _log.error("%s%s", error.message, follows, extra={"source": replica.id})
        self._model_queue.forget_workers((replica.id,))
        self._tracker.lost(replica.id, requests, error)
        self._on_change()

    def progress(self) -> LoadProgress | None:
        """The progress of the replica that is furthest behind among those that load."""
        loading = [replica.progress for replica in self if replica.progress is not None]
        loading = [progress for progress in loading if progress.phase != "wait"] or loading
        return min(loading, key=lambda progress: progress.done / max(1, progress.total), default=None)

    def share_cores(self) -> None:
        """Workers on more threads than there are cores wait for each other at every layer."""
        for replica in self:
            replica.orders.set_threads(self._orders.threads_each(self._count()))

    def _fail(self, errors: Iterable[ErrorInfo | None]) -> None:
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            self._first.set_exception(from_info(error))
            self._first.exception()

    def _leave(self, replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._forget(replica, replica.stop()))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _forget(self, replica: Replica, stopped: asyncio.Task[None]) -> None:
        await stopped
        self._model_queue.forget_workers((replica.id,))
        if self._replicas.get(replica.id) is replica:
            del self._replicas[replica.id]
            self._unnoted.pop(replica.id, None)
        self._on_change()
