"""Lifecycle: the model's one state machine, and the pool of workers that hangs on it.

unloaded -> loading -> ready -> draining -> unloading -> unloaded; a load that fails ends in "failed" with its reason.
One transition runs at a time, as a task of its own: who asked for it may go away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import msgspec

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.demand import MemoryDemand, read_demand
from engine.desk import Desk
from engine.devices import computable
from engine.dispatcher import Slot
from engine.errors import EngineBusy, EngineError, LoadCancelled, ModelLoadFailed, NoModelLoaded
from engine.metrics import Metrics
from engine.placement import Placement, place
from engine.pool import Pool, host_factory
from engine.replica import Replica
from engine.request import Request
from engine.sampler import DeviceSampler
from engine.snapshot import ModelStatus
from engine.text.tokenizer import Tokenizer
from engine.worker.hosts import BackendFactory

SWITCH_DRAIN_S = 30.0
_RETRY_AFTER_S = 5
_log = logging.getLogger("engine")
T = TypeVar("T")


class Lifecycle:
    """Owns the model's status, its tokenizer, its pool and the live settings. on_change: after every change."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None,
        desk: Desk,
        metrics: Metrics,
        sampler: DeviceSampler,
        on_change: Callable[[], None],
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._backend_factory = backend_factory
        self._desk = desk
        self._metrics = metrics
        self._sampler = sampler
        self._on_change = on_change
        self._status = ModelStatus(since_s=time.time())
        self._pool: Pool | None = None
        self._demand: MemoryDemand | None = None
        self._loading: asyncio.Task[LoadedModel] | None = None
        self._unloading: asyncio.Task[None] | None = None

    # -- what is ------------------------------------------------------------------------------------------------

    def status(self) -> ModelStatus:
        """The model's status now."""
        progress = self._pool.progress() if self._pool is not None and self._status.state == "loading" else None
        return msgspec.structs.replace(self._status, progress=progress)

    def replicas(self) -> tuple[Replica, ...]:
        """The workers, oldest first."""
        return tuple(self._pool) if self._pool is not None else ()

    def replica(self, worker_id: str) -> Replica:
        """The worker of that id; raises KeyError."""
        assert self._pool is not None
        return self._pool[worker_id]

    def pids(self) -> set[int]:
        """The processes that are ours: this one and the workers'."""
        return {os.getpid(), *(replica.pid for replica in self.replicas() if replica.pid is not None)}

    def slots(self) -> list[Slot]:
        """The workers that take requests; while the model drains, they still take those that wait."""
        return self._pool.slots() if self._pool is not None and self._status.state in ("ready", "draining") else []

    def require_ready(self) -> tuple[ModelSpec, LoadedModel, Tokenizer]:
        """The loaded model; raises NoModelLoaded."""
        status = self._status
        if status.state == "ready" and status.spec and status.model and self.tokenizer:
            return status.spec, status.model, self.tokenizer
        name = status.spec.name if status.spec is not None else ""
        sentence, wait_s = {
            "loading": (f"{name} is still loading", _RETRY_AFTER_S),
            "draining": (f"{name} is being unloaded", _RETRY_AFTER_S),
            "unloading": (f"{name} is being unloaded", _RETRY_AFTER_S),
            "failed": (f"no model is loaded: loading {name} failed", None),
        }.get(status.state, ("no model is loaded", None))
        raise NoModelLoaded(sentence, state=status.state, retry_after_s=wait_s)

    def release(self, request: Request) -> None:
        """An ended request leaves its worker."""
        if self._pool is None or request.worker is None:
            return
        with contextlib.suppress(KeyError):  # stopped meanwhile
            replica = self._pool[request.worker]
            replica.forget(request)
            self._pool.settle(replica)

    # -- what is asked ------------------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec) -> LoadedModel:
        """See Engine.load."""
        if self._busy():
            name = self._status.spec.name if self._status.spec is not None else "a model"
            raise EngineBusy(f"{name} is {self._status.state}; wait, or cancel that first", state=self._status.state)
        self._loading = _detached(self._switch(spec))
        return await asyncio.shield(self._loading)

    async def cancel_load(self) -> None:
        """See Engine.cancel_load."""
        task = self._loading
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))

    async def unload(self, drain_s: float, error: EngineError) -> None:
        """Drain and unload; `error` ends the requests that took too long. A second call waits for the first."""
        await self.cancel_load()
        if self._unloading is None or self._unloading.done():
            self._unloading = _detached(self._take_down(drain_s, error))
        await asyncio.shield(self._unloading)

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload within `drain_s`, whatever is under way."""
        if self._unloading is not None and not self._unloading.done():
            self._unloading.cancel()
            await asyncio.wait((self._unloading,))
        await self.unload(drain_s, error)

    def reconfigure(self, *, workers: int | None, max_prompts: int | None) -> None:
        """See Engine.reconfigure."""
        wanted = {"num_workers": workers, "max_prompts": max_prompts}
        changes = {name: value for name, value in wanted.items() if value is not None}
        msgspec.structs.replace(self.config, **changes).validate()
        placements = self._place_more(workers) if workers is not None else []
        before, self.config = self.config, msgspec.structs.replace(self.config, **changes)
        self._mark(before)
        if self._pool is not None:
            if max_prompts is not None:
                self._pool.set_max_prompts(max_prompts)
            if workers is not None:
                self._resize(self._pool, workers, placements)
        self._on_change()

    # -- transitions --------------------------------------------------------------------------------------------

    async def _switch(self, spec: ModelSpec) -> LoadedModel:
        """Away with the old model, then the new one."""
        try:
            if self._pool is not None:
                gone = NoModelLoaded(f"the model was unloaded to load {spec.name} before the answer was complete")
                await self._take_down(SWITCH_DRAIN_S, gone)
            return await self._bring_up(spec)
        except asyncio.CancelledError:
            raise LoadCancelled(f"the load of {spec.name} was cancelled", model=spec.name) from None

    async def _bring_up(self, spec: ModelSpec) -> LoadedModel:
        self._set(ModelStatus(state="loading", spec=spec))
        try:
            self._demand = await asyncio.to_thread(read_demand, spec)
            self.tokenizer = await asyncio.to_thread(Tokenizer.from_folder, spec.path)
            await self._sampler.read(self.pids())
            workers = self.config.num_workers
            placements = self._place(spec, self._demand, workers)
            self._pool = self._new_pool(spec)
            self._resize(self._pool, workers, placements)
            model = await self._pool.first_ready()
        except asyncio.CancelledError:
            await _uninterrupted(self._discard())
            self._set(ModelStatus())
            raise
        except Exception as error:
            failure = error if isinstance(error, EngineError) else ModelLoadFailed(f"{spec.name}: {error}")
            await self._discard()
            self._set(ModelStatus(state="failed", spec=spec, error=failure.info))
            raise failure from error
        self._set(ModelStatus(state="ready", spec=spec, model=model))
        return model

    async def _take_down(self, drain_s: float, error: EngineError) -> None:
        """ready -> draining -> unloading -> unloaded. Cancelled while it drains, the model goes on."""
        if self._pool is not None:
            loaded = self._status
            self._set(msgspec.structs.replace(loaded, state="draining"))
            try:
                async with asyncio.timeout(drain_s):
                    await self._desk.wait_idle()
            except TimeoutError:
                self._desk.end_all(error)
            except asyncio.CancelledError:
                self._set(loaded)
                raise
            self._set(msgspec.structs.replace(loaded, state="unloading"))
            await _uninterrupted(self._discard())
        if self._status.state != "unloaded":
            self._set(ModelStatus())

    async def _discard(self) -> None:
        """Stop every worker and forget the model."""
        pool, self._demand, self.tokenizer = self._pool, None, None
        if pool is not None:
            await pool.stop()
        self._pool = None

    def _set(self, status: ModelStatus) -> None:
        self._status = msgspec.structs.replace(status, since_s=time.time())
        name = f"{status.spec.name}: " if status.spec is not None else ""
        if status.error is not None:
            _log.error("%s%s: %s", name, status.state, status.error.message)
        else:
            _log.info("%s%s", name, status.state)
        self._on_change()

    def _busy(self) -> bool:
        return any(task is not None and not task.done() for task in (self._loading, self._unloading))

    # -- workers ------------------------------------------------------------------------------------------------

    def _new_pool(self, spec: ModelSpec) -> Pool:
        return Pool(
            spec,
            self.config,
            new_host=host_factory(self.config, self._backend_factory),
            desk=self._desk,
            metrics=self._metrics,
            on_change=self._on_change,
        )

    def _place(self, spec: ModelSpec, demand: MemoryDemand, new: int) -> list[Placement]:
        devices = computable(self._sampler.latest)
        return place(new, demand, devices, spec)

    def _place_more(self, workers: int) -> list[Placement]:
        """Placements for the workers that are missing to `workers`, beyond those that drain and can be kept."""
        if self._pool is None or self._demand is None:
            return []
        kept = sum(replica.state not in ("failed", "stopping") for replica in self._pool)
        return self._place(self._pool.spec, self._demand, max(0, workers - kept))

    def _resize(self, pool: Pool, workers: int, placements: list[Placement]) -> None:
        pool.drop_failed()
        missing = workers - pool.size
        if missing < 0:
            pool.shrink(-missing)
        else:
            missing -= pool.revive(missing)
            pool.grow(placements[:missing])

    def _mark(self, before: EngineConfig) -> None:
        for label, name in (("workers", "num_workers"), ("max_prompts", "max_prompts")):
            old, new = getattr(before, name), getattr(self.config, name)
            if old != new:
                self._metrics.mark(time.time(), f"{label} {old} -> {new}")
                _log.info("%s %s -> %s", label, old, new)


def _detached(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """A task whose failure is no news to asyncio if its caller has gone away."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


async def _uninterrupted(work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation then goes on."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
