"""Knobs of a step, turned while a model serves: its budget of tokens, and the threads that compute it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from tests.fakes.backend import FakeBackend, expected_text
from tests.fakes.engines import Backends, ask, read, started, until
from tests.fakes.several import named


async def test_the_budget_of_a_step_reaches_every_worker_and_those_that_come_later(tmp_path: Path) -> None:
    backends = [FakeBackend(), FakeBackend()]
    async with started(Backends(*backends)) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.reconfigure(step_tokens=64)
        await until(lambda: backends[0].step_tokens == 64)
        await engine.reconfigure(num_workers=2)
        await until(lambda: backends[1].step_tokens == 64)
        assert engine.config.step_tokens == 64
        assert (await read(engine.submit(ask("x")))).text == expected_text(b"x", 8)


async def test_a_budget_or_threads_out_of_range_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        before = engine.config
        with pytest.raises(InvalidRequest, match="step_tokens is 8; it must be between 16 and"):
            await engine.reconfigure(step_tokens=8)
        with pytest.raises(InvalidRequest, match="threads is -1"):
            await engine.reconfigure(threads=-1)
        assert engine.config == before


async def test_threads_are_those_asked_for_or_the_cores_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.workers.desired_state.usable_cores", lambda: 6)
    said: list[int] = []
    monkeypatch.setattr("engine.worker_process.loop.limit_torch_threads", said.append)
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.reconfigure(threads=2)
        await until(lambda: said[-1:] == [2])
        await engine.reconfigure(threads=0)
        await until(lambda: said[-1:] == [6])
