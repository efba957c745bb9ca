"""ModelManager: the models that the engine holds, and which of them a name means.

It loads, replaces and unloads them by sending each deployment what it is to become; each deployment moves by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakSet

import msgspec

from engine.backends.base import LoadedModel, SequenceStats
from engine.backends.common.kv_tiers import tier_salt
from engine.config import MAX_TIMEOUT_S, AdapterSpec, EngineConfig, ModelSpec
from engine.devices import BusyTime
from engine.devices.sampler import DeviceSampler
from engine.errors import (
    EngineBusy,
    EngineClosed,
    EngineError,
    InvalidRequest,
    LoadCancelled,
    ModelNotFound,
    NoModelLoaded,
    QueueFull,
    RequestTimeout,
    WorkerNotFound,
)
from engine.metrics.alerts import AlertLog
from engine.metrics.meter import Meter
from engine.models.deployment import RETRY_AFTER_S, Deployment
from engine.models.eviction import LoadFailures, NoWaitingRequest
from engine.models.handover import Handover
from engine.models.knobs import Knobs, changed_fields
from engine.placement.load_history import LoadHistoryFile
from engine.placement.plan import Placement, with_reservations
from engine.requests.causes import Cause, knobs_of
from engine.requests.history import RequestText, text_of
from engine.requests.request import Request
from engine.requests.tracker import RequestTracker
from engine.scheduling.queue import ModelQueue, has_share_left
from engine.snapshot import DeviceReading
from engine.text.tokenizer import Tokenizer
from engine.worker_process.fork_server import ForkServer, can_fork
from engine.worker_process.hosts import BackendFactory, NewHost, host_factory
from engine.workers.replica import Replica

_log = logging.getLogger("engine")

_SHORTEST_STAY_S = 2.0
"""Of a model that is to leave after its last request, which may still be prepared."""

_MEANT = ("ready", "idle", "loading", "draining", "unloading", "failed")
"""States, the best first, in which a deployment is what its name means."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers now. key: its deployment; config: the engine's settings with its own knobs.

    adapter: the adapter that the name meant, else "".  adapters: the names of all that a request may use.
    waited: seconds until it answered, by cause.  unloads: models that left memory for a load that ended meanwhile.
    """

    key: str
    name: str
    spec: ModelSpec
    model: LoadedModel
    tokenizer: Tokenizer
    adapter: str = ""
    adapters: tuple[str, ...] = ()
    config: EngineConfig = EngineConfig()
    waited: dict[Cause, float] = {}
    unloads: tuple[str, ...] = ()


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a request may have loaded, and the knobs that are its own."""

    spec: ModelSpec
    knobs: Knobs = {}


FindModel = Callable[[str], Awaitable[LoadOrder | None]]
"""Finds the model of a name that is not loaded; None where there is none that may be loaded. Raises EngineError."""


