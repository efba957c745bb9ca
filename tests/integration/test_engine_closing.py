"""The end of an engine: it takes nothing new, what runs may end, and a second call hurries."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import EngineClosed
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends, ask, read, serving, until
from tests.fakes.model import fake_spec


async def test_an_engine_that_refuses_goes_on_with_what_it_has(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        stream = engine.submit(ask("x", max_tokens=3))
        engine.refuse_new()
        with pytest.raises(EngineClosed):
            engine.submit(ask("y"))
        with pytest.raises(EngineClosed):
            await engine.serving()
        with pytest.raises(EngineClosed):
            await engine.load(fake_spec(tmp_path))
        assert engine.status.state == "ready"
        gate.open()
        assert (await read(stream)).last.finish == "length"


async def test_closing_again_without_time_ends_what_the_first_call_waits_for(tmp_path: Path) -> None:
    gate = Gate(1)
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        stream = engine.submit(ask("x", max_tokens=50))
        closing = asyncio.create_task(engine.close(drain_s=600))
        await until(lambda: engine.status.state == "draining")
        hurrying = asyncio.create_task(engine.close(drain_s=0))
        await until(lambda: stream.finished)
        gate.open()
        await asyncio.gather(closing, hurrying)
        last = (await read(stream)).last
        assert last.finish == "error"
        assert last.error is not None
        assert last.error.code == "engine_closed"
