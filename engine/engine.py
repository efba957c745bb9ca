"""Engine: one model, its workers and its queue. An async object that lives on the loop it was started on."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from itertools import count

from engine.admission import end_tokens, resolve_params, resolve_timeout
from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.desk import Desk
from engine.devices import DeviceProbe
from engine.errors import EngineClosed, EngineError, NoModelLoaded
from engine.lifecycle import Lifecycle
from engine.log import LogRing
from engine.metrics import Metrics
from engine.request import GenerateRequest, Request
from engine.sampler import DeviceSampler
from engine.snapshot import ModelStatus, Snapshot
from engine.stream import RequestStream, StreamDelta
from engine.text.tokenizer import Tokenizer
from engine.view import build_snapshot, kv_usage
from engine.worker.hosts import BackendFactory

__all__ = ["Engine", "GenerateRequest", "RequestStream", "StreamDelta"]

_PUBLISH_S = 0.25
_TICK_S = 1.0


class Engine:
    """Loads a model, spreads requests over its workers, and says how it is doing.

    Every method but `snapshot` belongs to the loop that `start` ran on. `log` may be used from any thread.
    backend_factory: makes the backends of thread workers, for tests.  probe: reads the devices, the machine's if None.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None = None,
        probe: DeviceProbe | None = None,
    ) -> None:
        self.log = LogRing()
        self._metrics = Metrics()
        self._sampler = DeviceSampler(probe)
        self._desk = Desk(self._metrics, self._left)
        self._life = Lifecycle(
            config.validate(),
            backend_factory=backend_factory,
            desk=self._desk,
            metrics=self._metrics,
            sampler=self._sampler,
            on_change=self._changed,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = 0.0
        self._orders = count(1)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: asyncio.Task[None] | None = None
        self._published = Snapshot(at=time.time(), target_workers=config.num_workers, max_prompts=config.max_prompts)

    async def start(self) -> None:
        """Begin to sample; before anything else."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._tick()
        self._publish_and_repeat()

    async def close(self, drain_s: float = 5.0) -> None:
        """Refuse new requests, give running ones `drain_s`, then stop every worker. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    # -- the model ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The settings as `reconfigure` left them."""
        return self._life.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model that is loaded, or loading its weights; else None."""
        return self._life.tokenizer

    @property
    def status(self) -> ModelStatus:
        """The model and where it stands: what `snapshot().status` says, without building the rest of it."""
        return self._life.status()

    async def load(self, spec: ModelSpec) -> LoadedModel:
        """Load `spec` and return when its first worker is ready; a loaded model is drained and unloaded first.

        The load goes on if the caller is cancelled. Raises ModelLoadFailed and its children (the model is "failed"
        then, with nothing left running), LoadCancelled, EngineBusy while another load or unload runs, EngineClosed.
        """
        self._refuse_if_closed()
        return await self._life.load(spec)

    async def cancel_load(self) -> None:
        """Stop the load under way, if any; returns when its workers are gone. `load` then raises LoadCancelled.

        While the old model still drains, that one goes on.
        """
        await self._life.cancel_load()

    async def unload(self, drain_s: float = 30.0) -> None:
        """Give running requests `drain_s`, end the rest with an error, and unload. Cancels a load under way."""
        self._refuse_if_closed()
        await self._life.unload(drain_s, NoModelLoaded("the model was unloaded before the answer was complete"))

    async def reconfigure(self, *, workers: int | None = None, max_prompts: int | None = None) -> None:
        """Set the targets; growth and shrinking go on in the background and lose no request.

        Workers that never got ready are tried again. Raises InvalidRequest out of range, InsufficientMemory where
        another worker does not fit, EngineClosed; nothing is changed then.
        """
        self._refuse_if_closed()
        self._life.reconfigure(workers=workers, max_prompts=max_prompts)

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request and return its stream.

        A max_tokens that does not fit after the prompt is cut to the room there is (finish is then "length").
        Raises NoModelLoaded, QueueFull, ContextLengthExceeded, InvalidRequest or EngineClosed.
        """
        try:
            admitted = self._admit(request)
        except EngineError:
            self._metrics.count("rejected")
            raise
        self._desk.add(admitted)
        self._dispatch()
        return admitted.stream

    def cancel(self, request_id: str) -> bool:
        """End a live request with finish "cancelled"; False if there is none of that id."""
        return self._desk.cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._desk.cancel(request_id)

    def _admit(self, asked: GenerateRequest) -> Request:
        self._refuse_if_closed()
        spec, model, tokenizer = self._life.require_ready()
        request_id = asked.id or f"gen-{secrets.token_hex(8)}"
        params = resolve_params(asked.prompt_ids, asked.params, spec, model, seed=secrets.randbits(63))
        timeout_s = resolve_timeout(asked.timeout_s, self.config.timeout_s)
        free = sum(slot.free for slot in self._life.slots())
        self._desk.check_room(request_id, self.config.max_queue, free)
        return Request(
            id=request_id,
            source=asked.source,
            priority=asked.priority,
            order=next(self._orders),
            prompt_ids=asked.prompt_ids,
            params=params,
            end_token_ids=end_tokens(params, tokenizer.eos_token_ids),
            timeout_s=timeout_s,
            created=_now(),
            stream=RequestStream(request_id, len(asked.prompt_ids), partial(self._cancel, request_id)),
        )

    def _dispatch(self) -> None:
        """Give waiting requests to workers with a free place."""
        if self._desk.queued:
            for request, worker in self._desk.assign(self._life.slots()):
                self._life.replica(worker).submit(request)

    def _left(self, request: Request) -> None:
        """A request ended: its worker stops computing it, and the next one takes its place."""
        if request.worker is not None:
            self._life.release(request)
        self._dispatch()

    def _refuse_if_closed(self) -> None:
        if self._closing is not None:
            raise EngineClosed("the engine is shutting down")

    # -- what is shown ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The engine now; from another thread the one published last, at most 0.25 s old."""
        try:
            if asyncio.get_running_loop() is self._loop:
                self._publish()
        except RuntimeError:
            pass  # another thread, with no loop
        return self._published

    def _changed(self) -> None:
        """A worker or the model changed: there may be free places, and there is something to show."""
        self._dispatch()
        self._publish()

    def _publish(self) -> None:
        self._published = build_snapshot(
            at=time.time(),
            now=_now(),
            started=self._started,
            status=self._life.status(),
            config=self.config,
            replicas=self._life.replicas(),
            desk=self._desk,
            metrics=self._metrics,
            devices=self._sampler.latest,
            log_total=self.log.total,
        )

    def _publish_and_repeat(self) -> None:
        self._publish()
        self._timers["publish"] = asyncio.get_running_loop().call_later(_PUBLISH_S, self._publish_and_repeat)

    def _tick(self) -> None:
        """Once a second: close a second of history and read the devices."""
        replicas = self._life.replicas()
        self._metrics.tick(
            _now(),
            time.time(),
            running=self._desk.running,
            queued=self._desk.queued,
            kv_usage=kv_usage(replicas),
            device_utilisation=tuple(device.utilisation for device in self._sampler.latest),
        )
        self._sampler.poll(self._life.pids())
        self._timers["tick"] = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    async def _close(self, drain_s: float) -> None:
        await self._life.close(drain_s, EngineClosed("the engine was shut down before the answer was complete"))
        for timer in self._timers.values():
            timer.cancel()
        await self._sampler.close()
        self._publish()


def _now() -> float:
    return asyncio.get_running_loop().time()
