"""Deployment: one model that the engine holds: its state machine, its workers, its lane of requests and its knobs.

loading -> ready -> draining -> unloading -> gone; a load that fails ends in "failed" with its reason, and a ready model
that nobody asks may become idle and load again. When which happens is the fleet's business.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec

from engine.attachments import Attachments
from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, DeviceShare, EngineConfig, ModelSpec
from engine.dispatcher import Dispatcher, Slot
from engine.errors import (
    EngineError,
    ErrorInfo,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    NoModelLoaded,
)
from engine.fitting import Fitting
from engine.knobs import turns
from engine.lane import Lane
from engine.plan import Placement
from engine.pool import Pool
from engine.replica import Replica
from engine.request import Request
from engine.snapshot import DeviceReading, ModelState, ModelStatus
from engine.standing import Standing
from engine.surroundings import Surroundings
from engine.tasks import detached, uninterrupted
from engine.text.tokenizer import Tokenizer

_log = logging.getLogger("engine")


class Deployment:
    """One model. key: unique in the engine; config: the engine's settings with this model's knobs."""

    def __init__(self, key: str, spec: ModelSpec, config: EngineConfig, around: Surroundings) -> None:
        self.key = key
        self.spec = spec
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._salt = secrets.token_bytes(16)
        queue = Dispatcher(ageing_s=config.ageing_s, page_tokens=config.page_tokens, salt=self._salt)
        self.lane = Lane(queue, around.metrics.meter(spec.name), _now())
        self.adapters = Attachments()
        self._around = around
        self._standing = Standing(spec)
        self._fitting = Fitting(spec, around.ledger)
        self._pool: Pool | None = None

    # -- what is ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """Where it stands, as in ModelStatus.state."""
        return self._standing.status.state

    @property
    def model(self) -> LoadedModel | None:
        """What its load ended with, while it is loaded."""
        return self._standing.status.model

    def status(self) -> ModelStatus:
        """Its status now."""
        progress = self._pool.progress() if self._pool is not None and self.state == "loading" else None
        return msgspec.structs.replace(self._standing.status, progress=progress)

    def replicas(self) -> tuple[Replica, ...]:
        """Its workers, oldest first."""
        return tuple(self._pool) if self._pool is not None else ()

    def slots(self) -> list[Slot]:
        """The workers that take requests; while it drains, they still take those that wait."""
        return self._pool.slots() if self._pool is not None and self.state in ("ready", "draining") else []

    def require_ready(self) -> tuple[LoadedModel, Tokenizer]:
        """The loaded model and tokenizer; one that drains still takes what is meant for it. Raises NoModelLoaded."""
        if self.state in ("ready", "draining") and self.model is not None and self.tokenizer is not None:
            return self.model, self.tokenizer
        raise self.not_ready()

    def not_ready(self) -> NoModelLoaded:
        """Why it does not answer."""
        return self._standing.refusal()

    def idle_s(self, now: float) -> float:
        """Seconds since a request last came or ended; 0 while any is live."""
        return 0.0 if not self.lane.idle else now - self.lane.last_used

    # -- requests -----------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Give waiting requests to workers with a free place."""
        if self.lane.queued and self._pool is not None:
            for request, worker in self._around.desk.assign(self.lane, self.slots()):
                self._pool[worker].submit(request)

    def left(self, request: Request) -> None:
        """A request ended: it leaves its worker, and adapters that were kept for it alone may go."""
        self._release(request)
        self.adapters.settle(self.lane)

    def _release(self, request: Request) -> None:
        if self._pool is not None and request.worker is not None:
            self._pool.release(request)

    def take_running(self) -> list[Request]:
        """Take every request from its worker; they wait again, with what they have so far."""
        running = [request for request in self.lane.live if request.worker is not None]
        for request in running:
            self._release(request)
            self._around.desk.requeue(request)
        return running

    # -- adapters -----------------------------------------------------------------------------------------------

    async def attach(self, adapter: AdapterSpec) -> None:
        """Make an adapter usable on every worker; returns when all that are ready have it.

        Raises InvalidRequest or ModelLoadFailed with nothing changed, where one of them could not take it.
        """
        model, _ = self.require_ready()
        if not model.adapters_per_request:
            raise InvalidRequest(
                f"the {model.backend} backend applies an adapter to every request: load {self.spec.name} with --lora",
                param="adapter",
            )
        await self.adapters.attach(adapter)
        _log.info("%s: adapter %s attached", self.spec.name, adapter.name)
        self._around.on_change()

    def detach(self, name: str) -> None:
        """New requests cannot name it any more; its memory is free when the last that uses it has ended.

        Raises ModelNotFound.
        """
        if name not in self.adapters:
            raise ModelNotFound(f"{self.spec.name} has no adapter {name!r}", param="name", model=name)
        self.adapters.detach(name, self.lane)
        _log.info("%s: adapter %s detached", self.spec.name, name)
        self._around.on_change()

    # -- placement ----------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read what the folder says of the model: what it needs, and its tokenizer. Raises ModelLoadFailed."""
        try:
            await self._fitting.read()
            self.tokenizer = await asyncio.to_thread(Tokenizer.from_folder, self.spec.path)
        except OSError as error:
            raise ModelLoadFailed(f"{self.spec.name} cannot be read: {error}") from error

    def place(self, workers: int, devices: Sequence[DeviceReading]) -> list[Placement]:
        """Where so many new workers go; raises InsufficientMemory with the numbers."""
        return self._fitting.place(workers, self.config, devices, held=bool(self.replicas()))

    def _place_anew(self, spec: ModelSpec) -> Placement | None:
        return self._fitting.anew(spec, self.config, self._around.devices())

    def _loaded(self, placement: Placement, used: Sequence[DeviceShare], resident_bytes: int) -> None:
        detached(self._fitting.note(placement, used, resident_bytes))

    # -- transitions --------------------------------------------------------------------------------------------

    async def bring_up(self, placements: Sequence[Placement]) -> LoadedModel:
        """unloaded or idle -> loading -> ready, when the first worker is; or failed, with nothing left running.

        Raises what made it fail. Cancelled, it is "unloaded".
        """
        self.set("loading")
        try:
            self._pool = self._new_pool()
            self._pool.grow(placements)
            model = await self._pool.first_ready()
        except asyncio.CancelledError:
            await uninterrupted(self.stop_workers())
            self.set("unloaded")
            raise
        except Exception as error:
            failure = error if isinstance(error, EngineError) else ModelLoadFailed(f"{self.spec.name}: {error}")
            await self.stop_workers()
            self.fail(failure.info)
            raise failure from error
        self.set("ready", model)
        return model

    async def take_down(self, state: ModelState = "unloaded") -> None:
        """unloading, then `state`: "unloaded" or "idle". Its requests have ended or gone elsewhere."""
        self.set("unloading")
        await uninterrupted(self.stop_workers())
        self.set(state)

    async def stop_workers(self) -> None:
        """Stop every worker."""
        pool = self._pool
        if pool is not None:
            await pool.stop()
        self._pool = None
        self.adapters.give(None)

    def set(self, state: ModelState, model: LoadedModel | None = None) -> None:
        """Go to a state, log it and show it. model: what a load ended with, kept until the memory is given back."""
        if state == self.state:
            return
        if model is not None:
            self.lane.usage.loaded(model.max_model_len)
        self._standing.go(state, model)
        self._around.on_change()

    def fail(self, error: ErrorInfo) -> None:
        """No worker can answer: what waits ends with the reason."""
        if self._pool is None:  # else a dead worker may be revived
            self.tokenizer = None
        self._standing.fail(error)
        self._around.desk.end(self.lane.live, error)
        self._around.on_change()

    def share_cores(self) -> None:
        """The number of all workers is another one."""
        if self._pool is not None:
            self._pool.share_cores()

    # -- knobs --------------------------------------------------------------------------------------------------

    def place_more(self, workers: int, devices: Sequence[DeviceReading]) -> list[Placement]:
        """Placements for the workers that are missing to `workers`, beyond those that drain and can be kept."""
        if self._pool is None:
            return []
        kept = sum(replica.state not in ("failed", "stopping") for replica in self._pool)
        missing = max(0, workers - kept)
        return self.place(missing, devices) if missing else []

    def turn(self, config: EngineConfig, placements: Sequence[Placement]) -> None:
        """Take new knobs; growth and shrinking go on in the background."""
        before, self.config = self.config, config
        self._mark(before)
        if self._pool is None:
            return
        if config.max_prompts != before.max_prompts:
            self._pool.set_max_prompts(config.max_prompts)
        if config.step_tokens != before.step_tokens:
            self._pool.set_step_tokens(config.step_tokens)
        if config.threads != before.threads:
            self._pool.set_threads(config.threads)
        self._pool.resize(config.num_workers, placements)

    def drain_worker(self, worker_id: str) -> None:
        """Let one worker finish what it has and go; there is to be one less. One that goes already does so.

        Raises InvalidRequest where no worker would be left to answer.
        """
        if self._pool is None or (leaving := self._pool[worker_id]) not in self._pool.staying:
            return
        others = [replica for replica in self._pool.staying if replica is not leaving]
        if not others or (leaving.state != "failed" and all(replica.state == "failed" for replica in others)):
            raise InvalidRequest(
                f"{worker_id} is the last worker of {self.spec.name}: unload the model instead", param="worker"
            )
        before = self.config
        self.config = msgspec.structs.replace(before, num_workers=max(1, before.num_workers - 1))
        self._mark(before)
        self._pool.shed(leaving)

    def _mark(self, before: EngineConfig) -> None:
        """A mark for each knob that was turned."""
        metrics, model = self._around.metrics, self.spec.name
        for turn in turns(before, self.config):
            metrics.mark(time.time(), str(turn), knob=turn.knob, before=turn.before, after=turn.after, model=model)
            _log.info("%s: %s", model, turn)

    @property
    def settled(self) -> bool:
        """Whether its workers are as the knobs ask for."""
        replicas, config = self.replicas(), self.config
        as_many = len(replicas) == config.num_workers and all(replica.state == "ready" for replica in replicas)
        return as_many and all(len(replica.active) <= config.max_prompts for replica in replicas)

    def _new_pool(self) -> Pool:
        pool = Pool(
            msgspec.structs.replace(self.spec, prefix_salt=self._salt),
            self.config,
            new_host=self._around.new_host,
            place_anew=self._place_anew,
            new_id=self._around.new_id,
            count=self._around.count,
            lane=self.lane,
            desk=self._around.desk,
            metrics=self._around.metrics,
            busy=self._around.busy,
            on_loaded=self._loaded,
            on_change=self._pool_changed,
            on_dead=self._dead,
        )
        self.adapters.give(pool)
        return pool

    def _pool_changed(self) -> None:
        """A model whose workers were all dead answers again once one of them is back."""
        self.adapters.changed()
        if self.state == "failed":
            model = next((replica.model for replica in self.replicas() if replica.state == "ready"), None)
            if model is not None:
                self.set("ready", model)
        self._around.on_change()

    def _dead(self, error: ErrorInfo) -> None:
        if self.state in ("ready", "draining"):
            self.fail(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
