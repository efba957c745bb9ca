"""LocalLink: the screens' EngineLink over an engine in this process, on a loop of its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from console.bench.result import BenchResult
from console.link.api import NO_LIMITS, ApiReport, KeyLimits, NewKey, Scope
from console.link.benches import BenchEntry, BenchForm, BenchOrder, BenchReport
from console.link.local_chat import LocalConversation
from console.link.protocol import ApiStatus, Fetching
from console.link.settings import SettingRow
from console.link.status import LinkStatus
from console.link.tuning import TuneOrder, TuningReport
from console.runtime.loops import LoopThread
from console.runtime.runtime import Runtime
from console.settings.load_options import NO_OPTIONS, LoadOptions, knob_values, options_of
from console.tuning.last_settings import LastSettings, model_key
from engine.config import SamplingParams
from engine.doctor.report import Report
from engine.models.catalog import ModelEntry
from engine.models.resolve import resolve_local
from engine.placement.estimate import Estimate
from engine.requests.history import RequestDetail
from engine.snapshot import LogEntry, ModelReading, RequestRow, Snapshot

# `link.api` over the API server of this process.

T = TypeVar("T")


class LocalApi:
    """Implements console.link.api.ApiLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._server = runtime.api
        self._loop = loop

    def report(self) -> ApiReport:
        """Who asks, how much and what went wrong."""
        return self._server.report()

    async def listen(self, host: str, port: int) -> None:
        """Listen at another address."""
        await self._call(self._server.listen(host, port))

    async def make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """Make a key."""
        return await self._call(self._server.make_key(name, scopes, limits))

    async def revoke_key(self, name: str) -> None:
        """Refuse a key from now on."""
        await self._call(self._server.revoke_key(name))

    async def switch_dialect(self, name: str, on: bool) -> None:
        """Answer a dialect or not."""
        await self._call(self._server.switch_dialect(name, on))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))


# LocalBenches: benches of the engine of this process.


class LocalBenches:
    """Implements console.link.benches.BenchesLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def report(self) -> BenchReport:
        """How the last one goes or went."""
        return self._runtime.benches.report()

    async def forms(self) -> Sequence[BenchForm]:
        """The benches there are."""
        return await self._call(self._runtime.benches.forms())

    async def start(self, order: BenchOrder) -> None:
        """Begin."""
        await self._call(self._runtime.benches.start(order))

    async def cancel(self) -> None:
        """End it, and keep what there is."""
        await self._call(self._runtime.benches.cancel())

    async def history(self) -> Sequence[BenchEntry]:
        """What is remembered."""
        return await self._call(self._runtime.benches.history())

    async def result(self, number: int) -> BenchResult:
        """One of them."""
        return await self._call(self._runtime.benches.result(number))

    async def forget(self, number: int) -> None:
        """Forget one."""
        await self._call(self._runtime.benches.forget(number))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))


# LocalInsight: what may be asked about insight of an engine in this process.


class LocalInsight:
    """Implements console.link.protocol.InsightLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    async def reset(self) -> None:
        """Count the session anew from now on."""
        await asyncio.wrap_future(self._loop.submit(self._runtime.engine.reset_session()))

    async def measure(self) -> None:
        """Find out what this machine's processor can at most."""
        await asyncio.wrap_future(self._loop.submit(self._runtime.engine.measure_limits()))


# LocalModels: loads, estimates and downloads by the engine of this process, and what models were last loaded with.


