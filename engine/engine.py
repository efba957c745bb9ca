"""Engine: models, their workers and their queues. An async object that lives on the loop it was started on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Unpack

import msgspec

from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, EngineConfig, ModelSpec, PrefixSharing
from engine.devices import DeviceProbe, new_probe
from engine.devices.sampler import DeviceSampler
from engine.errors import EngineClosed, EngineError, NoModelLoaded
from engine.metrics.alerts import AlertLog
from engine.metrics.insight import InsightCollector, slo_of
from engine.metrics.meter import Meter, ModelUsage
from engine.metrics.publisher import SnapshotPublisher, model_reading
from engine.models.knobs import Knobs, changed_fields
from engine.models.manager import FindModel, LoadOrder, ModelManager, Serving
from engine.requests.admission import RequestAdmission
from engine.requests.history import RequestDetail
from engine.requests.request import GenerateRequest
from engine.requests.stream import PromptProgress, RequestStream, StreamDelta
from engine.snapshot import DeviceReading, LoadPlan, ModelReading, ModelStatus, RequestRow, Snapshot, Totals
from engine.system.log import LogRing
from engine.text.tokenizer import Tokenizer
from engine.worker_process.fork_server import ForkServer
from engine.worker_process.hosts import BackendFactory, NewHost

__all__ = [
    "Engine",
    "FindModel",
    "GenerateRequest",
    "LoadOrder",
    "PromptProgress",
    "RequestStream",
    "Serving",
    "StreamDelta",
]


class Engine:
    """Loads models, spreads requests over their workers, and says how they are doing.

    Every method but `snapshot` belongs to the loop that `start` ran on. `log` may be used from any thread.
    backend_factory: makes the backends of thread workers, for tests.  new_host: makes the hosts of workers, where they
    do not run as `config` says (a cluster's).  probe: reads the devices, the machine's if None.  forks: what forks
    workers, where that was started before the engine, which closes it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend_factory: BackendFactory | None = None,
        new_host: NewHost | None = None,
        probe: DeviceProbe | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self.log = LogRing()
        self._meter = Meter(slo_of(config))
        self._sampler = DeviceSampler(probe, lambda: new_probe(config.devices))
        self._insight = InsightCollector(config, self._sampler, self._meter)
        self._models = ModelManager(
            config.validate(),
            backend_factory=backend_factory,
            new_host=new_host,
            meter=self._meter,
            sampler=self._sampler,
            on_change=self.publish,
            forks=forks,
        )
        self._tracker = self._models.tracker
        self._admission = RequestAdmission(self._models)
        self._publisher = SnapshotPublisher(
            self._models,
            self._tracker,
            self._admission,
            meter=self._meter,
            sampler=self._sampler,
            insight=self._insight,
            log=self.log,
        )
        self._refusing = False
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to sample; before anything else."""
        await self._insight.start(_now(), time.time())
        self._publisher.start()

    def refuse_new(self) -> None:
        """Take no request and no command any more, as `close` does; what is under way goes on until then."""
        self._refusing = True

    async def close(self, drain_s: float = 5.0, patience_s: float | None = None) -> None:
        """Refuse new requests, give running ones `drain_s`, then stop every worker; those that have not ended
        `patience_s` later, where that is given, are killed.

        Idempotent; called again with no time to drain, it ends those that the first call waits for.
        """
        self.refuse_new()
        if patience_s is not None:
            asyncio.get_running_loop().call_later(drain_s + patience_s, self._kill_workers)
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        elif drain_s <= 0:
            self._tracker.end(tuple(self._tracker.live.values()), _shut_down().info)
        await asyncio.shield(self._closing)

    # -- models -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The settings, the knobs being the first model's; without a model, those that the next one gets."""
        return self._models.config

    @property
    def defaults(self) -> EngineConfig:
        """The settings, the knobs being those that a load gets where it sets none of its own."""
        return self._models.defaults

    def tokenizer_of(self, model: str = "") -> Tokenizer | None:
        """The tokenizer of the model that a name means; None where there is none of that name, or none loaded."""
        try:
            return self._models.find_deployment(model)[0].tokenizer
        except EngineError:
            return None

    @property
    def status(self) -> ModelStatus:
        """The first model and where it stands: what `snapshot().status` says, without building the rest of it."""
        return self._models.first.status() if self._models.first is not None else ModelStatus()

    async def serving(
        self, model: str = "", find: FindModel | None = None, *, may_wake: bool = True, client: str = ""
    ) -> Serving:
        """The model that a name means ("" is the first, an adapter's name its model), once it answers.

        A model that sleeps is woken, one that is being replaced is waited for, and one that is not here is loaded where
        `find` finds it; others leave memory where it has no room (`engine.models.eviction`). may_wake: False hides
        models that requests have had loaded, unless they are in memory. client: who has a share of the requests that
        wait for a load. Raises ModelNotFound with
        the names there are, NoModelLoaded with the state, ModelLoadFailed and its children, QueueFull, RequestTimeout,
        Draining, EngineClosed.
        """
        self._refuse_if_closed()
        self._admission.refuse_while_draining()
        return await self._models.serving(model, find, may_wake=may_wake, client=client)

    def keep_alive(self, key: str, idle_s: float | None) -> bool:
        """Have the model of a key (Serving.key), where a request has loaded it, stay so long after its last request.
        0: no longer, below 0: for ever, None: as its settings say. Returns False where an operator has loaded it."""
        return self._models.keep_alive(key, idle_s)

    def sleep(self, key: str) -> bool:
        """Unload the model of a key (Serving.key), where a request has loaded it, once it has finished what it runs;
        its next request loads it again. Returns False where an operator has loaded it."""
        return self._models.sleep(key)

    def answers_now(self, model: str) -> bool:
        """Return whether `serving` returns at once for a name."""
        return self._models.answers_now(model)

    def load_plan(self, model: str) -> LoadPlan | None:
        """The load under way that requests for a name wait for; None where there is none."""
        try:
            return self._models.find_deployment(model)[0].plan
        except EngineError:
            return None

    async def load(
        self,
        spec: ModelSpec,
        *,
        beside: bool = False,
        **knobs: Unpack[Knobs],
    ) -> LoadedModel:
        """Load `spec` and return when its first worker is ready. The load goes on if the caller is cancelled.

        It takes the place of the model of the same name, or of the first one, unless it comes in addition. Where both
        fit, the old one serves until the new one is ready, and then finishes what it has; otherwise it is drained and
        unloaded first, and what waits is kept for the new one. Raises ModelLoadFailed and its children, LoadCancelled,
        EngineBusy while another load or unload runs, InvalidRequest, EngineClosed. A load that is refused for want of
        memory changes nothing; after one that failed with nothing else loaded, the model is "failed".
        """
        self._refuse_if_closed()
        config = msgspec.structs.replace(self._models.defaults, **changed_fields(knobs)).validate()
        return await self._models.load(spec, config, beside=beside)

    async def devices(self, *, without: str | None = None) -> list[DeviceReading]:
        """The devices as placement sees them now, with what workers were promised set aside.

        without: a model ("" is the first) whose workers are taken as gone. Raises ModelNotFound, NoModelLoaded.
        """
        return await self._models.read_devices(without)

    async def cancel_load(self) -> None:
        """Cancel the current load, if any; returns when its workers are gone. `load` then raises LoadCancelled.

        While the model that it replaces still drains, that one goes on.
        """
        await self._models.cancel_load()

    async def unload(self, model: str = "", drain_s: float = 30.0) -> None:
        """Give running requests `drain_s`, end the rest with an error, and unload all that has the model's name.
        Cancels the model's load, and a load in its place.

        Raises ModelNotFound, EngineClosed; unloading nothing is fine.
        """
        self._refuse_if_closed()
        error = NoModelLoaded("the model was unloaded before the answer was complete")
        await self._models.unload(model, drain_s, error)

    async def reconfigure(self, *, model: str = "", **knobs: Unpack[Knobs]) -> None:
        """Set the targets of a model; growth and shrinking go on in the background and lose no request.

        A change of `num_workers` replaces workers that never got ready or died too often; other knobs do not. While the
        model is being replaced by one of its name, or by any where no name is given, the new one gets the knobs too.
        Raises InvalidRequest out of range, InsufficientMemory where another worker does not fit, ModelNotFound,
        EngineClosed; nothing is changed then.
        """
        self._refuse_if_closed()
        await self._models.reconfigure(model, changed_fields(knobs))

    async def restart_worker(self, worker_id: str) -> None:
        """Start a worker again: one that was left dead, or one that works, whose requests go on elsewhere.

        Raises InvalidRequest where there is none of that id, EngineClosed.
        """
        self._refuse_if_closed()
        self._models.replica(worker_id)[1].restart()

    async def drain_worker(self, worker_id: str) -> None:
        """Let a worker finish what it has, take nothing new, and go; its model is to have one worker less from now on.

        Raises InvalidRequest where there is none of that id, or none would be left to answer; EngineClosed.
        """
        self._refuse_if_closed()
        self._models.drain_worker(worker_id)

    async def attach(self, adapter: AdapterSpec, model: str = "") -> None:
        """Make a LoRA adapter usable by requests of a model; returns when every ready worker has it.

        Raises InvalidRequest where the backend cannot or the name is taken, ModelLoadFailed for a folder that does
        not fit the model, EngineBusy while another model takes its place, NoModelLoaded also where it is unloaded
        meanwhile, ModelNotFound, EngineClosed;
        nothing is changed then.
        """
        self._refuse_if_closed()
        await self._models.attach(adapter, model)

    async def detach(self, adapter: str, model: str = "") -> None:
        """Forget a LoRA adapter; requests that use it finish with it. Raises ModelNotFound, EngineClosed."""
        self._refuse_if_closed()
        self._models.detach(adapter, model)

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request and return its stream.

        A max_tokens that does not fit after the prompt is cut to the room there is (finish is then "length").
        Raises NoModelLoaded, ModelNotFound, QueueFull, ContextLengthExceeded, InvalidRequest, Draining or EngineClosed.
        """
        try:
            self._refuse_if_closed()
            admitted, deployment = self._admission.admit(request)
        except EngineError:
            self._meter.count("rejected")
            raise
        self._tracker.add(admitted)
        deployment.take(admitted)
        deployment.dispatch()
        return admitted.stream

    @property
    def prefix_sharing(self) -> PrefixSharing:
        """Requests that share the prefix cache, as in EngineConfig."""
        return self._admission.prefix_sharing

    def share_prefixes(self, sharing: PrefixSharing) -> None:
        """Change `prefix_sharing` for the requests that come from now on. Raises EngineClosed."""
        self._refuse_if_closed()
        self._admission.prefix_sharing = sharing

    async def drain(self) -> None:
        """Refuse new requests with Draining until `resume`; running and queued ones go on. Raises EngineClosed."""
        self._refuse_if_closed()
        self._admission.drain()
        self._publisher.publish()

    async def resume(self) -> None:
        """Take new requests again. Raises EngineClosed."""
        self._refuse_if_closed()
        self._admission.resume()
        self._publisher.publish()

    def cancel(self, request_id: str) -> bool:
        """End a live request with finish "cancelled"; False if there is none of that id."""
        return self._tracker.cancel(request_id)

    def cancel_queued(self, model: str = "") -> int:
        """End every request that waits for a worker, of one model or of all; how many. Raises ModelNotFound."""
        model_queue = self._models.find_deployment(model)[0].model_queue if model else None
        return self._tracker.cancel_queued(model_queue)

    def finished_requests(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Return rows of requests that ended after the first `after` ones, oldest first, with the `after` of the next
        call. From any thread."""
        return self._tracker.records.finished(after)

    def request_row(self, request_id: str) -> RequestRow | None:
        """Return the row of a live request now: its state, its place in the queue, how far its prompt is. None where
        there is none of that id."""
        return self._tracker.row(request_id)

    def request_detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """All about a request, live or ended; of several of that id the newest unless `order` is given. Its text where
        the settings allow to keep it. Raises RequestNotFound."""
        return self._tracker.detail(request_id, order, texts=self.config.show_prompts)

    def _refuse_if_closed(self) -> None:
        if self._refusing:
            raise EngineClosed("the engine is shutting down")

    # -- insight ------------------------------------------------------------------------------------------------

    async def reset_session(self) -> None:
        """Reset the session's numbers of Insight. Raises EngineClosed."""
        self._refuse_if_closed()
        self._insight.reset(_now(), time.time())
        self._publisher.publish()

    async def observe(self, changes: Mapping[str, float | str | None]) -> None:
        """Change what insight goes by: slo_ttft_s, slo_itl_s, energy_rate, energy_currency of EngineConfig. Workers
        keep slo_itl_s where their backend is ours.

        Raises InvalidRequest out of range, EngineClosed.
        """
        self._refuse_if_closed()
        self._insight.use(changes)
        if "slo_itl_s" in changes:
            self._models.set_itl_target(self._insight.slo.itl_s)

    async def measure_limits(self) -> None:
        """Measure what the processor can at most, and keep it for later runs; takes seconds.

        Raises EngineBusy while requests are live, EngineError where it cannot be measured, EngineClosed.
        """
        self._refuse_if_closed()
        await self._insight.measure(len(self._tracker.live))

    def check(self) -> None:
        """Prove the accounts of models, workers and requests; raises AssertionError with what disagrees."""
        self._models.check()

    # -- readings -----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the last publication: at most `publish_s` old, or a second while nothing happens, and never older than
        the last change of a model or worker. From any thread; nothing is built for it."""
        return self._publisher.snapshot

    def publish(self) -> Snapshot:
        """Build the snapshot of this moment, publish and return it."""
        return self._publisher.publish()

    def models(self) -> tuple[ModelReading, ...]:
        """Return the models now, in order of their coming."""
        return tuple(map(model_reading, self._models))

    def totals(self) -> Totals:
        """Return the counters since the engine started, as they are now."""
        return self._meter.totals()

    @property
    def alerts(self) -> AlertLog:
        """The log of alerts; what is added is in the next snapshot. Belongs to the engine's loop."""
        return self._models.alerts

    def usage(self) -> tuple[ModelUsage, ...]:
        """Return each model's counters and histograms, also of those that are loaded no more."""
        return self._meter.usage()

    def publish_for(self, hertz: float) -> None:
        """Publish snapshots as often as a screen shows them, and 4 times a second at least; from any thread."""
        self._publisher.publish_for(hertz)

    async def _close(self, drain_s: float) -> None:
        await self._models.close(drain_s, _shut_down())
        self._publisher.stop()
        await self._sampler.close()
        await self._insight.close()
        self._publisher.publish()

    def _kill_workers(self) -> None:
        for replica in self._models.replicas():
            replica.kill()


def _shut_down() -> EngineClosed:
    return EngineClosed("the engine shut down before the answer was complete")


def _now() -> float:
    return asyncio.get_running_loop().time()
