"""Fleet: the models that the engine holds, and what becomes of one when another is loaded, unloaded or asked for.

One load or unload runs at a time, as a task of its own: who asked for it may go away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import msgspec

from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, EngineConfig, ModelSpec
from engine.deployment import Deployment, Surroundings
from engine.desk import Desk
from engine.devices import BusyTime
from engine.errors import (
    EngineBusy,
    EngineError,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    QueueFull,
    RequestTimeout,
)
from engine.handover import Handover
from engine.ledger import LedgerFile
from engine.metrics import Metrics
from engine.naps import Naps
from engine.occupancy import occupied, released
from engine.pool import NewHost, host_factory
from engine.request import Request
from engine.roster import Roster
from engine.sampler import DeviceSampler
from engine.snapshot import DeviceReading
from engine.tasks import detached
from engine.text.tokenizer import Tokenizer
from engine.worker.hosts import BackendFactory

SWITCH_DRAIN_S = 30.0


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers now. key: its deployment; adapter: what a name meant that is an adapter's, else "".

    adapters: the names of all that a request may use.
    """

    key: str
    name: str
    spec: ModelSpec
    model: LoadedModel
    tokenizer: Tokenizer
    adapter: str = ""
    adapters: tuple[str, ...] = ()


class Fleet:
    """Moves the deployments of its `roster`. config: what the next model gets. on_change: after every change."""

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
        self.roster = Roster()
        self.busy_time = BusyTime()
        self._desk = desk
        self._sampler = sampler
        self._on_change = on_change
        self._around = Surroundings(
            desk=desk,
            metrics=metrics,
            busy=self.busy_time,
            ledger=LedgerFile(config.state_dir) if config.state_dir is not None else None,
            new_host=new_host or host_factory(config, backend_factory),
            new_id=self.roster.new_worker_id,
            devices=self.devices,
            count=lambda: len(self.roster.replicas()),
            on_change=self._changed,
        )
        self._workers = 0
        self._naps = Naps(self._wake)
        self._loading: asyncio.Task[LoadedModel] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._handover: Handover | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._waiting = 0

    @property
    def queued(self) -> int:
        """Requests that wait for a worker, or for the model that is to answer them."""
        held = self._handover.held if self._handover is not None else 0
        return sum(deployment.lane.queued for deployment in self.roster) + held

    @property
    def waiting(self) -> int:
        """Callers of `serving` that wait for a model."""
        return self._waiting

    def devices(self) -> list[DeviceReading]:
        """The devices as placement must see them: with what workers were promised set aside."""
        return occupied(self._sampler.latest, self.roster.replicas())

    async def read_devices(self, without: str | None = None) -> list[DeviceReading]:
        """See Engine.devices."""
        gone = () if without is None else self.roster.named(without)[0].replicas()
        await self._sampler.read(self.roster.pids())
        return released(self.devices(), gone)

    # -- requests -----------------------------------------------------------------------------------------------

    async def serving(self, name: str) -> Serving:
        """See Engine.serving."""
        limit_s = self.config.timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                while True:
                    deployment, adapter = self.roster.named(name)
                    if deployment.state == "ready":
                        return _serving(deployment, adapter)
                    await self._until_ready(deployment)
        except TimeoutError:
            raise RequestTimeout(f"the model was not ready within {limit_s:g} s", timeout_s=limit_s) from None

    def left(self, request: Request) -> None:
        """A request ended: it leaves its worker, and others may take its place."""
        deployment = self.roster.of_lane(request.lane)
        if deployment is not None:
            deployment.left(request)
        self.dispatch()

    def dispatch(self) -> None:
        """Give waiting requests to workers with a free place."""
        for deployment in self.roster:
            deployment.dispatch()

    async def _until_ready(self, deployment: Deployment) -> None:
        """Wait for what will make it, or its successor, answer. Raises NoModelLoaded where nothing is on its way, and
        what waking it up failed with."""
        nap = self._naps.awaited(deployment)
        switch = self._loading if self._handover is not None and self._handover.concerns(deployment) else None
        awaited = nap or switch
        if awaited is None:
            raise deployment.not_ready()
        if self._waiting >= self.config.max_queue:
            raise QueueFull(
                f"{self._waiting} requests wait for {deployment.spec.name}, and {self.config.max_queue} may",
                queued=self._waiting,
                limit=self.config.max_queue,
            )
        self._waiting += 1
        try:
            await asyncio.wait((awaited,))
        finally:
            self._waiting -= 1
        if nap is not None and not nap.cancelled() and (error := nap.exception()) is not None:
            raise error

    # -- what is asked ------------------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        """See Engine.load."""
        if busy := self._busy():
            raise EngineBusy(busy, state="busy")
        self._loading = detached(self._load(spec, config, beside=beside))
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
        elif self.roster.first is not None or name:
            target = self.roster.named(name)[0]
            self._unloading = detached(self._unload(target, drain_s, error))
            await asyncio.shield(self._unloading)

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload everything within `drain_s`, whatever is under way."""
        await self.cancel_load()
        under_way = [*self._naps.cancel(), *self._leaving, *([self._unloading] if self._unloading else [])]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        await asyncio.gather(*(self._unload(deployment, drain_s, error) for deployment in list(self.roster)))

    def reconfigure(
        self, name: str, *, workers: int | None, max_prompts: int | None, idle_unload_s: float | None
    ) -> None:
        """See Engine.reconfigure."""
        wanted = {"num_workers": workers, "max_prompts": max_prompts, "idle_unload_s": idle_unload_s}
        changes = {field: value for field, value in wanted.items() if value is not None}
        msgspec.structs.replace(self.config, **changes).validate()
        first = self.roster.first
        target = self.roster.named(name)[0] if name else first
        if target is not None:
            config = msgspec.structs.replace(target.config, **changes)
            placements = target.place_more(config.num_workers, self.devices()) if workers is not None else []
            target.turn(config, placements)
        if target is first:
            self.config = msgspec.structs.replace(self.config, **changes)
        self._changed()

    def restart_worker(self, worker_id: str) -> None:
        """See Engine.restart_worker."""
        found = next((replica for replica in self.roster.replicas() if replica.id == worker_id), None)
        if found is None:
            raise InvalidRequest(f"there is no worker {worker_id}", param="worker", value=worker_id)
        found.restart()

    async def attach(self, adapter: AdapterSpec, name: str) -> None:
        """See Engine.attach."""
        target = self.roster.named(name)[0]
        if adapter.name in self.roster.names() and adapter.name not in target.adapters:
            raise InvalidRequest(f"{adapter.name} is the name of something else already", param="name")
        await target.attach(adapter)

    def detach(self, adapter: str, name: str) -> None:
        """See Engine.detach."""
        self.roster.named(name or adapter)[0].detach(adapter)

    def tick(self, now: float) -> None:
        """Once a second: replace workers that are hung, and put models to sleep that nobody has asked for long."""
        for replica in self.roster.replicas():
            replica.check(now)
        for deployment in () if self._busy() else self.roster:
            self._naps.tick(deployment, now)

    # -- loading ------------------------------------------------------------------------------------------------

    async def _load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        for dead in [each for each in self.roster if each.state == "failed"]:
            await self._drop(dead)
        old = self._replaced_by(spec, beside)
        new = Deployment(self.roster.new_key(spec.name), spec, config, self._around)
        self.roster.add(new)
        try:
            new.set("loading")
            await new.read()
            await self._sampler.read(self.roster.pids())
            if old is None or not old.replicas():
                return await self._load_alone(new, old)
            return await self._replace(old, new)
        except asyncio.CancelledError:
            await self._drop(new)
            raise LoadCancelled(f"the load of {spec.name} was cancelled", model=spec.name) from None
        except EngineError as error:
            if len(self.roster) == 1:
                new.fail(error.info)
            else:
                await self._drop(new)
            raise

    def _replaced_by(self, spec: ModelSpec, beside: bool) -> Deployment | None:
        answering = [each for each in self.roster if each.state in ("ready", "idle")]
        same = next((each for each in answering if each.spec.name == spec.name), None)
        if beside and same is not None:
            raise InvalidRequest(f"there is a model named {spec.name}; give this one another name", param="name")
        return None if beside else same or self.roster.first

    async def _load_alone(self, new: Deployment, old: Deployment | None) -> LoadedModel:
        """Nothing serves that it would replace."""
        model = await new.bring_up(new.place(new.config.num_workers, self.devices()))
        if old is not None:
            self.roster.succeed(old, new)
            await self._drop(old)
        return model

    async def _replace(self, old: Deployment, new: Deployment) -> LoadedModel:
        """`new` for `old`: beside it where both fit, else after it; refused with nothing changed where it cannot."""
        workers = new.config.num_workers
        self._handover = handover = Handover(old, new, self._desk)
        try:
            try:
                placements = new.place(workers, self.devices())
            except InsufficientMemory:
                new.place(workers, released(self.devices(), old.replicas()))
                await handover.empty(SWITCH_DRAIN_S)
                self.roster.succeed(old, new)
                await self._drop(old)
                await self._sampler.read(self.roster.pids())
                placements = new.place(workers, self.devices())
            model = await new.bring_up(placements)
            self.roster.succeed(old, new)
            handover.complete()
        except asyncio.CancelledError:
            handover.abandon(LoadCancelled(f"the load of {new.spec.name} was cancelled"))
            raise
        except EngineError as error:
            handover.abandon(error)
            raise
        finally:
            self._handover = None
        if old in self.roster:
            self._leave(self._see_off(handover, old))
        return model

    async def _see_off(self, handover: Handover, old: Deployment) -> None:
        """Let a replaced model finish what is its own, and give its memory back."""
        await handover.finish(SWITCH_DRAIN_S)
        await self._drop(old)

    async def _wake(self, deployment: Deployment) -> None:
        """An idle model, once no load is under way any more."""
        if self._loading is not None and not self._loading.done():
            await asyncio.wait((self._loading,))
        await self._sampler.read(self.roster.pids())
        await deployment.bring_up(deployment.place(deployment.config.num_workers, self.devices()))

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
        """Give its memory back and forget it."""
        if deployment.replicas():
            await deployment.take_down()
        self.roster.remove(deployment)
        self._changed()

    def _leave(self, work: Coroutine[object, object, None]) -> None:
        task = detached(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _changed(self) -> None:
        """Workers that compute on more threads than there are cores wait for each other: they share them anew."""
        workers = len(self.roster.replicas())
        if workers != self._workers:
            self._workers = workers
            for deployment in self.roster:
                deployment.share_cores()
        self._on_change()

    def _busy(self) -> str:
        """Why a load cannot begin; "" where it can."""
        if any(task is not None and not task.done() for task in (self._loading, self._unloading)):
            moving = next((each for each in self.roster if each.state in ("loading", "draining", "unloading")), None)
            what = f"{moving.spec.name} is {moving.state}" if moving is not None else "a model is on its way"
            return f"{what}; wait, or cancel that first"
        return ""


def _serving(deployment: Deployment, adapter: str) -> Serving:
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
