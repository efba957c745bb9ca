"""Fleet: the models that the engine holds, which of them a name means, and what becomes of one when another is loaded.

One load or unload runs at a time, as a task of its own: who asked for it may go away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import count
from typing import TypeVar

import msgspec

from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, EngineConfig, ModelSpec
from engine.deployment import Deployment, Surroundings
from engine.desk import Desk
from engine.errors import (
    EngineBusy,
    EngineError,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelNotFound,
    NoModelLoaded,
    QueueFull,
    RequestTimeout,
)
from engine.handover import Handover
from engine.metrics import Metrics
from engine.placement import Placement
from engine.pool import NewHost, host_factory
from engine.replica import Replica
from engine.request import Request
from engine.sampler import DeviceSampler
from engine.snapshot import DeviceReading
from engine.text.tokenizer import Tokenizer
from engine.worker.hosts import BackendFactory

SWITCH_DRAIN_S = 30.0
_TAKES_REQUESTS = ("ready", "idle", "loading", "draining", "unloading", "failed")
"""States, the best first, in which a deployment is what its name means."""
T = TypeVar("T")


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers now. key: its deployment; adapter: what a name meant that is an adapter's, else "".
    adapters: those that a request of it may name."""

    key: str
    name: str
    spec: ModelSpec
    model: LoadedModel
    tokenizer: Tokenizer
    adapter: str = ""
    adapters: tuple[str, ...] = ()


