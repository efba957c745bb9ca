"""Deployment: one model that the engine holds, with its workers, its queue, its knobs and its adapters.

One task owns its state. Others send what they want (`serve`, `sleep`, `evict`, `retire`, `keep`); the task moves one
transition of TRANSITIONS at a time towards it, and looks again at what is desired after every wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.errors import (
    EngineError,
    ErrorInfo,
    InsufficientMemory,
    LoadCancelled,
    ModelLoadFailed,
    NoModelLoaded,
    from_info,
)
from engine.metrics.alerts import add_failed_load
from engine.models.attached_adapters import ModelAdapters
from engine.models.eviction import NoWaitingRequest, find_room, leaves_memory, make_room
from engine.models.handover import Handover, fit_or_end, retokenize
from engine.models.knobs import mark_changes
from engine.models.residency import Residency
from engine.placement.load_history import PlacementPlanner
from engine.placement.plan import Placement
from engine.requests.causes import Cause
from engine.requests.request import Request
from engine.scheduling.queue import Dispatcher, ModelQueue, Slot
from engine.snapshot import DeviceReading, LoadPlan, ModelState, ModelStatus
from engine.system.tasks import run_detached
from engine.text.tokenizer import Tokenizer
from engine.workers.pool import Pool
from engine.workers.replica import Replica

if TYPE_CHECKING:
    from engine.models.manager import ModelManager

RETRY_AFTER_S = 5
_WARM_UP_S = 1.0
"""After a load, which has had all processors."""

_log = logging.getLogger("engine")

Desired = Literal["serving", "asleep", "gone"]

TRANSITIONS: Mapping[ModelState, frozenset[ModelState]] = MappingProxyType(
    {
        "unloaded": frozenset({"loading"}),
        "loading": frozenset({"ready", "failed", "idle", "unloaded"}),
        "ready": frozenset({"draining", "unloading", "failed"}),
        "draining": frozenset({"ready", "unloading", "failed"}),
        "unloading": frozenset({"idle", "unloaded", "failed"}),
        "idle": frozenset({"loading", "unloaded", "failed"}),
        "failed": frozenset({"ready", "unloading"}),
    }
)
"""The states that may follow each. A model begins and ends "unloaded"; "failed" with workers is left when one is
restarted and becomes ready, and "idle" has given its memory back until it is asked for. Only a defect leads from
"unloading" or "idle" to "failed"."""


class IllegalTransition(RuntimeError):
    """A defect: a state that may not follow the one before."""


class Deployment:
    """One model. key: unique in the engine; config: the engine's settings with this model's knobs.

    models: all of the engine's, which share devices, requests and the meter.  tiers_salt: as `tier_salt` returns it.
    pool: its workers, while it has its memory.  desired: the state that it moves to.
    ended: set once nothing is left of it.  handover: while another model is being loaded in its place, or it in
    another's.  successor: the model that has replaced it.  retired_by: the handover that has it leave, if one does.
    loaded_by_request: a request had it loaded; where that fails, it is gone, or sleeps where it was loaded before.
    residency: how it stays in memory.  waiters: requests that wait until it answers, by client.  plan: of its load
    under way.
    planner: where its workers go.  ordered: its config at first.
    """

    def __init__(
        self,
        key: str,
        spec: ModelSpec,
        config: EngineConfig,
        models: ModelManager,
        tiers_salt: bytes | None,
        *,
        loaded_by_request: bool = False,
    ) -> None:
        self.key = key
        self.spec = spec
        self.config = config.for_backend(spec.backend)
        self.tokenizer: Tokenizer | None = None
        self._salt = tiers_salt or secrets.token_bytes(16)
        queue = Dispatcher(ageing_s=config.ageing_s, page_tokens=config.page_tokens, salt=self._salt)
        self.model_queue = ModelQueue(queue, spec.name, _now())
        models.meter.add_model(spec.name)
        self.adapters = ModelAdapters()
        self.ended = asyncio.Event()
        self.handover: Handover | None = None
        self.successor: Deployment | None = None
        self.retired_by: Handover | None = None
        self.models = models
        self.pool: Pool | None = None
        self.desired: Desired = "serving"
        self.planner = PlacementPlanner(spec, models.load_history)
        self._status = ModelStatus(since_s=time.time())
        self.loaded_by_request = loaded_by_request
        self.residency = Residency(_now())
        self.waiters = Counter[str]()
        self.plan: LoadPlan | None = None
        self._slept = loaded_by_request
        self._last_model: LoadedModel | None = None
        self.ordered = config
        self._wants_memory_of: Sequence[Deployment] = ()
        self._work: asyncio.Task[LoadedModel] | None = None
        self._arrival: asyncio.Future[LoadedModel] | None = None
        self._load_error: EngineError | None = None
        self._leave_at: float | None = None
        self._leave_error: EngineError = NoModelLoaded(f"{spec.name} was unloaded", state="unloaded")
        self._signal = asyncio.Event()
        self.owner: asyncio.Task[None] | None = None

    # -- status -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """As in ModelStatus.state."""
        return self._status.state

    @property
    def arriving(self) -> bool:
        """True if it is on its way to being ready."""
        return self.desired == "serving" and self.state in ("unloaded", "loading", "idle", "unloading")

    @property
    def model(self) -> LoadedModel | None:
        """The result of its load, while it is loaded."""
        return self._status.model

    def status(self) -> ModelStatus:
        """Its status now."""
        progress = self.pool.progress() if self.pool is not None and self.state == "loading" else None
        return msgspec.structs.replace(self._status, progress=progress)

    def replicas(self) -> tuple[Replica, ...]:
        """Its workers, oldest first."""
        return tuple(self.pool) if self.pool is not None else ()

    def slots(self) -> list[Slot]:
        """The workers that take requests; while it drains, they still take those that wait."""
        return self.pool.slots() if self.pool is not None and self.state in ("ready", "draining") else []

    def require_ready(self) -> tuple[LoadedModel, Tokenizer]:
        """The loaded model and tokenizer; a draining model still takes what is meant for it. Raises NoModelLoaded."""
        if self.state in ("ready", "draining") and self.model is not None and self.tokenizer is not None:
            return self.model, self.tokenizer
        raise self.not_ready()

    def require_admitting(self) -> tuple[LoadedModel, Tokenizer]:
        """Likewise; one that sleeps admits by its last load what was prepared before it did. Raises NoModelLoaded."""
        if self.asleep and self._last_model is not None and self.tokenizer is not None:
            return self._last_model, self.tokenizer
        return self.require_ready()

    def not_ready(self) -> NoModelLoaded:
        """The reason why it does not answer."""
        name, error = self.spec.name, self._status.error
        sentence, wait_s = {
            "loading": (f"{name} is still loading", RETRY_AFTER_S),
            "draining": (f"{name} is being unloaded", RETRY_AFTER_S),
            "unloading": (f"{name} is being unloaded", RETRY_AFTER_S),
            "idle": (f"{name} is unloaded while idle, until the next request", RETRY_AFTER_S),
            "failed": (f"{name} has failed: {error.message if error is not None else 'cause unknown'}", None),
        }.get(self.state, ("no model is loaded", None))
        return NoModelLoaded(sentence, state=self.state, retry_after_s=wait_s)

    def idle_s(self, now: float) -> float:
        """Seconds since a request last came or ended; 0 while any is live."""
        return 0.0 if not self.model_queue.idle else now - self.model_queue.last_used

    @property
    def waiting(self) -> int:
        """Number of requests that wait until it answers."""
        return self.waiters.total()

    @property
    def asleep(self) -> bool:
        """True if it sleeps, falls asleep or wakes up: `serve` makes it answer."""
        if self.desired == "gone":
            return False
        return self.state in ("idle", "unloading") or (self.state in ("unloaded", "loading") and self._slept)

    @property
    def waits_for_room(self) -> bool:
        """True if other models have to leave before it can be loaded."""
        return self.plan is not None and not self.plan.loading

    @property
    def unloading(self) -> bool:
        """True if an operator has it leave."""
        leaves = self.desired == "gone" and self.retired_by is None
        return leaves and self.state in ("ready", "draining", "unloading")

    @property
    def is_loading(self) -> bool:
        """True if the task of a load is under way."""
        return self._work is not None and not self._work.done()

    def places(self) -> Iterator[tuple[str, Request]]:
        """Return every request of the model with the place where it is. Raises AssertionError; see ModelQueue."""
        return self.model_queue.places(request for replica in self.replicas() for request in replica.active.values())

    # -- the desired state --------------------------------------------------------------------------------------

    def serve(self, wants_memory_of: Sequence[Deployment] = ()) -> asyncio.Future[LoadedModel]:
        """Want it ready. The future has the loaded model, or the EngineError that kept it from being ready.

        wants_memory_of: failed models that leave; it is placed once they are gone.
        """
        assert not self.ended.is_set(), f"{self.key} was unloaded"
        self.desired, self._wants_memory_of = "serving", wants_memory_of
        if self.owner is None:
            self._go("loading")
            self.owner = run_detached(self._own())
        self._signal.set()
        return self.arrival()

    def arrival(self) -> asyncio.Future[LoadedModel]:
        """The result of the load under way, as `serve` returns it."""
        if self._arrival is None:
            self._arrival = asyncio.get_running_loop().create_future()
            self._arrival.add_done_callback(lambda done: done.exception())
        return self._arrival

    def sleep(self) -> None:
        """Want its memory back until it is asked for again; a request that came meanwhile keeps it awake."""
        if self.desired == "serving":
            self.desired = "asleep"
            self._signal.set()

    def evict(self) -> asyncio.Future[None]:
        """Want its memory for another model: it finishes what it has, and sleeps; requests that come meanwhile wait for
        that, and then for its next load. The future is that of `Residency.left`."""
        self.desired, self.residency.is_evicted = "asleep", True
        self._signal.set()
        return self.residency.left()

    def stay(self) -> None:
        """Take back an eviction, unless it has left already."""
        if self.residency.is_evicted and self.desired == "asleep" and self.state in ("ready", "draining"):
            self.desired, self.residency.is_evicted = "serving", False
            self._signal.set()

    def retire(self, drain_s: float | None, error: EngineError, *, by: Handover | None = None) -> None:
        """Want it gone: running requests have `drain_s` (None: as long as they take), then they end with `error`, or
        move where the handover lets them. `gone` is set when nothing is left of it."""
        self.desired = "gone"
        self._leave_at = None if drain_s is None else _now() + drain_s
        self._leave_error, self.retired_by = error, by
        if self.owner is None:
            self.ended.set()
        self._signal.set()

    def keep(self) -> None:
        """Take back a `retire` where it still answers."""
        if self.desired == "gone" and self.state in ("ready", "draining"):
            self.desired, self._leave_at, self.retired_by = "serving", None, None
            self._signal.set()

    def cancel_load(self) -> asyncio.Future[LoadedModel] | None:
        """Give up a load under way: it sleeps on, or is gone. The future to wait for, None where nothing loads."""
        if not self.arriving:
            return None
        arrival = self.arrival()
        if self._slept or self.state == "unloading":
            self.desired, self._load_error = "asleep", self._cancelled()
            self._signal.set()
        else:
            self.retire(0, self._cancelled())
        return arrival

    def wake_owner(self) -> None:
        """Something changed that a transition may wait for."""
        self._signal.set()

    # -- transitions, made by the owner task alone --------------------------------------------------------------

    async def _own(self) -> None:
        """Move towards what is desired until it is gone."""
        while not (self.desired == "gone" and self.state == "unloaded"):
            self._signal.clear()
            try:
                if not await self._advance():
                    await self._next_signal()
            except Exception as error:
                _log.exception("%s: changing the model's state failed", self.spec.name)
                await self._fail_owner(error)
        self._on_load_result(self._load_error or self._cancelled())
        self.residency.end_leaving()
        self.ended.set()
        self.models.apply_changes()

    async def _advance(self) -> bool:
        """Make the next transition; False where there is none to make now."""
        state, desired = self.state, self.desired
        dead = self.pool.all_dead() if self.pool is not None else None
        if state == "loading" or (state == "idle" and desired == "serving"):
            await self._load()
        elif state == "idle" and desired == "gone":
            self.models.tracker.end(self.model_queue.live, self._leave_error.info)
            self._go("unloaded")
        elif state in ("ready", "draining") and dead is not None:
            self._fail(dead)
        elif state == "ready" and desired == "gone":
            self._go("draining")
        elif state == "ready" and desired == "asleep":
            if self.model_queue.idle:
                await self._unload("idle")
            elif self.residency.is_evicted:
                self._go("draining")
            else:
                self.desired = "serving"
        elif state == "draining" and desired == "serving":
            self._go("ready")
        elif state == "draining" and desired == "asleep" and self.model_queue.idle:
            await self._unload("idle")
        elif (state == "draining" and desired == "gone" and self._is_drained()) or (
            state == "failed" and desired == "gone"
        ):
            await self._unload("unloaded")
        elif state == "failed" and (revived := self._ready_model()) is not None:
            self._go("ready", revived)
        elif state == "idle" and desired == "asleep" and not self.model_queue.idle:
            self.desired = "serving"  # for a request that was prepared before it slept
        else:
            self._settle()
            return False
        return True

    async def _next_signal(self) -> None:
        """Wait until something happened that may call for a transition."""
        deadline = self._leave_at if self.state == "draining" and not self.model_queue.idle else None
        try:
            async with asyncio.timeout_at(deadline):
                await self._signal.wait()
        except TimeoutError:
            if self.retired_by is not None:
                self.retired_by.expire()
            else:
                self.models.tracker.end(self.model_queue.live, self._leave_error.info)
            self._signal.set()

    def _settle(self) -> None:
        """It is where it was to go, or cannot get there: who waits for it learns so."""
        if not leaves_memory(self):
            self.residency.end_leaving()
        if self.state == "ready" and self.desired == "serving":
            assert self.model is not None
            self._on_load_result(self.model)
        elif self.state == "failed" or (self.state == "idle" and self.desired == "asleep"):
            self._on_load_result(self._load_error or self.not_ready())

    def _on_load_result(self, result: LoadedModel | EngineError) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is None or arrival.done():
            return
        if isinstance(result, EngineError):
            arrival.set_exception(result)
        else:
            arrival.set_result(result)

    async def _load(self) -> None:
        """loading -> ready when the first worker is, or "failed"; "idle" again where it slept, or gone, where it is not
        wanted any more."""
        if self.state == "idle":
            self._slept = True
            self._go("loading")
        work = self._work = run_detached(self._bring_up())
        work.add_done_callback(lambda _: self._signal.set())
        while not work.done() and self.desired == "serving":
            await self._signal.wait()
            self._signal.clear()
        error: EngineError | None = None
        if self.desired != "serving":
            error = self._cancelled()
            self._abandon(self._leave_error)
            work.cancel()
            await asyncio.wait((work,))
        elif work.cancelled():
            error = self._cancelled()
            self._abandon(error)
        elif (failure := work.exception()) is not None:
            error = _as_load_error(self.spec.name, failure)
            self._alert_load_failed(error)
            self._abandon(error)
        self.plan = None
        if error is None:
            self._load_error = None
            self.models.failures.clear(self.spec.name)
            self.residency.load_ended(_now())
            self._last_model = work.result()
            self._go("ready", self._last_model)
            for request in self.model_queue.live:  # that an earlier load has admitted
                fit_or_end(request, self)
            self._mark_loaded()
            asyncio.get_running_loop().call_later(_WARM_UP_S, self._warm_up)
            if self.handover is not None:
                self.handover.complete()
            return
        self._load_error = error
        if not isinstance(error, LoadCancelled):
            self.models.failures.note(self.spec.name, error, _now())
        await self._release_memory()  # before any look at what is desired
        if isinstance(error, NoWaitingRequest) and not self.model_queue.idle:
            self._go("idle")  # a request came meanwhile
            return
        if self._slept and self._last_model is None and self.desired == "serving":
            self.desired = "gone"
            self._go("unloaded")
            return
        if self._slept:
            self.models.tracker.end(self.model_queue.live, error.info)
            self.desired = "asleep" if self.desired == "serving" else self.desired
            self._go("idle")
        elif self.desired == "serving":
            self._fail(error.info)
        else:
            self._go("unloaded")

    def _warm_up(self) -> None:
        if self.tokenizer is not None and self.state == "ready":
            self.tokenizer.warm_up()

    async def _bring_up(self) -> LoadedModel:
        """Read the folder, find places, start the workers, and wait for the first. Cancelled at any point, it leaves
        the workers that it started to `_load`."""
        is_read = False
        if self.config.library_prompts:  # still a default: it may fit this time
            default = self.ordered.for_backend(self.spec.backend).max_prompts
            self.config = msgspec.structs.replace(self.config, max_prompts=default)
        self.models.prepare_workers()
        while True:
            async with self.models.load_lock:
                for each in self._wants_memory_of:
                    await each.ended.wait()
                if not is_read:
                    await self._read()
                    is_read = True
                await self.models.sample_devices()
                if self.handover is not None and self.handover.new is self:
                    return await self._start(await self.handover.find_places())
                if self.handover is not None or not self._slept:
                    return await self._start(self.place(self.config.num_workers, self.models.devices()))
                room = find_room(self, self.models)
                if room.is_free:
                    return await self._start(room.placements)
            await make_room(self, self.models, room)

    async def _start(self, placements: Sequence[Placement]) -> LoadedModel:
        """Start the workers in their places, and wait for the first."""
        self.pool = Pool(self, msgspec.structs.replace(self.spec, prefix_salt=self._salt))
        self.adapters.set_workers(self.pool)
        unloads = self.plan.unloads if self.plan is not None else ()
        self.residency.load_began(_now(), unloads)
        self.plan = LoadPlan(
            unloads=unloads,
            began=time.time(),
            load_s=self.planner.expected_seconds(placements),
            loading=True,
        )
        self.pool.grow(placements)
        return await self.pool.first_ready()

    async def _unload(self, state: ModelState) -> None:
        """unloading, then `state`: "unloaded" or "idle"."""
        if self.retired_by is None and self.state != "failed":  # else a swap or a failure is marked
            self.models.meter.mark(time.time(), f"{self.spec.name} unloaded", kind="unload")
        self.models.tracker.end(self.model_queue.live, self._leave_error.info)
        self._go("unloading")
        await self._release_memory()
        self._go(state)
        self.residency.end_leaving()

    async def _release_memory(self) -> None:
        """Stop the workers, and the process of the chat template."""
        if self.pool is not None:
            await self.pool.stop()
        self.pool = None
        self.adapters.set_workers(None)
        if self.tokenizer is not None:
            await self.tokenizer.close()

    async def _fail_owner(self, error: Exception) -> None:
        """The owner itself failed: nothing runs on, and what waits learns why."""
        failure = _as_load_error(self.spec.name, error)
        self._load_error = failure
        self._abandon(failure)
        await self._release_memory()
        if self.state != "failed":
            self._fail(failure.info)

    def _is_drained(self) -> bool:
        """No request is left, and none of those that another model was to take may come back."""
        handover = self.handover
        returning = (
            handover is not None and handover.old is self and handover is not self.retired_by and handover.waiting
        )
        return self.model_queue.idle and not returning

    def _ready_model(self) -> LoadedModel | None:
        return next((replica.model for replica in self.replicas() if replica.state == "ready"), None)

    def _abandon(self, error: EngineError) -> None:
        if self.handover is not None and self.handover.new is self:
            self.handover.abandon(error)

    def _cancelled(self) -> LoadCancelled:
        return LoadCancelled(f"the load of {self.spec.name} was cancelled", model=self.spec.name)

    def _go(self, state: ModelState, model: LoadedModel | None = None) -> None:
        """Change the state, log it and show it. model: the result of a load, kept until the memory is given back."""
        self._allow(state)
        if model is not None:
            self.models.meter.add_model(self.spec.name, model.max_model_len)
        if state == "unloaded":
            self.tokenizer = None
        previous = self.model if state in ("ready", "draining", "unloading") else None
        self._status = ModelStatus(state=state, spec=self.spec, model=model or previous, since_s=time.time())
        _log.info("%s: %s", self.spec.name, state)
        self.models.apply_changes()

    def _fail(self, error: ErrorInfo) -> None:
        """No worker can answer: what waits ends with the reason."""
        self._allow("failed")
        if self.state in ("ready", "draining"):
            self.models.alerts.add(
                "model_failed",
                self.spec.name,
                f"{self.spec.name} has no worker left: {error.message}",
                done="Its queued requests failed.",
                advice="Restart a worker (r on its page), or load the model again.",
            )
        if self.pool is None:  # else a dead worker may be restarted
            self.tokenizer = None
        self._status = ModelStatus(state="failed", spec=self.spec, error=error, since_s=time.time())
        if self.loaded_by_request:
            self.models.failures.note(self.spec.name, from_info(error), _now())
        if self.desired == "asleep":
            self.desired = "serving"
        _log.error("%s: failed: %s", self.spec.name, error.message)
        handover = self.retired_by or self.handover
        if handover is not None and handover.old is self:
            handover.on_old_failed()
        self.models.tracker.end(self.model_queue.live, error)
        self.models.apply_changes()

    def _allow(self, state: ModelState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.spec.name} cannot go from {self.state} to {state}")

    # -- requests -----------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Note what waiting requests wait for from now on, and give them to workers with a free place."""
        reason: Cause = "slot"
        if self.state in ("unloaded", "idle", "loading", "unloading"):
            reason = "load" if self.handover is None else "swap"
        elif not self.slots():
            reason = "lost_worker"
        self.model_queue.waits.turn(_now(), reason)
        if self.model_queue.queued and self.pool is not None:
            for request, worker in self.models.tracker.assign(self.model_queue, self.slots()):
                self.pool[worker].submit(request)

    def take(self, request: Request) -> None:
        """Queue a request that waits; one whose prompt another model's tokenizer made, once it is made again.

        Where that cannot be, the request ends with the reason.
        """
        if request.prompt_of == self.spec.path or request.encode is None:
            request.model_queue = self.model_queue
            self.models.tracker.requeue(request)
            if self.asleep:
                self._signal.set()
        else:
            self.model_queue.prepare(request, run_detached(retokenize(request, request.encode, self)), _now())

    def finished(self, request: Request) -> None:
        """Take a request that ended from its worker, whose place goes to the next, and let go of adapters that were
        there for it alone."""
        self.release(request)
        self.adapters.settle(self.adapter_users())
        self.dispatch()
        if self.desired != "serving":
            self._signal.set()

    def release(self, request: Request) -> None:
        """Take a request from its worker, if it has one."""
        if self.pool is not None and request.worker is not None:
            self.pool.release(request)

    def adapter_users(self) -> Iterator[Request]:
        """Its requests, with those that a handover holds: they may come back, or take their adapters along."""
        yield from self.model_queue
        handover = self.retired_by or self.handover
        if handover is not None and handover.old is self:
            yield from handover.waiting

    # -- placement ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read what the folder says of the model: what it needs, and its tokenizer. Raises ModelLoadFailed."""
        try:
            await self.planner.read()
            if self.tokenizer is None:
                self.tokenizer = await asyncio.to_thread(Tokenizer.from_folder, self.spec.path)
        except OSError as error:
            raise ModelLoadFailed(f"{self.spec.name} cannot be read: {error}") from error

    def place(
        self, workers: int, devices: Sequence[DeviceReading], later: Sequence[DeviceReading] = ()
    ) -> list[Placement]:
        """Return placements of `workers` new workers; raises InsufficientMemory with the numbers.

        A default of max_prompts with which a model that has none yet does not fit becomes smaller.
        later: the devices without the workers that these replace.
        """
        place = partial(self.planner.place, workers, devices=devices, resident=bool(self.replicas()), later=later)
        fewer = self.config.with_fewer_prompts if self.pool is None else None
        try:
            return place(self.config)
        except InsufficientMemory:
            if fewer is None:
                raise
        placements = place(fewer)
        _log.info("%s: max prompts is %d, for want of memory", self.spec.name, fewer.max_prompts)
        self.config = fewer
        return placements

    # -- workers and knobs --------------------------------------------------------------------------------------

    def place_more(self, workers: int, devices: Sequence[DeviceReading]) -> list[Placement]:
        """Placements for the workers that are missing to `workers`, beyond those that drain and can be kept.

        Raises InsufficientMemory, also where that many will not fit once the model has left that it waits for.
        """
        if self.pool is None or self.state == "unloading":
            handover = self.handover
            if handover is not None and handover.new is self and handover.old.retired_by is handover:
                self.place(workers, self.models.devices(handover.old.replicas()))
            return []
        usable = sum(replica.state not in ("failed", "stopping") for replica in self.pool)
        missing = max(0, workers - usable)
        return self.place(missing, devices) if missing else []

    def reconfigure(self, config: EngineConfig, placements: Sequence[Placement] | None) -> None:
        """Take new knobs; growth and shrinking go on in the background.

        placements: of the workers that are missing, those that failed counted in; None leaves the workers as they are.
        """
        before, self.config = self.config, config
        mark_changes(self.models.meter, self.spec.name, before, self.config)
        if self.pool is not None:
            self.pool.reconfigure(before, config, placements)

    def drain_worker(self, worker_id: str) -> None:
        """Let one worker finish what it has and go; there is to be one less. One that goes already does so.

        Raises InvalidRequest where no worker would be left to answer.
        """
        if self.pool is not None and self.pool.drain_worker(worker_id):
            before = self.config
            self.config = msgspec.structs.replace(before, num_workers=max(1, before.num_workers - 1))
            mark_changes(self.models.meter, self.spec.name, before, self.config)

    def _mark_loaded(self) -> None:
        """Mark that it answers now, in place of another model or not."""
        old = self.handover.old.spec.name if self.handover is not None and self.handover.new is self else ""
        text, kind = (f"{old} → {self.spec.name}", "swap") if old else (f"{self.spec.name} loaded", "load")
        self.models.meter.mark(time.time(), text, model=self.spec.name, kind=kind)

    def _alert_load_failed(self, error: EngineError) -> None:
        """Add an alert of its failed load that says what serves meanwhile."""
        handover = self.handover
        replaces = handover is not None and handover.new is self and not handover.old.ended.is_set()
        serving = handover.old.spec.name if handover is not None and replaces else ""
        done = f"{serving} continues to serve." if serving else "Its memory was freed."
        add_failed_load(self.models.alerts, self.spec.name, error, done)

    def workers_changed(self) -> None:
        """Look again: a worker's state or progress is another one, or requests came back to the queue."""
        self.adapters.wake()
        self._signal.set()
        self.models.apply_changes()


def _as_load_error(name: str, error: BaseException) -> EngineError:
    """The error of a load as one sentence; what nothing foresaw is logged with its traceback."""
    if isinstance(error, EngineError):
        return error
    _log.error("%s: the load failed unexpectedly", name, exc_info=error)
    return ModelLoadFailed(f"{name} could not be loaded: {type(error).__name__}: {error}")


def _now() -> float:
    return asyncio.get_running_loop().time()
