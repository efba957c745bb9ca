"""The engine with real child processes, killed in the middle of things. Their backends are fake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from engine.engine import Engine
from engine.errors import WorkerFailed
from tests.fakes.backend import expected_text
from tests.fakes.engines import StillProbe, all_ready, ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.model import fake_spec

pytestmark = pytest.mark.slow


@asynccontextmanager
async def processes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, factory: str = "backend_factories:make", **settings: object
) -> AsyncIterator[Engine]:
    """An engine whose workers are processes; none of them is left at the end."""
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", f"tests.fakes.{factory}")
    before = children()
    engine = Engine(config(worker_host="process", **settings), probe=StillProbe())
    await engine.start()
    engine._models.prepare_workers()  # by the process that forks them, which stays as long as the engine
    try:
        yield engine
    finally:
        await engine.close(drain_s=0.0)
    assert workers() <= before
    await until(lambda: children() <= before)  # the chat template's process ends after what it has begun


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def workers() -> set[int]:
    """Those of them that are workers."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "ericllm-worker":
                found.add(child.pid)
    return found


def pids(engine: Engine) -> list[int]:
    return [worker.pid for worker in engine.publish().workers if worker.pid is not None]


async def test_a_worker_killed_mid_stream_changes_nothing_in_the_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Hold(monkeypatch, tmp_path)
    async with processes(monkeypatch, tmp_path, factory="held:make", num_workers=2) as engine:
        await engine.load(fake_spec(tmp_path))
        await all_ready(engine)
        prompts = [f"marker {number}" for number in range(16)]
        length = 300
        hold.begin()
        reading = [asyncio.create_task(read(engine.submit(ask(prompt, max_tokens=length)))) for prompt in prompts]
        await until(lambda: all(row.output_tokens > 5 for row in engine.publish().requests))
        os.kill(pids(engine)[0], signal.SIGKILL)
        hold.end()
        answers = await asyncio.gather(*reading)
        assert [answer.text for answer in answers] == [expected_text(prompt.encode(), length) for prompt in prompts]
        assert engine.publish().totals.requeued > 0
        await all_ready(engine)
        assert sum(worker.restarts for worker in engine.publish().workers) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_all_processes_leaves_it_to_the_engine_when_its_workers_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    hold, others = Hold(monkeypatch, tmp_path), children()
    async with processes(monkeypatch, tmp_path, factory="held:make") as engine:
        await engine.load(fake_spec(tmp_path))
        chat = [{"role": "user", "content": "hello"}]
        tokenizer = (await engine.serving("fake")).tokenizer
        assert "hello" in await tokenizer.apply_chat_template(chat)
        hold.begin()
        reading = asyncio.create_task(read(engine.submit(ask("x", max_tokens=50))))
        await until(lambda: any(row.output_tokens > 5 for row in engine.publish().requests))
        # The one that keeps a model's files ends by itself where there are none, a moment after the load.
        await until(lambda: len(children() - others) <= 3)
        ours = children() - others
        assert len(ours) == 3, "the worker, the process that forked it and the template's"
        for child in ours:
            os.kill(child, number)
        hold.end()
        assert (await reading).text == expected_text(b"x", 50)
        assert "hello" in await tokenizer.apply_chat_template(chat)
        assert children() - others == ours


async def test_workers_killed_during_the_load_fail_it_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with processes(monkeypatch, tmp_path) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await until(lambda: pids(engine))
        os.kill(pids(engine)[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            await loading
        assert engine.publish().status.state == "failed"
        assert pids(engine) == []


async def test_a_load_cancelled_while_its_processes_start_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with processes(monkeypatch, tmp_path, num_workers=3) as engine:
        before = children()
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await until(lambda: children() - before)
        await engine.cancel_load()
        await asyncio.wait((loading,))
        assert children() <= before
        assert engine.publish().status.state == "unloaded"


async def test_a_worker_that_crashes_again_and_again_gives_its_request_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with processes(monkeypatch, tmp_path, factory="backend_factories:make_crashing") as engine:
        await engine.load(fake_spec(tmp_path))
        answer = await read(engine.submit(ask("x", max_tokens=100)))
        assert answer.last.error is not None
        assert answer.last.error.code == "worker_failed"
        assert "SIGSEGV" in answer.last.error.message
        assert answer.text == expected_text(b"x", len(answer.token_ids))


async def test_processes_come_and_go_with_the_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.models.deployment._WARM_UP_S", 600.0)  # then chat templates get a process of their own
    async with processes(monkeypatch, tmp_path) as engine:
        before = children()
        await engine.load(fake_spec(tmp_path))
        await engine.reconfigure(num_workers=3)
        await all_ready(engine)
        await until(lambda: len(children() - before) == 3)
        await engine.reconfigure(num_workers=1)
        await all_ready(engine)
        await until(lambda: len(children() - before) == 1)
        await engine.unload()
        await until(lambda: children() <= before)
