"""LocalLink: the screens' EngineLink over an engine in this process, on a loop of its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from console.link.local_chat import LocalConversation
from console.link.protocol import DRAIN_S, EngineLink
from console.link.rpc import Call, RpcLink, invoke
from console.link.status import LinkStatus, link_status
from console.runtime.loops import EngineLoop
from console.settings.load_options import NO_OPTIONS, LoadOptions, knob_values, load_options, options_of
from console.tuning.last_settings import LastSettings, model_key
from engine.config import SamplingParams
from engine.engine import Engine
from engine.models.knobs import Knobs
from engine.models.resolve import resolve_local
from engine.placement.estimate import Estimate
from engine.requests.history import RequestDetail
from engine.snapshot import LogEntry, RequestRow, Snapshot

if TYPE_CHECKING:
    from console.runtime.runtime import Runtime


class LocalInsight:
    """Implements console.link.protocol.InsightLink."""

    def __init__(self, engine: Engine) -> None:
        self.reset = engine.reset_session
        self.measure = engine.measure_limits


class LocalModels:
    """Implements console.link.protocol.ModelsLink: loads, estimates, downloads, and the options of last loads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last = LastSettings(runtime.state_dir)
        self.fetching = runtime.fetching
        self.download = runtime.download

    def defaults(self) -> LoadOptions:
        """Return the knobs that a load gets where it sets none, and the program's settings. max_prompts: None where its
        default is that of the model's backend."""
        settings = self._runtime.settings
        bits, defaults = {"cache_bits": settings.effective_cache_bits}, self._runtime.engine.defaults
        by_backend = {"max_prompts": None} if defaults.library_prompts else {}
        return options_of({**dict(settings), **bits, **knob_values(defaults), **by_backend})

    async def load(
        self,
        model: str,
        changes: LoadOptions = NO_OPTIONS,
        *,
        beside: bool = False,
        name: str = "",
        rename: bool = True,
    ) -> None:
        """Load a model; remember its options once it is ready."""
        await self._runtime.load(model, called=name, beside=beside, renames=rename, changes=changes)
        await asyncio.to_thread(self._note, model, changes)

    async def estimate(self, model: str, changes: LoadOptions = NO_OPTIONS, *, beside: bool = False) -> Estimate:
        """Return what loading it would take of each device now."""
        return await self._runtime.estimate(model, changes, beside=beside)

    async def remembered(self, model: str) -> LoadOptions:
        """Return the options that it was last loaded with."""
        return self._last.of(await asyncio.to_thread(self._key, model))

    async def forget(self, model: str) -> None:
        """Forget the options that it was last loaded with."""
        self._last.forget(await asyncio.to_thread(self._key, model))

    async def note_knobs(self, model: str, knobs: Knobs) -> None:
        """Remember knobs of a model that serves, changed since it was loaded. model: its name, "" for the first."""
        reading = next((each for each in self._runtime.engine.models() if model in ("", each.name)), None)
        if reading is None or reading.status.spec is None:
            return
        key = model_key(reading.name, reading.status.spec.path)
        last = await asyncio.to_thread(self._last.of, key)
        if last != NO_OPTIONS:
            names = {flag.engine or name: name for name, _, flag in load_options()}
            changes = {names[knob]: value for knob, value in knobs.items() if value is not None}
            await asyncio.to_thread(self._last.note, key, msgspec.structs.replace(last, **changes))

    def _note(self, model: str, changes: LoadOptions) -> None:
        path = resolve_local(model, self._runtime.settings.models_dir)
        readings = [
            each
            for each in self._runtime.engine.snapshot().models
            if each.status.spec is not None and each.status.spec.path == path
        ]
        if readings:
            changes = msgspec.structs.replace(
                changes, num_workers=readings[-1].target_workers, max_prompts=readings[-1].max_prompts
            )
        self._last.note(model_key(model, path), changes)

    def _key(self, model: str) -> str:
        return model_key(model, resolve_local(model, self._runtime.settings.models_dir))