class LocalModels:
    """Implements console.link.protocol.ModelsLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop
        self._last = LastSettings(runtime.state_dir)

    def defaults(self) -> LoadOptions:
        """The knobs that a load gets where it sets none, and the program's settings."""
        settings = self._runtime.settings
        bits = {"cache_bits": settings.effective_cache_bits}
        return options_of({**dict(settings), **bits, **knob_values(self._runtime.engine.defaults)})

    def fetching(self) -> Fetching | None:
        """The download under way."""
        return self._runtime.fetching()

    async def load(self, model: str, changes: LoadOptions = NO_OPTIONS, *, beside: bool = False) -> None:
        """Load a model; remembered once it is ready."""
        await self._call(self._load(model, changes, beside))

    async def download(self, model: str) -> None:
        """Fetch a hub id."""
        await self._call(self._runtime.download(model))

    async def estimate(self, model: str, changes: LoadOptions = NO_OPTIONS) -> Estimate:
        """What loading it would take of each device now."""
        return await self._call(self._runtime.estimate(model, changes))

    async def remembered(self, model: str) -> LoadOptions:
        """What it was last loaded with."""
        return self._last.of(await asyncio.to_thread(self._key, model))

    async def forget(self, model: str) -> None:
        """Nothing of it any more."""
        self._last.forget(await asyncio.to_thread(self._key, model))

    async def note_knobs(self, model: str) -> None:
        """Remember the knobs of a model that serves, turned since it was loaded. model: its name, "" for the first."""
        readings = self._runtime.engine.snapshot().models
        reading = next((each for each in readings if model in ("", each.name)), None)
        if reading is None or reading.status.spec is None:
            return
        key = model_key(reading.name, reading.status.spec.path)
        last = await asyncio.to_thread(self._last.of, key)
        if last != NO_OPTIONS:
            await asyncio.to_thread(self._last.note, key, _with_knobs(last, reading))

    async def _load(self, model: str, changes: LoadOptions, beside: bool) -> None:
        await self._runtime.load(model, beside=beside, renames=True, changes=changes)
        await asyncio.to_thread(self._note, model, changes)

    def _note(self, model: str, changes: LoadOptions) -> None:
        path = resolve_local(model, self._runtime.settings.models_dir)
        readings = [
            each
            for each in self._runtime.engine.snapshot().models
            if each.status.spec is not None and each.status.spec.path == path
        ]
        self._last.note(model_key(model, path), _with_knobs(changes, readings[-1]) if readings else changes)

    def _key(self, model: str) -> str:
        return model_key(model, resolve_local(model, self._runtime.settings.models_dir))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))


def _with_knobs(settings: LoadOptions, reading: ModelReading) -> LoadOptions:
    return msgspec.structs.replace(settings, num_workers=reading.target_workers, max_prompts=reading.max_prompts)


# LocalRequests: the requests of an engine in this process. Rows come from any thread, the rest from its own loop.


class LocalRequests:
    """Implements console.link.protocol.RequestsLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Requests that ended after the first `after` ones, and what to give as `after` the next time."""
        return self._runtime.engine.finished_requests(after)

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """All about one request."""

        async def look() -> RequestDetail:
            return self._runtime.engine.request_detail(request_id, order)

        return await asyncio.wrap_future(self._loop.submit(look()))

    async def cancel_queued(self, model: str = "") -> int:
        """Cancel every request that waits."""

        async def cancel() -> int:
            return self._runtime.engine.cancel_queued(model)

        return await asyncio.wrap_future(self._loop.submit(cancel()))


# The settings of an engine in this process, for its screens.


