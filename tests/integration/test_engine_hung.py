"""Workers that stop stepping, and workers that nothing can keep alive."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from console.api.server import ApiServer, ApiSettings
from engine.engine import Engine
from engine.errors import NoModelLoaded
from engine.worker_process.hosts import ProcessHost
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import (
    PATIENCE_S,
    Backends,
    DyingBackend,
    StillProbe,
    all_ready,
    ask,
    config,
    read,
    serving,
    until,
    worker,
)
from tests.fakes.held import Hold
from tests.fakes.model import fake_spec


@pytest.mark.slow
async def test_a_process_that_hangs_is_replaced_and_its_requests_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Hold(monkeypatch, tmp_path)
    engine = Engine(config(worker_host="process", hang_s=6.0), probe=StillProbe())
    await engine.start()
    try:
        await engine.load(fake_spec(tmp_path))
        hold.begin()
        reading = [asyncio.create_task(read(engine.submit(ask(f"r{number}", max_tokens=200)))) for number in range(8)]
        await until(lambda: all(row.output_tokens > 5 for row in engine.publish().requests))
        hung = worker(engine, "w0").pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        hold.end()
        answers = await asyncio.gather(*reading)
        assert [answer.text for answer in answers] == [expected_text(f"r{number}".encode(), 200) for number in range(8)]
        now = worker(engine, "w0")
        assert now.pid != hung
        assert (now.restarts, now.deaths_in_a_row) == (1, 1)
        assert now.last_error is not None
        assert "while it ran 8 requests" in now.last_error.message
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
    finally:
        await engine.close(drain_s=0.0)


async def test_who_closes_in_a_hurry_does_not_wait_for_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def until_it_ended(host: ProcessHost, timeout_s: float) -> bool:
        await host._exit_reported.wait()
        return True

    monkeypatch.setattr(ProcessHost, "_exited_within", until_it_ended)  # the patient way would never end
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")
    engine = Engine(config(worker_host="process"), probe=StillProbe())
    await engine.start()
    await engine.load(fake_spec(tmp_path))
    hung = worker(engine, "w0").pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    await engine.close(drain_s=0.0, patience_s=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


@pytest.mark.slow
async def test_health_shows_a_hung_worker_until_it_is_replaced(tmp_path: Path) -> None:
    """It is replaced only once /health was seen to fail."""
    backends = Backends(FakeBackend(gate=Gate(3)))
    async with serving(tmp_path, backends, hang_s=600.0) as engine:
        server = ApiServer(engine, ApiSettings(port=0, stall_s=1.5))
        await server.start()
        try:
            async with aiohttp.ClientSession(server.status().url) as http:

                async def health_is(status: int) -> None:
                    async with asyncio.timeout(PATIENCE_S):
                        while True:
                            async with http.get("/health") as response:
                                if response.status == status:
                                    return
                            await asyncio.sleep(0.05)

                stream = engine.submit(ask("x", max_tokens=10))
                await health_is(503)
                engine._models.replica("w0")[1]._hang_s = 6.0
                await health_is(200)
                assert (await read(stream)).text == expected_text(b"x", 10)
                assert worker(engine, "w0").restarts == 1
        finally:
            await server.stop(drain_s=0.0)


async def test_one_worker_left_dead_leaves_the_others_at_work(tmp_path: Path) -> None:
    backends = Backends(DyingBackend(dies_at=1), FakeBackend(), then=lambda: DyingBackend(dies_at=1))
    async with serving(tmp_path, backends, num_workers=2, max_deaths=1) as engine:
        answers = await asyncio.gather(*(read(engine.submit(ask(f"r{number}"))) for number in range(8)))
        assert [answer.text for answer in answers] == [expected_text(f"r{number}".encode(), 8) for number in range(8)]
        states = {each.state for each in engine.publish().workers}
        assert states == {"failed", "ready"}
        dead = next(each for each in engine.publish().workers if each.state == "failed")
        assert dead.last_error is not None
        assert "crashed once; not restarted" in dead.last_error.message
        assert engine.status.state == "ready"


async def test_requests_end_with_the_reason_when_every_worker_is_left_dead(tmp_path: Path) -> None:
    backends = Backends(then=lambda: DyingBackend(dies_at=0, always=True))
    async with serving(tmp_path, backends, max_deaths=2, max_prompts=1) as engine:
        streams = [engine.submit(ask(f"r{number}")) for number in range(3)]
        answers = [await read(stream) for stream in streams]
        assert [answer.last.finish for answer in answers] == ["error"] * 3
        assert all(answer.last.error and "not restarted" in answer.last.error.message for answer in answers)
        with pytest.raises(NoModelLoaded):
            engine.submit(ask("late"))


async def test_an_operator_revives_a_worker_that_was_left_dead(tmp_path: Path) -> None:
    backends = Backends(DyingBackend(dies_at=1))
    async with serving(tmp_path, backends, max_deaths=1) as engine:
        assert (await read(engine.submit(ask("x")))).last.finish == "error"
        await engine.restart_worker("w0")
        await all_ready(engine)
        assert (await read(engine.submit(ask("y")))).text == expected_text(b"y", 8)