class ModelManager:
    """Deployments in order of their coming, and what they share. defaults: the settings of the next model.

    first: the model that requests without a name go to.  on_change: called after every change.
    load_lock: of the one model that loads, from before its placement until a worker is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None,
        new_host: NewHost | None = None,
        meter: Meter,
        sampler: DeviceSampler,
        on_change: Callable[[], object],
        forks: ForkServer | None = None,
    ) -> None:
        self.defaults = config
        self.first: Deployment | None = None
        self.meter = meter
        self.alerts = AlertLog(meter)
        self.tracker = RequestTracker(self, meter)
        self.busy_time = BusyTime()
        self.load_history = LoadHistoryFile(config.state_dir) if config.state_dir is not None else None
        self.load_lock = asyncio.Lock()
        self.failures = LoadFailures()
        local_processes = new_host is None and config.worker_host == "process"
        if forks is None and local_processes and can_fork():
            forks = ForkServer()
        self._forks = forks
        self.new_host = new_host or host_factory(config, backend_factory, self._forks)
        self._deployments: list[Deployment] = []
        self._ever: WeakSet[Deployment] = WeakSet()
        self._numbers = count(1)
        self._sampler = sampler
        self._on_change = on_change
        self._num_workers = 0
        self._closed = False

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments)

    def __len__(self) -> int:
        return len(self._deployments)

    # -- names --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names that clients may use: of models, their aliases, and their adapters."""
        adapters = [adapter.name for deployment in self for adapter in deployment.adapters.specs()]
        aliases = [alias for deployment in self for alias in deployment.spec.aliases]
        return list(dict.fromkeys([*(deployment.spec.name for deployment in self), *aliases, *adapters]))

    def find_deployment(self, name: str) -> tuple[Deployment, str]:
        """The deployment that `name` means ("" is the first), and the adapter where it is one's name.

        Raises NoModelLoaded where there is nothing at all, ModelNotFound with what there is.
        """
        if self.first is None:
            raise NoModelLoaded("no model is loaded", state="unloaded")
        if not name:
            return self.first, ""
        present = [each for each in reversed(self._deployments) if each.state in _MEANT]
        named = [each for each in present if each.spec.name == name]
        if found := named or [each for each in present if name in each.spec.aliases]:
            return min(found, key=lambda each: _MEANT.index(each.state)), ""
        for deployment in reversed(self._deployments):
            if name in deployment.adapters:
                return deployment, name
        raise self._not_found(name, may_wake=True)

    def answers_now(self, name: str) -> bool:
        """Return whether a request for a name need not wait for its model."""
        try:
            deployment, _ = self.find_deployment(name)
        except EngineError:
            return False
        return deployment.state == "ready" and not deployment.residency.is_evicted

    def by_key(self, key: str) -> Deployment | None:
        """The deployment of that key, where it still is."""
        return next((deployment for deployment in self if deployment.key == key), None)

    def _by_queue(self, model_queue: ModelQueue) -> Deployment | None:
        return next((deployment for deployment in self if deployment.model_queue is model_queue), None)

    # -- workers and devices ------------------------------------------------------------------------------------

    def replicas(self) -> tuple[Replica, ...]:
        """The workers of all models."""
        return tuple(replica for deployment in self for replica in deployment.replicas())

    def pids(self) -> set[int]:
        """The processes that are ours: this one, the workers' and those that start them."""
        others = set[int]() if self._forks is None else self._forks.pids
        return {os.getpid(), *others, *(pid for replica in self.replicas() for pid in replica.pids)}

    def devices(self, without: Collection[Replica] = ()) -> list[DeviceReading]:
        """The devices as placement must see them: with what workers were promised set aside, and without those gone."""
        surviving_bytes = self._forks.kept_bytes if self._forks is not None else lambda worker_id: 0
        return with_reservations(self._sampler.latest, self.replicas(), without, surviving_bytes)

    async def read_devices(self, without: str | None = None) -> list[DeviceReading]:
        """Read the devices and return them as placement sees them. without: a model whose workers count as gone."""
        leaving = () if without is None else self.find_deployment(without)[0].replicas()
        await self.sample_devices()
        return self.devices(leaving)

    async def sample_devices(self) -> None:
        """Read the devices again."""
        await self._sampler.read(self.pids())

    def new_worker_id(self) -> str:
        """Return an id that no worker has."""
        used = {replica.id for replica in self.replicas()}
        return next(name for name in (f"w{number}" for number in count()) if name not in used)

    def replica(self, worker_id: str) -> tuple[Deployment, Replica]:
        """Return the worker of an id, and its model. Raises InvalidRequest where there is none."""
        for deployment in self:
            for replica in deployment.replicas():
                if replica.id == worker_id:
                    return deployment, replica
        ids = ", ".join(replica.id for replica in self.replicas()) or "none"
        raise WorkerNotFound(f"There is no worker {worker_id}; available: {ids}", param="worker", value=worker_id)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker, or for the model that is to answer them."""
        moving = sum(len(handover.waiting) for handover in self._handovers())
        return sum(deployment.model_queue.queued for deployment in self) + moving

    @property
    def num_waiting(self) -> int:
        """Requests that wait until a model answers, and are in no queue yet."""
        return sum(deployment.waiting for deployment in self)

    async def serving(
        self, name: str, find: FindModel | None = None, *, may_wake: bool = True, client: str = ""
    ) -> Serving:
        """Return the model that a name means once it answers; wake it, or wait for its successor.

        find: of models that are not here, those that may be loaded for the request.  may_wake: False hides models that
        other requests have had loaded, unless they are in memory.  client: who has a share of those that wait.
        """
        limit_s, waited = self.defaults.timeout_s, defaultdict[Cause, float](float)
        asked = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s or None):
                while True:
                    if self._closed:
                        raise EngineClosed("the engine is shutting down")
                    deployment, adapter = await self._find_or_order(name, find, may_wake=may_wake)
                    if deployment.state == "ready" and not deployment.residency.is_evicted:
                        if deployment.desired == "asleep":
                            deployment.serve()
                        deployment.residency.demand.add(asyncio.get_running_loop().time())
                        unloads = deployment.residency.unloads_since(asked) if waited else ()
                        return _serving(deployment, adapter, waited, unloads)
                    cause: Cause = "load" if deployment.handover is None else "swap"
                    began = asyncio.get_running_loop().time()
                    await self._until_ready(deployment, client)
                    waited[cause] += asyncio.get_running_loop().time() - began
        except TimeoutError:
            raise RequestTimeout(f"the model was not ready within {limit_s:g} s", timeout_s=limit_s) from None

    def keep_alive(self, key: str, idle_s: float | None) -> bool:
        """Have a model that a request has loaded stay so long after its last request: 0 unloads it then, below 0 it
        stays, None is as its settings say. Returns False, with nothing changed, for one that an operator has loaded."""
        deployment = self.by_key(key)
        if deployment is None or not deployment.loaded_by_request:
            return False
        if idle_s is None:
            deployment.residency.keep_alive_s = None
        else:
            deployment.residency.keep_alive_s = 0.0 if idle_s < 0 else min(max(idle_s, _SHORTEST_STAY_S), MAX_TIMEOUT_S)
        return True

    def sleep(self, key: str) -> bool:
        """Have a model that a request has loaded, and that is ready, finish what it runs and leave memory until its
        next request. Returns False, with nothing changed, for one that an operator has loaded."""
        deployment = self.by_key(key)
        if deployment is None or not deployment.loaded_by_request:
            return False
        if deployment.state == "ready":
            deployment.sleep()
        return True

    async def _find_or_order(self, name: str, find: FindModel | None, *, may_wake: bool) -> tuple[Deployment, str]:
        """Return the deployment that a name means; a new one where `find` finds a model that is not here, or that has
        changed since it was loaded."""
        found, adapter = self._find_visible(name, may_wake=may_wake)
        if found is not None and (not _is_outdated(found) or adapter or not name or find is None):
            return found, adapter
        order = await find(name) if find is not None else None
        tiers_salt = await _tiers_salt(order.spec) if order is not None else None
        if self._closed:
            raise EngineClosed("the engine is shutting down")
        found, adapter = self._find_visible(name, may_wake=may_wake)  # it may have come meanwhile
        if found is not None and not _is_outdated(found):
            return found, adapter
        if order is None:
            raise self._not_found(name, may_wake=may_wake)
        config = msgspec.structs.replace(self.defaults, **changed_fields(order.knobs)).validate()
        if (here := next((each for each in self if _serves(each, order.spec, config)), None)) is not None:
            return here, ""
        self.failures.check(order.spec.name, asyncio.get_running_loop().time())
        for each in list(self):
            same = each.spec.name == order.spec.name and each.spec.path == order.spec.path
            if each.desired != "gone" and _is_outdated(each) and (same or each.spec.name == name):
                each.retire(0, each.not_ready())
        if any(each.spec.name == order.spec.name and each.desired != "gone" for each in self):  # of another folder
            order = msgspec.structs.replace(order, spec=msgspec.structs.replace(order.spec, name=name))
        key = f"{order.spec.name}#{next(self._numbers)}"
        ordered = Deployment(key, order.spec, config, self, tiers_salt, loaded_by_request=True)
        self._add(ordered)
        ordered.serve()
        return ordered, ""

    def _find_visible(self, name: str, *, may_wake: bool) -> tuple[Deployment | None, str]:
        """Return what `find_deployment` does; None where there is nothing, or nothing that may be woken."""
        try:
            found, adapter = self.find_deployment(name)
        except (ModelNotFound, NoModelLoaded):
            if not name:
                raise
            return None, ""
        return (None, "") if name and not may_wake and self._is_hidden(found) else (found, adapter)

    def _is_hidden(self, deployment: Deployment) -> bool:
        return deployment.loaded_by_request and deployment.state not in ("ready", "draining")

    def _not_found(self, name: str, *, may_wake: bool) -> EngineError:
        if self.first is None:
            return NoModelLoaded("no model is loaded", state="unloaded")
        hidden = {each.spec.name for each in self if self._is_hidden(each)}
        hidden |= {alias for each in self if self._is_hidden(each) for alias in each.spec.aliases}
        available = ", ".join(each for each in self.names() if may_wake or each not in hidden)
        return ModelNotFound(
            f"There is no model {name!r}; available: {available}", param="model", model=name, available=available
        )

    def _add(self, deployment: Deployment) -> None:
        self._deployments.append(deployment)
        self._ever.add(deployment)
        if self.first is None:
            self.first = deployment

    async def _until_ready(self, deployment: Deployment, client: str) -> None:
        """Wait for what makes it, or its successor, answer. Raises NoModelLoaded where nothing is on its way, the error
        of a model that could not be woken, and QueueFull where a client has its share of those that wait."""
        awaited: asyncio.Future[Any]
        wakes = False
        if (handover := deployment.handover) is not None:
            awaited = handover.new.arrival()
        elif deployment.residency.is_evicted:
            awaited = deployment.residency.left()
        elif deployment.asleep:
            self.failures.check(deployment.spec.name, asyncio.get_running_loop().time())
            awaited, wakes = deployment.serve(), True
        else:
            raise deployment.not_ready()
        limit, waiters = self.defaults.max_queue, deployment.waiters
        if deployment.waiting >= limit and not has_share_left(waiters, client, limit):
            plan = (deployment if handover is None else handover.new).plan
            raise QueueFull.with_wait(
                f"the queue for {deployment.spec.name} is full: {deployment.waiting} requests, max {limit}",
                None if plan is None else plan.remaining_s(time.time()),
                retry_s=RETRY_AFTER_S,
                queued=deployment.waiting,
                limit=limit,
            )
        waiters[client] += 1
        try:
            await asyncio.wait((awaited,))
        finally:
            waiters[client] -= 1
            if not waiters[client]:
                del waiters[client]
        if not wakes or self._closed or isinstance(awaited.exception(), NoWaitingRequest):
            return
        if (error := awaited.exception()) is not None:
            raise deployment.not_ready() if isinstance(error, LoadCancelled) else error

    def finished(self, request: Request) -> None:
        """RequestOwner: it leaves its worker, and others may take its place."""
        deployment = self._by_queue(request.model_queue)
        if deployment is not None:
            deployment.finished(request)

    def knobs_of(self, request: Request) -> Mapping[str, int]:
        """RequestOwner: as they are now."""
        deployment = self._by_queue(request.model_queue)
        config = self.defaults if deployment is None else deployment.config
        return knobs_of(config)

    def sequences(self, worker: str | None = None) -> Iterator[SequenceStats]:
        """RequestOwner: of the workers' last reports."""
        replicas = (each for each in self.replicas() if worker is None or each.id == worker)
        return (sequence for replica in replicas for sequence in replica.stats.sequences)

    def text_of(self, request: Request) -> RequestText | None:
        """RequestOwner: nothing, unless the settings allow it."""
        deployment = self._by_queue(request.model_queue) if self.config.show_prompts else None
        if deployment is None or deployment.tokenizer is None:
            return None
        return text_of(deployment.tokenizer, request.prompt_ids, request.generated)

    def dispatch(self) -> None:
        """Give waiting requests to workers with a free place."""
        for deployment in self:
            deployment.dispatch()

    # -- loading and unloading ----------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        """Load a model in place of another, or in addition, and wait for its first worker. config: with its knobs."""
        tiers_salt = await _tiers_salt(spec)
        if self._closed:
            raise EngineClosed("the engine is shutting down")
        if busy := self._busy():
            raise EngineBusy(busy, state="busy")
        failed = [each for each in self if each.state == "failed" and not (beside and each.replicas())]
        old = self._replaced_by(spec, beside, [each for each in self if each.desired != "gone" and each not in failed])
        new = Deployment(f"{spec.name}#{next(self._numbers)}", spec, config, self, tiers_salt)
        for each in failed:
            each.retire(0, each.not_ready())
        self._add(new)
        if self.first in failed:
            self.first = new
        if old is not None:
            Handover(old, new, self.tracker)
        return await asyncio.shield(new.serve(failed))

    async def cancel_load(self) -> None:
        """Cancel the current load, if any, and wait until its workers are gone."""
        loads = [load for each in self if (load := each.cancel_load()) is not None]
        if loads:
            await asyncio.wait(loads)

    async def unload(self, name: str, drain_s: float, error: EngineError) -> None:
        """Drain and unload all that has the name of one model, the first by default, and what is being loaded in its
        place; `error` ends the requests that took too long."""
        target = self.find_deployment(name)[0] if name else self.first
        leaving = [each for each in self if target is not None and each.spec.name == target.spec.name]
        leaving += [each.handover.new for each in leaving if each.handover is not None]
        for each in leaving:
            each.retire(drain_s, error)
        for each in leaving:
            await each.ended.wait()

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload everything within `drain_s`, whatever is under way."""
        self._closed = True
        deployments = list(self)
        for each in deployments:
            each.retire(drain_s, error)
        for each in deployments:
            await each.ended.wait()
        if self._forks is not None:
            await self._forks.close()

    def prepare_workers(self) -> None:
        """Have imported what workers import, in the background: a load is about to begin."""
        if self._forks is not None and not self._closed:
            with contextlib.suppress(OSError):  # the worker will say so
                self._forks.prepare()

    @property
    def keeps_memory(self) -> bool:
        """True if the RAM files of a worker outlive it, until `release_memory`."""
        return self._forks is not None

    def release_memory(self, worker_id: str) -> None:
        """Free what is kept of a worker for the one that takes its place."""
        if self._forks is not None:
            self._forks.release_memory(worker_id)

    def _busy(self) -> str:
        """Why a load cannot begin; "" where it can."""
        for each in self:
            if each.unloading:
                return f"{each.spec.name} is being unloaded; wait for it"
            if each.arriving and not each.waits_for_room:
                return f"{each.spec.name} is loading; wait, or cancel the load"
            if each.state == "loading" and not each.waits_for_room:
                return f"the load of {each.spec.name} is being cancelled; wait for it"
        return ""

    def _replaced_by(self, spec: ModelSpec, beside: bool, staying: Sequence[Deployment]) -> Deployment | None:
        same = next((each for each in staying if each.spec.name == spec.name), None)
        if beside and same is not None and not (same.state == "idle" and same.spec.path == spec.path):
            raise InvalidRequest(f"a model named {spec.name} exists; give this one another name", param="name")
        if beside:
            return same
        return same or (self.first if self.first in staying else None)

    def _handovers(self) -> list[Handover]:
        found = (handover for each in self for handover in (each.handover, each.retired_by))
        return list(dict.fromkeys(handover for handover in found if handover is not None))

    def apply_changes(self) -> None:
        """Draw the consequences of a change of a deployment or a worker for the others."""
        for handover in self._handovers():
            arrived = handover.new.state == "ready" or handover.old.state == "unloaded"
            if arrived and handover.new.handover is handover and self.first is handover.old:
                self.first = handover.new
        for each in list(self):
            if each.state == "unloaded":
                self._remove(each)
            elif each.state == "failed" and not each.replicas() and len(self) > 1 and each.desired != "gone":
                each.retire(0, each.not_ready())
        num_workers = len(self.replicas())
        if num_workers != self._num_workers:
            self._num_workers = num_workers
            for each in self:
                if each.pool is not None:
                    each.pool.share_cores()
        self.dispatch()
        self._on_change()

    def _remove(self, deployment: Deployment) -> None:
        self._deployments.remove(deployment)
        if self.first is deployment:
            ranked = sorted(self, key=lambda each: _MEANT.index(each.state))
            self.first = next(iter(ranked), None)

    # -- knobs --------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The settings, the knobs being the first model's."""
        return self.first.config if self.first is not None else self.defaults

    async def reconfigure(self, name: str, changes: Mapping[str, Any]) -> None:
        """Set knobs of a model, and of the one that is being loaded in its place. changes: fields of EngineConfig."""
        msgspec.structs.replace(self.defaults, **changes).validate()
        grows = "num_workers" in changes
        if grows:
            await self.sample_devices()
        target = self.find_deployment(name)[0] if name else self.first
        planned: list[tuple[Deployment, EngineConfig, Sequence[Placement] | None]] = []
        for each in self._with_successor(target, name):
            config = msgspec.structs.replace(each.config, **changes)
            planned.append((each, config, each.place_more(config.num_workers, self.devices()) if grows else None))
        for each, config, placements in planned:
            each.reconfigure(config, placements)
        if target is self.first:
            self.defaults = msgspec.structs.replace(self.defaults, **changes)
        self.apply_changes()

    def set_itl_target(self, target_s: float | None) -> None:
        """Have the workers of every model keep this time between tokens, those to come included; None for no target."""
        self.defaults = msgspec.structs.replace(self.defaults, slo_itl_s=target_s)
        for deployment in self:
            deployment.reconfigure(msgspec.structs.replace(deployment.config, slo_itl_s=target_s), None)

    def drain_worker(self, worker_id: str) -> None:
        """Let a worker finish what it has and go; its model is to have one less from now on."""
        deployment, _ = self.replica(worker_id)
        deployment.drain_worker(worker_id)
        if deployment is self.first:
            self.defaults = msgspec.structs.replace(self.defaults, num_workers=deployment.config.num_workers)
        self.apply_changes()

    async def attach(self, adapter: AdapterSpec, name: str) -> None:
        """Make a LoRA adapter usable by requests of a model, and of its successors."""
        target = self.find_deployment(name)[0]
        if adapter.name in self.names() and adapter.name not in target.adapters:
            raise InvalidRequest(f"{adapter.name} is already the name of a model or adapter", param="name")
        handover = target.handover
        if handover is not None and not handover.same_model:
            old, new = handover.old.spec.name, handover.new.spec.name
            raise EngineBusy(f"{new} is replacing {old}; attach the adapter afterwards", state="busy")
        model, _ = target.require_ready()
        if not model.adapters_per_request:
            raise InvalidRequest(
                f"the {model.backend} backend applies an adapter to every request: load {target.spec.name} with --lora",
                param="adapter",
            )
        attached = await target.adapters.attach(adapter, target.adapter_users())
        _log.info("%s: adapter %s attached", target.spec.name, adapter.name)
        self.apply_changes()
        successors = self._same_model_successors(target)
        if target.desired == "gone" and not successors:
            raise NoModelLoaded(f"{target.spec.name} is being unloaded", state=target.state)
        for successor in successors:
            successor.adapters.adopt(attached)

    def detach(self, adapter: str, name: str) -> None:
        """Forget a LoRA adapter of a model, and of the one that is being loaded in its place."""
        target = self.find_deployment(name or adapter)[0]
        if adapter not in target.adapters:
            raise ModelNotFound(f"{target.spec.name} has no adapter {adapter!r}", param="name", model=adapter)
        for each in self._with_successor(target, name):
            if adapter in each.adapters:
                each.adapters.detach(adapter, each.adapter_users())
                _log.info("%s: adapter %s detached", each.spec.name, adapter)
        self.apply_changes()

    def _same_model_successors(self, target: Deployment) -> list[Deployment]:
        """Those of the same model that have taken, or are to take, the place of a deployment."""
        successors: list[Deployment] = []
        current: Deployment | None = target
        while current is not None:
            replaced = current.handover is not None and current.handover.old is current
            current = current.handover.new if current.handover is not None and replaced else current.successor
            if current is None or current.spec.path != target.spec.path:
                break
            successors.append(current)
        return successors

    def _with_successor(self, target: Deployment | None, name: str) -> list[Deployment]:
        """The deployments that a change is for: also the one that is being loaded in the target's place, unless another
        name was given."""
        if target is None:
            return []
        new = target.handover.new if target.handover is not None else target
        return [target] if new is target or (name and new.spec.name != target.spec.name) else [target, new]

    # -- once a second ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Once a second: have pools check their workers, note where knobs are in effect, and let models that were not
        asked for long sleep."""
        for deployment in list(self):
            if (pool := deployment.pool) is None:
                continue
            pool.check(now)
            if pool.is_settled(deployment.config):
                self.meter.settle(deployment.spec.name, time.time())
        if any(deployment.arriving for deployment in self):
            return
        successors = {handover.final_successor for handover in self._handovers() if handover.same_model}
        for deployment in self:
            limit_s = deployment.residency.idle_limit_s(deployment.config)
            may_sleep = deployment.state == "ready" and deployment not in successors
            if limit_s and may_sleep and deployment.idle_s(now) >= limit_s:
                deployment.sleep()

    def check(self) -> None:
        """Prove the accounts of models, workers and requests; raises AssertionError with what disagrees.

        Each live request is in exactly one place: a queue, one worker, or a handover. Each model that is listed has its
        owner, and one that is not has no workers.
        """
        places: dict[int, list[str]] = {id(request): [] for request in self.tracker.live.values()}
        for each in self:
            _require(each.owner is not None and not each.owner.done(), f"{each.key} has no owner")
            _require(each.state != "unloaded", f"{each.key} is listed and unloaded")
            for place, request in each.places():
                _require(id(request) in places, f"{request.id} ({place}) is not live")
                places[id(request)].append(place)
        for each in self._ever.difference(self._deployments):
            _require(not each.replicas() and each.state == "unloaded", f"{each.key} is {each.state} and not listed")
            _require(not each.is_loading, f"{each.key} is not listed and still loads")
        for handover in self._handovers():
            for request in handover.waiting:
                _require(id(request) in places, f"{request.id} (held) is not live")
                places[id(request)].append("held")
        for request in self.tracker.live.values():
            found = places[id(request)]
            _require(len(found) == 1, f"{request.id} is in {found or 'no place'}")
        _require(
            self.first is None if not self._deployments else self.first in self._deployments, "first is not listed"
        )


def _is_outdated(deployment: Deployment) -> bool:
    """Return whether the next request that names a model looks for its folder and settings again."""
    sleeps = deployment.state in ("idle", "failed") and deployment.model_queue.idle
    return deployment.loaded_by_request and sleeps


def _serves(deployment: Deployment, spec: ModelSpec, config: EngineConfig) -> bool:
    """Return whether a deployment is, or will be, what is to be loaded: the folder under that name, or the same load
    under another. One that is looked for again must be as it would be loaded now."""
    same = msgspec.structs.replace(spec, name=deployment.spec.name) == deployment.spec
    if deployment.desired == "gone" or deployment.state == "failed":
        return False
    if _is_outdated(deployment):
        return same and deployment.ordered == config
    return same or (deployment.spec.name == spec.name and deployment.spec.path == spec.path)


async def _tiers_salt(spec: ModelSpec) -> bytes | None:
    """Return `tier_salt`, while other models are served."""
    return await asyncio.to_thread(tier_salt, spec) if spec.kv_host_gib or spec.kv_disk_gib else None


def _serving(deployment: Deployment, adapter: str, waited: dict[Cause, float], unloads: tuple[str, ...]) -> Serving:
    model, tokenizer = deployment.require_ready()
    deployment.model_queue.last_used = asyncio.get_running_loop().time()
    return Serving(
        key=deployment.key,
        name=deployment.spec.name,
        spec=deployment.spec,
        model=model,
        tokenizer=tokenizer,
        waited=waited,
        unloads=unloads,
        adapter=adapter,
        adapters=tuple(each.name for each in deployment.adapters.specs()),
        config=deployment.config,
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