class LocalSettings:
    """Implements SettingsLink: what is saved is used on the engine's loop."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._running = runtime.saved
        self._loop = loop

    def rows(self) -> Sequence[SettingRow]:
        """Every setting."""
        return self._running.rows()

    def path(self) -> str:
        """The config.toml that is written."""
        return self._running.path()

    async def save(self, name: str, value: str | None) -> SettingRow:
        """Write one setting."""
        return await asyncio.wrap_future(self._loop.submit(self._running.save(name, value)))


# LocalTuning: tuning of the engine of this process.


class LocalTuning:
    """Implements console.link.tuning.TuningLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def report(self) -> TuningReport:
        """How the last one goes or went."""
        return self._runtime.tuning.report()

    async def start(self, order: TuneOrder) -> None:
        """Begin."""
        await self._call(self._runtime.tuning.start(order))

    async def cancel(self) -> None:
        """End it, and put everything back."""
        await self._call(self._runtime.tuning.cancel())

    async def use_best(self) -> None:
        """Go to the best setting, and keep it."""
        await self._call(self._runtime.tuning.use_best())

    async def _call(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(self._loop.submit(work))


class LocalLink:
    """Implements EngineLink: calls are marshalled onto the engine's loop, which never waits for a screen."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop
        self.api = LocalApi(runtime, loop)
        self.settings = LocalSettings(runtime, loop)
        self.conversation = LocalConversation(runtime, loop)
        self.insight = LocalInsight(runtime, loop)
        self.models = LocalModels(runtime, loop)
        self.requests = LocalRequests(runtime, loop)
        self.tuning = LocalTuning(runtime, loop)
        self.benches = LocalBenches(runtime, loop)

    def snapshot(self) -> Snapshot:
        """The latest snapshot; a download under way shows as a loading model."""
        snapshot = self._runtime.engine.snapshot()
        finding = self._runtime.finding()
        if finding is None or snapshot.status.state == "ready":
            return snapshot
        return msgspec.structs.replace(snapshot, status=finding)

    def standing(self) -> LinkStatus:
        """Starting until the first model begins to load, or none does."""
        starting = self._runtime.starting and self.snapshot().status.state == "unloaded"
        return LinkStatus(reach="starting") if starting else LinkStatus()

    def api_status(self) -> ApiStatus:
        """The HTTP server now."""
        return self._runtime.api_status()

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Lines logged after the first `after` ones, and the total so far."""
        return self._runtime.engine.log.after(after)

    async def list_models(self) -> Sequence[ModelEntry]:
        """Models on this machine."""
        return await self._call(self._runtime.list_models())

    async def load(self, model: str, *, beside: bool = False) -> None:
        """Load a model; returns when ready."""
        await self.models.load(model, beside=beside)

    async def cancel_load(self) -> None:
        """Stop the load or download under way."""
        await self._call(self._runtime.cancel_load())

    async def unload(self, model: str = "") -> None:
        """Drain and unload."""
        await self._call(self._runtime.engine.unload(model))

    async def reconfigure(
        self,
        *,
        workers: int | None = None,
        max_prompts: int | None = None,
        idle_unload_s: float | None = None,
        model: str = "",
    ) -> None:
        """Set knobs live."""
        await self._call(
            self._runtime.engine.reconfigure(
                workers=workers, max_prompts=max_prompts, idle_unload_s=idle_unload_s, model=model
            )
        )
        await self.models.note_knobs(model)

    async def restart_worker(self, worker_id: str) -> None:
        """Start a worker again."""
        await self._call(self._runtime.engine.restart_worker(worker_id))

    async def drain_worker(self, worker_id: str) -> None:
        """Let a worker finish and go."""
        await self._call(self._runtime.engine.drain_worker(worker_id))

    async def estimate(self, model: str, *, workers: int | None = None, max_prompts: int | None = None) -> Estimate:
        """What loading a model would take of each device now."""
        return await self.models.estimate(model, LoadOptions(num_workers=workers, max_prompts=max_prompts))

    async def attach(self, name: str, path: str, model: str = "") -> None:
        """Make an adapter usable."""
        await self._call(self._runtime.attach(name, path, model))

    async def detach(self, name: str, model: str = "") -> None:
        """Forget an adapter."""
        await self._call(self._runtime.engine.detach(name, model))

    async def cancel_request(self, request_id: str) -> None:
        """Cancel one request."""
        self._loop.call_soon(self._runtime.engine.cancel, request_id)

    async def diagnose(self) -> Report:
        """What this machine has and lacks."""
        return await self._call(self._runtime.diagnose())

    async def start_api(self) -> None:
        """Listen."""
        await self._call(self._runtime.start_api())

    async def stop_api(self, *, finish: bool = False) -> None:
        """Stop listening."""
        await self._call(self._runtime.stop_api(finish=finish))

    def sampling_defaults(self, model: str = "") -> SamplingParams:
        """What a loaded model's folder suggests; neutral where it says nothing."""
        tokenizer = self._runtime.engine.tokenizer_of(model)
        return SamplingParams() if tokenizer is None else tokenizer.generation_defaults.as_params()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))
