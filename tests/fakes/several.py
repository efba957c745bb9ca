"""Engines with several models: a machine with room for so many of them, and what is shown of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from engine.config import ModelSpec
from engine.engine import Engine, GenerateRequest
from engine.snapshot import DeviceReading, ModelReading
from engine.text.tokenizer import Tokenizer
from tests.fakes.engines import Backends, StillProbe, ask, started
from tests.fakes.model import fake_spec

KEPT_FREE_BYTES = 600 * 2**20
WORKER_BYTES = 300 * 2**20
"""A little more than placement keeps free of 16 GiB, and than it gives a worker with the fake model."""


class Room(StillProbe):
    """A machine with room for so many fake models at a time; `engine` is looked at to see how many there are."""

    def __init__(self, models: int) -> None:
        super().__init__()
        self._models = models
        self.engine: Engine | None = None

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The CPU, with what is left of its room."""
        held = 0 if self.engine is None else len(self.engine._models.replicas())
        free = KEPT_FREE_BYTES + max(0, self._models - held) * WORKER_BYTES
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]


def named(folder: Path, name: str, **fields: object) -> ModelSpec:
    """The fake model under another name, in a folder of its own."""
    return msgspec.structs.replace(fake_spec(folder / name, **fields), name=name)


def models(engine: Engine) -> dict[str, ModelReading]:
    """What is shown of each model, by name; the newest of those that share one."""
    return {model.name: model for model in engine.publish().models}


def states(engine: Engine) -> dict[str, str]:
    """Each model's state."""
    return {name: model.status.state for name, model in models(engine).items()}


def encode(prompt: str) -> GenerateRequest:
    """A request that names no model and may go to any."""

    async def again(tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=False)

    return msgspec.structs.replace(ask(prompt), encode=again)


@asynccontextmanager
async def room_for(number: int, backends: Backends | None = None, **settings: object) -> AsyncIterator[Engine]:
    """A started engine on a machine with room for so many workers."""
    probe = Room(number)
    async with started(backends, probe=probe, **settings) as engine:
        probe.engine = engine
        yield engine
