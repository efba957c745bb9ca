"""The engine that is tuned, while it serves: it is put to a setting, and measured under load."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from console.tuning.autotune.record import Sample
from console.tuning.autotune.space import Setting
from console.tuning.autotune.table import HEADINGS
from console.tuning.autotune.traffic import LoadGenerator
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.errors import EngineError, ModelNotFound, NoModelLoaded, WorkerFailed, from_info
from engine.snapshot import ModelReading, WorkerReading

_POLL_S = 0.05
_PATIENCE_S = 300.0
"""What workers may take to be there."""
_FAREWELL_S = 10.0
"""Time that leaving workers get to finish their requests, before others are measured."""


class KnobsChanged(Exception):
    """Another operator turned knobs while a window was measured. sentence: which, and to what."""

    def __init__(self, wanted: Setting, found: Setting) -> None:
        turned = [
            f"{heading} to {found.value(knob)}"
            for knob, heading in HEADINGS.items()
            if found.value(knob) != wanted.value(knob)
        ]
        self.sentence = f"changed by another operator: {' and '.join(turned)}"
        super().__init__(self.sentence)


class Rig(Protocol):
    """The engine that is tuned."""

    async def use(self, setting: Setting) -> None:
        """Be at this setting. Raises InsufficientMemory where it does not fit, NoModelLoaded or ModelNotFound where
        an operator unloaded the model, another EngineError where it fails."""

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        """A window of it under load. Raises EngineError where nothing is answered, Turned where it was at another
        setting in the end."""

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
        draft_tokens=(spec.draft_tokens or _MAX_DRAFT_TOKENS) if spec.ngram_draft else 0,
    )


_MAX_DRAFT_TOKENS = 7


class LiveRig:
    """A model of an engine. Most knobs are turned as it serves; KV cache bits and guesses bring up a second deployment,
    to which the requests of others go over.

    What the engine is at is asked of it every time: others may turn knobs too, and a reload that fails may leave
    nothing behind. at: the setting it is to be at.  users: clients at once; as many as there are places if None.
    """

    def __init__(
        self, engine: Engine, model: str, load: LoadGenerator, at: Setting, *, users: int | None = None
    ) -> None:
        self._engine = engine
        self._model = model
        self._load = load
        self._at = at
        self._users = users
        self._spec: ModelSpec | None = None
        self._reloading = False

    async def use(self, setting: Setting) -> None:
        """Rig."""
        self._at = setting
        now = await self._now()
        if now is None or not _same_load(now, setting):
            await self._load.set_clients(0)  # or the switch waits for what they asked
            await self._reload(setting, down=now is None)
        elif setting != now:
            await self._engine.reconfigure(
                num_workers=setting.workers,
                max_prompts=setting.max_prompts,
                step_tokens=setting.step_tokens,
                threads=setting.threads,
                model=self._model,
            )
        await self._settled(setting.workers)

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        """Rig."""
        await self._load.set_clients(self._users or self._at.places)
        try:
            sample = await self._load.measure(seconds, settle_s)
        except EngineError:
            await self._refuse_turned()  # which may be why
            raise
        await self._refuse_turned()
        return sample

    async def rest(self) -> None:
        """Rig."""
        await self._load.set_clients(0)

    async def _refuse_turned(self) -> None:
        if (found := await self._now()) is not None and found != self._at:
            raise KnobsChanged(self._at, found)

    async def _now(self) -> Setting | None:
        """Return its setting; None where it is down, and a load will mend that. Raises NoModelLoaded or ModelNotFound
        where an operator unloaded it."""
        try:
            serving = await self._engine.serving(self._model)
        except (NoModelLoaded, ModelNotFound):
            reading = self._reading()
            if self._spec is not None and (self._reloading if reading is None else reading.status.state == "failed"):
                return None
            raise
        self._spec, self._reloading = serving.spec, False
        return setting_of(serving.spec, serving.config)

    async def _reload(self, setting: Setting, *, down: bool) -> None:
        """Reload it: in its own place, or next to the others where it has none any more."""
        assert self._spec is not None, "it served before"
        wanted: dict[str, object] = {"cache_bits": setting.cache_bits}
        if self._spec.draft_model is None:
            wanted |= {"ngram_draft": setting.draft_tokens > 0, "draft_tokens": setting.draft_tokens or None}
        others = any(model.name != self._model for model in self._engine.snapshot().models)
        self._reloading = True
        if down and others and self._reading() is not None:
            await self._engine.unload(self._model, drain_s=0)
        await self._engine.load(
            msgspec.structs.replace(self._spec, **wanted),
            beside=down and others,
            num_workers=setting.workers,
            max_prompts=setting.max_prompts,
            step_tokens=setting.step_tokens,
            threads=setting.threads,
        )

    async def _settled(self, workers: int) -> None:
        """Wait for workers that are to come, and for a while for those that are to go."""
        began = time.monotonic()
        while time.monotonic() < began + _PATIENCE_S:
            self._refuse_down()
            own = self._workers()
            failed = next((worker for worker in own if worker.state == "failed"), None)
            if failed is not None:
                reason = failed.last_error.message if failed.last_error else "no cause given"
                raise WorkerFailed(f"worker {failed.id} did not become ready: {reason}", worker=failed.id)
            ready = [worker.state for worker in own].count("ready")
            if ready >= workers and (len(own) == workers or time.monotonic() > began + _FAREWELL_S):
                return
            await asyncio.sleep(_POLL_S)
        raise WorkerFailed(f"{workers} workers were not ready within {_PATIENCE_S:g} s")

    def _refuse_down(self) -> None:
        """Raise where no worker is ever to come."""
        reading = self._reading()
        if reading is None:
            raise NoModelLoaded(f"{self._model} was unloaded")
        if reading.status.state == "failed" and reading.status.error is not None:
            raise from_info(reading.status.error)

    def _workers(self) -> list[WorkerReading]:
        return [worker for worker in self._engine.snapshot().workers if worker.model == self._model]

    def _reading(self) -> ModelReading | None:
        """The newest of that name: of two, the other one is on its way out."""
        readings = [model for model in self._engine.snapshot().models if model.name == self._model]
        return readings[-1] if readings else None


def _same_load(one: Setting, other: Setting) -> bool:
    return (one.cache_bits, one.draft_tokens) == (other.cache_bits, other.draft_tokens)