class LocalRequests:
    """Implements console.link.protocol.RequestsLink."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Return requests that ended after the first `after` ones, and the next `after`."""
        return self._engine.finished_requests(after)

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """Return all about one request."""
        return self._engine.request_detail(request_id, order)

    async def cancel_queued(self, model: str = "") -> int:
        """Cancel every request that waits."""
        return self._engine.cancel_queued(model)


class LocalEngine:
    """Implements EngineLink on the engine's loop; what a screen polls may be called from any thread."""

    def __init__(self, runtime: Runtime, loop: EngineLoop) -> None:
        self._runtime = runtime
        engine = runtime.engine
        self.api = runtime.api
        self.benches = runtime.benches
        self.conversation = LocalConversation(engine, loop)
        self.insight = LocalInsight(engine)
        self.models = LocalModels(runtime)
        self.requests = LocalRequests(engine)
        self.settings = runtime.live_settings
        self.tuning = runtime.tuning
        self.api_status = runtime.api_status
        self.list_models = runtime.list_models
        self.cancel_load = runtime.cancel_load
        self.diagnose = runtime.diagnose
        self.start_api = runtime.start_api
        self.stop_api = runtime.stop_api
        self.restart_worker = engine.restart_worker
        self.drain_worker = engine.drain_worker
        self.drain = engine.drain
        self.resume = engine.resume

    def snapshot(self) -> Snapshot:
        """Return the latest snapshot; a download under way shows as a loading model."""
        snapshot = self._runtime.engine.snapshot()
        download = self._runtime.download_status()
        if download is None or snapshot.status.state == "ready":
            return snapshot
        return msgspec.structs.replace(snapshot, status=download)

    def standing(self) -> LinkStatus:
        """Return "starting" until the first model begins to load, or none does."""
        starting = self._runtime.starting and self.snapshot().status.state == "unloaded"
        model = PurePath(self._runtime.settings.model).name
        return LinkStatus(reach="starting", model=model) if starting else LinkStatus()

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Return lines logged after the first `after` ones, and the total so far."""
        return self._runtime.engine.log.after(after)

    async def unload(self, model: str = "", *, drain_seconds: float = DRAIN_S) -> None:
        """Drain and unload a model."""
        await self._runtime.engine.unload(model, drain_seconds)

    async def reconfigure(
        self,
        *,
        num_workers: int | None = None,
        max_prompts: int | None = None,
        step_tokens: int | None = None,
        threads: int | None = None,
        idle_unload_s: float | None = None,
        model: str = "",
    ) -> None:
        """Set knobs of a model, and remember them for its next load."""
        knobs = Knobs(
            num_workers=num_workers,
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            threads=threads,
            idle_unload_s=idle_unload_s,
        )
        await self._runtime.engine.reconfigure(**knobs, model=model)
        await self.models.note_knobs(model, knobs)

    async def attach(self, name: str, path: str, model: str = "", *, scale: float = 1.0) -> None:
        """Make an adapter usable."""
        await self._runtime.attach(name, path, model, scale)

    async def detach(self, name: str, model: str = "") -> None:
        """Forget an adapter."""
        await self._runtime.engine.detach(name, model)

    async def cancel_request(self, request_id: str) -> None:
        """Cancel one request."""
        self._runtime.engine.cancel(request_id)

    def sampling_defaults(self, model: str = "") -> SamplingParams:
        """Return what a loaded model's folder suggests; neutral where it says nothing."""
        tokenizer = self._runtime.engine.tokenizer_of(model)
        return SamplingParams() if tokenizer is None else tokenizer.generation_defaults.as_params()


class LocalLink(RpcLink):
    """Carries calls of another thread to the engine's loop, which never waits for a screen."""

    def __init__(self, runtime: Runtime, loop: EngineLoop) -> None:
        super().__init__(self)
        self._engine: EngineLink = LocalEngine(runtime, loop)
        self._loop = loop
        self.conversation = self._engine.conversation

    def standing(self) -> LinkStatus:
        """Return how the engine of this process is."""
        return link_status(self._engine)

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer of the engine."""
        return call.on(self._engine)(**arguments)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer of the engine, found on its loop."""
        return await asyncio.wrap_future(self._loop.submit(invoke(call, self._engine, arguments)))
