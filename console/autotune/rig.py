"""The engine that is tuned, while it serves: it is put to a setting, and measured under load."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from console.autotune.load import Load
from console.autotune.record import Sample
from console.autotune.space import Setting
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.errors import NoModelLoaded, WorkerFailed
from engine.snapshot import ModelReading, WorkerReading

_POLL_S = 0.05
_PATIENCE_S = 300.0
"""What workers may take to be there."""
_FAREWELL_S = 10.0
"""What those that go get to finish what they have, before others are measured beside them."""


class Rig(Protocol):
    """What is tuned."""

    async def use(self, setting: Setting) -> None:
        """Be at this setting. Raises InsufficientMemory where it does not fit, another EngineError where it fails."""

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        """A window of it under load. Raises EngineError where nothing is answered."""

    async def rest(self) -> None:
        """End the load."""


def setting_of(spec: ModelSpec, config: EngineConfig) -> Setting:
    """The setting of a model that is loaded. config: with its own knobs."""
    return Setting(
        workers=config.num_workers,
        max_prompts=config.max_prompts,
        step_tokens=config.step_tokens,
        threads=config.threads,
        cache_bits=spec.cache_bits,
        draft_tokens=(spec.draft_tokens or _MOST_GUESSES) if spec.ngram_draft else 0,
    )


_MOST_GUESSES = 7


class LiveRig:
    """A model of an engine. Most knobs are turned as it serves; KV cache bits and guesses bring up a second deployment,
    to which the requests of others go over.

    users: clients at once; as many as there are places if None.
    """

    def __init__(self, engine: Engine, model: str, load: Load, at: Setting, *, users: int | None = None) -> None:
        self._engine = engine
        self._model = model
        self._load = load
        self._at = at
        self._users = users

    async def use(self, setting: Setting) -> None:
        """Rig."""
        if not _same_load(self._at, setting):
            await self._load.set_clients(0)  # or the switch waits for what they asked
            await self._reload(setting)
        elif setting != self._at:
            await self._engine.reconfigure(
                workers=setting.workers,
                max_prompts=setting.max_prompts,
                step_tokens=setting.step_tokens,
                threads=setting.threads,
                model=self._model,
            )
        self._at = setting
        await self._settled(setting.workers)

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        """Rig."""
        await self._load.set_clients(self._users or self._at.places)
        return await self._load.measure(seconds, settle_s)

    async def rest(self) -> None:
        """Rig."""
        await self._load.set_clients(0)

    async def _reload(self, setting: Setting) -> None:
        spec = self._reading().status.spec
        if spec is None:
            raise NoModelLoaded(f"{self._model} is loaded no more")
        ahead = setting.draft_tokens
        wanted = {"cache_bits": setting.cache_bits, "ngram_draft": ahead > 0, "draft_tokens": ahead or None}
        await self._engine.load(
            msgspec.structs.replace(spec, **wanted),
            workers=setting.workers,
            max_prompts=setting.max_prompts,
            step_tokens=setting.step_tokens,
            threads=setting.threads,
        )

    async def _settled(self, workers: int) -> None:
        """Wait for workers that are to come, and for a while for those that are to go."""
        began, own = time.monotonic(), self._workers()
        while time.monotonic() < began + _PATIENCE_S:
            failed = next((worker for worker in own if worker.state == "failed"), None)
            if failed is not None:
                reason = failed.last_error.message if failed.last_error else "it did not say why"
                raise WorkerFailed(f"worker {failed.id} did not get ready: {reason}", worker=failed.id)
            ready = [worker.state for worker in own].count("ready")
            if ready >= workers and (len(own) == workers or time.monotonic() > began + _FAREWELL_S):
                return
            await asyncio.sleep(_POLL_S)
            own = self._workers()
        raise WorkerFailed(f"{workers} workers were not ready within {_PATIENCE_S:g} s")

    def _workers(self) -> list[WorkerReading]:
        return [worker for worker in self._engine.snapshot().workers if worker.model == self._model]

    def _reading(self) -> ModelReading:
        for model in self._engine.snapshot().models:
            if model.name == self._model:
                return model
        raise NoModelLoaded(f"{self._model} is loaded no more")


def _same_load(one: Setting, other: Setting) -> bool:
    return (one.cache_bits, one.draft_tokens) == (other.cache_bits, other.draft_tokens)
