"""Fleet: the models that the engine holds, the requests that look for one, and the knobs of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, EngineConfig, ModelSpec
from engine.deployment import Deployment
from engine.desk import Desk
from engine.devices import BusyTime
from engine.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
)
from engine.ledger import LedgerFile
from engine.metrics import Metrics
from engine.naps import Naps
from engine.occupancy import occupied
from engine.replica import Replica
from engine.request import Request
from engine.roster import Roster
from engine.sampler import DeviceSampler
from engine.snapshot import DeviceReading
from engine.surroundings import Surroundings
from engine.switch import Switch
from engine.text.tokenizer import Tokenizer
from engine.worker.hosts import BackendFactory, NewHost, host_factory


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers now. key: its deployment; config: the engine's settings with its own knobs.

    adapter: what a name meant that is an adapter's, else "".

    adapters: the names of all that a request may use.
    """

    key: str
    name: str
    spec: ModelSpec
    model: LoadedModel
    tokenizer: Tokenizer
    adapter: str = ""
    adapters: tuple[str, ...] = ()
    config: EngineConfig = EngineConfig()


class Fleet:
    """The deployments of its `roster`; `switch` loads and unloads them. config: what the next model gets.

    on_change: after every change.
    """

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
        self.switch = Switch(self.roster, self._around, desk=desk, sampler=sampler, on_change=self._changed)
        self._waiting = 0

    @property
    def queued(self) -> int:
        """Requests that wait for a worker, or for the model that is to answer them."""
        return sum(deployment.lane.queued for deployment in self.roster) + self.switch.held

    @property
    def waiting(self) -> int:
        """Callers of `serving` that wait for a model."""
        return self._waiting

    def devices(self, gone: Collection[Replica] = ()) -> list[DeviceReading]:
        """The devices as placement must see them: with what workers were promised set aside, and without those gone."""
        return occupied(self._sampler.latest, self.roster.replicas(), gone)

    async def read_devices(self, without: str | None = None) -> list[DeviceReading]:
        """See Engine.devices."""
        gone = () if without is None else self.roster.named(without)[0].replicas()
        await self._sampler.read(self.roster.pids())
        return self.devices(gone)

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
        awaited = nap or self.switch.awaited(deployment)
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

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload everything within `drain_s`, whatever is under way."""
        if naps := self._naps.cancel():
            await asyncio.wait(naps)
        await self.switch.close(drain_s, error)

    def reconfigure(self, name: str, changes: Mapping[str, Any]) -> None:
        """See Engine.reconfigure. changes: fields of EngineConfig."""
        msgspec.structs.replace(self.config, **changes).validate()
        first = self.roster.first
        target = self.roster.named(name)[0] if name else first
        if target is not None:
            config = msgspec.structs.replace(target.config, **changes)
            placements = target.place_more(config.num_workers, self.devices()) if "num_workers" in changes else []
            target.turn(config, placements)
        if target is first:
            self.config = msgspec.structs.replace(self.config, **changes)
        self._changed()

    def restart_worker(self, worker_id: str) -> None:
        """See Engine.restart_worker."""
        self._worker(worker_id)[1].restart()

    def drain_worker(self, worker_id: str) -> None:
        """See Engine.drain_worker."""
        deployment, _ = self._worker(worker_id)
        deployment.drain_worker(worker_id)
        if deployment is self.roster.first:
            self.config = msgspec.structs.replace(self.config, num_workers=deployment.config.num_workers)
        self._changed()

    def _worker(self, worker_id: str) -> tuple[Deployment, Replica]:
        for deployment in self.roster:
            for replica in deployment.replicas():
                if replica.id == worker_id:
                    return deployment, replica
        raise InvalidRequest(f"there is no worker {worker_id}", param="worker", value=worker_id)

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
        """Once a second: replace workers that are hung, note where knobs are in effect, and put models to sleep that
        nobody has asked for long."""
        for replica in self.roster.replicas():
            replica.check(now)
        for deployment in self.roster:
            if deployment.settled:
                self._around.metrics.settle(deployment.spec.name, time.time())
        for deployment in () if self.switch.busy() else self.roster:
            self._naps.tick(deployment, now)

    async def _wake(self, deployment: Deployment) -> None:
        """An idle model, once no load is under way any more."""
        if (loading := self.switch.loading) is not None:
            await asyncio.wait((loading,))
        await self._sampler.read(self.roster.pids())
        await deployment.bring_up(deployment.place(deployment.config.num_workers, self.devices()))

    def _changed(self) -> None:
        """Workers that compute on more threads than there are cores wait for each other: they share them anew."""
        workers = len(self.roster.replicas())
        if workers != self._workers:
            self._workers = workers
            for deployment in self.roster:
                deployment.share_cores()
        self._on_change()


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
        config=deployment.config,
    )
