"""LocalLink: the screens' EngineLink over an engine in this process, on a loop of its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from console.link import ApiStatus
from console.links.models import LoadSettings
from console.local_api import LocalApi
from console.local_benches import LocalBenches
from console.local_conversation import LocalConversation
from console.local_insight import LocalInsight
from console.local_models import LocalModels
from console.local_requests import LocalRequests
from console.local_settings import LocalSettings
from console.local_tuning import LocalTuning
from console.runtime import LoopThread, Runtime
from console.standing import Standing
from engine.config import SamplingParams
from engine.doctor.report import Report
from engine.estimate import Estimate
from engine.models.catalog import ModelEntry
from engine.snapshot import LogEntry, Snapshot

T = TypeVar("T")


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

    def standing(self) -> Standing:
        """Starting until the first model begins to load, or none does."""
        starting = self._runtime.starting and self.snapshot().status.state == "unloaded"
        return Standing(reach="starting") if starting else Standing()

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
        return await self.models.estimate(model, LoadSettings(num_workers=workers, max_prompts=max_prompts))

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