class Fleet:
    """Owns every deployment. config: the knobs that the next model gets. on_change: after every change."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None,
        new_host: NewHost | None = None,
        desk: Desk,
        metrics: Metrics,
        sampler: DeviceSampler,
        on_change: Callable[[], None],
    ) -> None:
        self.config = config
        self.first: Deployment | None = None
        self._deployments: list[Deployment] = []
        self._desk = desk
        self._sampler = sampler
        self._on_change = on_change
        self._around = Surroundings(
            desk=desk,
            metrics=metrics,
            new_host=new_host or host_factory(config, backend_factory),
            devices=lambda: sampler.latest,
            new_id=self._new_worker_id,
            on_change=on_change,
        )
        self._numbers = count(1)
        self._loading: asyncio.Task[LoadedModel] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._naps: dict[str, asyncio.Task[None]] = {}
        self._handover: Handover | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._waiting = 0

    # -- what is ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments)

    def replicas(self) -> tuple[Replica, ...]:
        """The workers of all models."""
        return tuple(replica for deployment in self for replica in deployment.replicas())

    def pids(self) -> set[int]:
        """The processes that are ours: this one and the workers'."""
        return {os.getpid(), *(replica.pid for replica in self.replicas() if replica.pid is not None)}

    @property
    def queued(self) -> int:
        """Requests that wait for a worker, or for the model that is to answer them."""
        held = self._handover.held if self._handover is not None else 0
        return sum(deployment.lane.queued for deployment in self) + held

    def names(self) -> list[str]:
        """What clients may name: models, and their adapters."""
        adapters = [adapter.name for deployment in self for adapter in deployment.adapters.specs()]
        return list(dict.fromkeys([*(deployment.spec.name for deployment in self), *adapters]))

    def named(self, name: str) -> tuple[Deployment, str]:
        """The deployment that `name` means ("" is the first), and the adapter where it is one's name.

        Raises NoModelLoaded where there is nothing at all, ModelNotFound with what there is.
        """
        if self.first is None:
            raise NoModelLoaded("no model is loaded", state="unloaded")
        if not name:
            return self.first, ""
        for state in _TAKES_REQUESTS:
            for deployment in reversed(self._deployments):
                if deployment.state == state and deployment.spec.name == name:
                    return deployment, ""
        for deployment in reversed(self._deployments):
            if name in deployment.adapters:
                return deployment, name
        available = ", ".join(self.names())
        raise ModelNotFound(
            f"There is no model {name!r} here; available: {available}", param="model", model=name, available=available
        )

    def by_key(self, key: str) -> Deployment | None:
        """The deployment of that key, where it still is."""
        return next((deployment for deployment in self if deployment.key == key), None)

    async def serving(self, name: str) -> Serving:
        """The model that `name` means, once it answers: one that sleeps is woken, one that is replaced waited for.

        Raises as `named`, NoModelLoaded with the state, QueueFull where too many wait already, RequestTimeout, and what
        waking it up fails with.
        """
        limit_s = self.config.timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                while True:
                    deployment, adapter = self.named(name)
                    if deployment.state == "ready":
                        return self._serving(deployment, adapter)
                    await self._until_ready(deployment)
        except TimeoutError:
            raise RequestTimeout(f"the model was not ready within {limit_s:g} s", timeout_s=limit_s) from None

    def release(self, request: Request) -> None:
        """An ended request leaves its worker."""
        for deployment in self:
            if deployment.lane is request.lane:
                deployment.release(request)

    def dispatch(self) -> None:
        """Give waiting requests to workers with a free place."""
        for deployment in self:
            deployment.dispatch()

    # -- what is asked ------------------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        """See Engine.load."""
        if busy := self._busy():
            raise EngineBusy(busy, state="busy")
        self._loading = _detached(self._load(spec, config, beside=beside))
        return await asyncio.shield(self._loading)

    async def cancel_load(self) -> None:
        """See Engine.cancel_load."""
        task = self._loading
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))

    async def unload(self, name: str, drain_s: float, error: EngineError) -> None:
        """Drain and unload one model, the first by default; `error` ends the requests that took too long."""
        await self.cancel_load()
        if self._unloading is not None and not self._unloading.done():
            await asyncio.shield(self._unloading)
            return
        if self.first is None:
            return
        target = self.named(name)[0]
        self._unloading = _detached(self._unload(target, drain_s, error))
        await asyncio.shield(self._unloading)

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload everything within `drain_s`, whatever is under way."""
        await self.cancel_load()
        under_way = [*self._naps.values(), *self._leaving, *([self._unloading] if self._unloading else [])]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        await asyncio.gather(*(self._unload(deployment, drain_s, error) for deployment in list(self)))

    def reconfigure(
        self, name: str, *, workers: int | None, max_prompts: int | None, idle_unload_s: float | None
    ) -> None:
        """See Engine.reconfigure."""
        wanted = {"num_workers": workers, "max_prompts": max_prompts, "idle_unload_s": idle_unload_s}
        changes = {field: value for field, value in wanted.items() if value is not None}
        msgspec.structs.replace(self.config, **changes).validate()
        target = self.named(name)[0] if name or self.first is not None else None
        if target is not None:
            config = msgspec.structs.replace(target.config, **changes)
            placements = target.place_more(config.num_workers, self._sampler.latest) if workers is not None else []
            target.turn(config, placements)
        if target is self.first:
            self.config = msgspec.structs.replace(self.config, **changes)
        self._on_change()

    def restart_worker(self, worker_id: str) -> None:
        """See Engine.restart_worker."""
        found = next((replica for replica in self.replicas() if replica.id == worker_id), None)
        if found is None:
            raise InvalidRequest(f"there is no worker {worker_id}", param="worker", value=worker_id)
        found.restart()

    async def attach(self, adapter: AdapterSpec, name: str) -> None:
        """See Engine.attach."""
        target = self.named(name)[0]
        if adapter.name in self.names() and adapter.name not in target.adapters:
            raise InvalidRequest(f"{adapter.name} is the name of something else already", param="name")
        await target.attach(adapter)

    async def detach(self, adapter: str, name: str) -> None:
        """See Engine.detach."""
        target = self.named(name or adapter)[0]
        target.detach(adapter)

    def tick(self, now: float) -> None:
        """Once a second: replace workers that are hung, and put models to sleep that nobody has asked for long."""
        for replica in self.replicas():
            replica.check(now)
        for deployment in self:
            limit_s = deployment.config.idle_unload_s
            if limit_s and deployment.state == "ready" and deployment.idle_s(now) >= limit_s and not self._busy():
                self._naps[deployment.key] = _detached(deployment.take_down("idle"))

    # -- loading ------------------------------------------------------------------------------------------------

    async def _load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        for dead in [each for each in self if each.state == "failed"]:
            await self._drop(dead)
        old = self._replaced_by(spec, beside)
        new = Deployment(f"{spec.name}#{next(self._numbers)}", spec, config, self._around)
        self._deployments.append(new)
        if self.first is None:
            self.first = new
        try:
            new.set("loading")
            await new.read()
            await self._sampler.read(self.pids())
            if old is None or not old.replicas():
                model = await self._load_alone(new, old)
            else:
                model = await self._replace(old, new)
        except asyncio.CancelledError:
            await self._drop(new)
            raise LoadCancelled(f"the load of {spec.name} was cancelled", model=spec.name) from None
        except EngineError as error:
            if self.first is new and len(self._deployments) == 1:
                new.fail(error.info)
            else:
                await self._drop(new)
            raise
        return model

    def _replaced_by(self, spec: ModelSpec, beside: bool) -> Deployment | None:
        same = next((each for each in self if each.spec.name == spec.name and each.state in ("ready", "idle")), None)
        if not beside:
            return same or self.first
        if same is not None:
            raise InvalidRequest(
                f"a model named {spec.name} is loaded already; give this one another name", param="name"
            )
        return None

    async def _load_alone(self, new: Deployment, old: Deployment | None) -> LoadedModel:
        """Nothing serves that it would replace."""
        model = await new.bring_up(self._place(new, self._sampler.latest))
        if old is not None:
            self._succeed(old, new)
            await self._drop(old)
        return model

    async def _replace(self, old: Deployment, new: Deployment) -> LoadedModel:
        """`new` for `old`: beside it where both fit, else after it; refused with nothing changed where it cannot."""
        self._handover = handover = Handover(old, new, self._desk)
        try:
            try:
                placements = self._place(new, self._sampler.latest)
            except InsufficientMemory:
                self._place(new, released(self._sampler.latest, old.replicas()))
                await handover.empty(SWITCH_DRAIN_S)
                self._succeed(old, new)
                await self._drop(old)
                await self._sampler.read(self.pids())
                placements = self._place(new, self._sampler.latest)
            model = await new.bring_up(placements)
            self._succeed(old, new)
            handover.complete()
        except asyncio.CancelledError:
            handover.abandon(LoadCancelled(f"the load of {new.spec.name} was cancelled"))
            raise
        except EngineError as error:
            handover.abandon(error)
            raise
        finally:
            self._handover = None
        if old in self._deployments:
            self._leave(self._see_off(handover, old))
        return model

    async def _see_off(self, handover: Handover, old: Deployment) -> None:
        """Let a replaced model finish what is its own, and give its memory back."""
        await handover.finish(SWITCH_DRAIN_S)
        await self._drop(old)

    def _succeed(self, old: Deployment, new: Deployment) -> None:
        if self.first is old:
            self.first = new

    def _place(self, deployment: Deployment, devices: Sequence[DeviceReading]) -> list[Placement]:
        return deployment.place(deployment.config.num_workers, devices)

    # -- sleeping -----------------------------------------------------------------------------------------------

    def _serving(self, deployment: Deployment, adapter: str) -> Serving:
        model, tokenizer = deployment.require_ready()
        deployment.lane.last_used = asyncio.get_running_loop().time()
        return Serving(
            key=deployment.key,
            name=deployment.spec.name,
            spec=deployment.spec,
            model=model,
            tokenizer=tokenizer,
            adapter=adapter,
            adapters=tuple(each.name for each in deployment.adapters.specs()),
        )

    async def _until_ready(self, deployment: Deployment) -> None:
        """Wait for what will make it, or its successor, answer; raises NoModelLoaded where nothing is on its way."""
        nap = self._naps.get(deployment.key)
        waited: asyncio.Task[None] | asyncio.Task[LoadedModel] | None = None
        if nap is not None and not nap.done():
            waited = nap
        elif deployment.state == "idle":
            self._naps[deployment.key] = waited = _detached(self._wake(deployment))
        elif self._handover is not None and self._handover.concerns(deployment):
            waited = self._loading
        if waited is None:
            raise deployment.not_ready()
        if self._waiting >= self.config.max_queue:
            raise QueueFull(
                f"{self._waiting} requests wait for {deployment.spec.name}, and {self.config.max_queue} may",
                queued=self._waiting,
                limit=self.config.max_queue,
            )
        self._waiting += 1
        try:
            await asyncio.wait((waited,))
        finally:
            self._waiting -= 1
        if nap is None and waited in self._naps.values() and not waited.cancelled():
            waited.result()

    async def _wake(self, deployment: Deployment) -> None:
        if self._loading is not None and not self._loading.done():
            await asyncio.wait((self._loading,))
        await self._sampler.read(self.pids())
        try:
            placements = self._place(deployment, self._sampler.latest)
            await deployment.bring_up(placements)
        finally:
            if deployment.state == "failed" or deployment.state == "unloaded":
                deployment.set("idle")

    # -- going --------------------------------------------------------------------------------------------------

    async def _unload(self, target: Deployment, drain_s: float, error: EngineError) -> None:
        """ready -> draining -> unloading -> gone. Cancelled while it drains, the model goes on."""
        if target.state == "ready":
            target.set("draining")
            try:
                async with asyncio.timeout(drain_s):
                    await target.lane.wait_idle()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                target.set("ready", target.model)
                raise
        self._desk.end(target.lane.live, error.info)
        await self._drop(target)

    async def _drop(self, deployment: Deployment) -> None:
        """Give its memory back and forget it; the next one takes the place of the first."""
        if deployment.replicas():
            await deployment.take_down()
        if deployment in self._deployments:
            self._deployments.remove(deployment)
        if self.first is deployment:
            self.first = next((each for each in self if each.state in ("ready", "idle")), None)
        self._on_change()

    def _leave(self, work: Coroutine[object, object, None]) -> None:
        task = _detached(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _busy(self) -> str:
        """Why a load cannot begin; "" where it can."""
        if any(task is not None and not task.done() for task in (self._loading, self._unloading)):
            moving = next((each for each in self if each.state in ("loading", "draining", "unloading")), None)
            what = f"{moving.spec.name} is {moving.state}" if moving is not None else "a model is on its way"
            return f"{what}; wait, or cancel that first"
        return ""

    def _new_worker_id(self) -> str:
        taken = {replica.id for replica in self.replicas()}
        return next(name for name in (f"w{number}" for number in count()) if name not in taken)


def released(devices: Sequence[DeviceReading], replicas: Sequence[Replica]) -> list[DeviceReading]:
    """The devices as they would be without these workers."""
    freed: dict[str, int] = {}
    for replica in replicas:
        for share in replica.shares:
            freed[share.device] = freed.get(share.device, 0) + share.total_bytes
    return [
        msgspec.structs.replace(device, free_bytes=min(device.total_bytes, device.free_bytes + freed.get(device.id, 0)))
        for device in devices
    ]


def _detached(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """A task whose failure is no news to asyncio if its caller has gone away."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task
