"""LocalModels: loads, estimates and downloads by the engine of this process, and what models were last loaded with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from console.last_settings import LastSettings, model_key
from console.links.models import NOTHING, Fetching, LoadSettings
from console.loops import LoopThread
from console.runtime import Runtime
from engine.estimate import Estimate
from engine.models.resolve import resolve_local
from engine.snapshot import ModelReading

T = TypeVar("T")


class LocalModels:
    """Implements console.links.models.ModelsLink."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop
        self._last = LastSettings(runtime.state_dir)

    def defaults(self) -> LoadSettings:
        """The knobs that a load gets where it sets none, and the program's settings."""
        settings, knobs = self._runtime.settings, self._runtime.engine.defaults
        return LoadSettings(
            num_workers=knobs.num_workers,
            max_prompts=knobs.max_prompts,
            max_model_len=settings.max_model_len,
            cache_bits=settings.effective_cache_bits,
            dtype=settings.dtype,
            weights=settings.weights,
        )

    def fetching(self) -> Fetching | None:
        """The download under way."""
        return self._runtime.fetching()

    async def load(self, model: str, changes: LoadSettings = NOTHING, *, beside: bool = False) -> None:
        """Load a model; remembered once it is ready."""
        await self._call(self._load(model, changes, beside))

    async def download(self, model: str) -> None:
        """Fetch a hub id."""
        await self._call(self._runtime.download(model))

    async def estimate(self, model: str, changes: LoadSettings = NOTHING) -> Estimate:
        """What loading it would take of each device now."""
        return await self._call(self._runtime.estimate(model, _as_settings(changes)))

    async def remembered(self, model: str) -> LoadSettings:
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
        if last != NOTHING:
            await asyncio.to_thread(self._last.note, key, _with_knobs(last, reading))

    async def _load(self, model: str, changes: LoadSettings, beside: bool) -> None:
        await self._runtime.load(model, beside=beside, renames=True, changes=_as_settings(changes))
        await asyncio.to_thread(self._note, model, changes)

    def _note(self, model: str, changes: LoadSettings) -> None:
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


def _with_knobs(settings: LoadSettings, reading: ModelReading) -> LoadSettings:
    return msgspec.structs.replace(settings, num_workers=reading.target_workers, max_prompts=reading.max_prompts)


def _as_settings(changes: LoadSettings) -> dict[str, object]:
    """The program's settings that the load changes: bits of its own are not overruled by --cache_8bit."""
    given = changes.given()
    return given | {"cache_8bit": False} if "cache_bits" in given else given
