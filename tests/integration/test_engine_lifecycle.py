"""The model's state machine: load, cancel, fail, unload, switch, close. Workers are threads with fake backends."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

import pytest

from engine.config import ModelSpec
from engine.engine import Engine
from engine.errors import (
    EngineBusy,
    InsufficientMemory,
    InvalidRequest,
    LoadCancelled,
    ModelLoadFailed,
    NoModelLoaded,
    UnsupportedModel,
)
from engine.system.log import RingHandler
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, StillProbe, all_ready, ask, config, read, serving, started, until
from tests.fakes.model import fake_spec, write_fake_model


def state(engine: Engine) -> str:
    return engine.publish().status.state


async def test_a_load_shows_its_progress_and_ends_ready(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(load_gate=gate))) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        gate.allow(1)
        await until(lambda: engine.publish().status.progress is not None)
        status = engine.publish().status
        assert (status.state, status.spec) == ("loading", fake_spec(tmp_path))
        assert status.progress is not None
        assert (status.progress.phase, status.progress.total) == ("weights", 4000)
        with pytest.raises(NoModelLoaded) as refused:
            engine.submit(ask("x"))
        assert refused.value.details == {"state": "loading", "retry_after_s": 5}
        gate.open()
        model = await loading
        assert engine.publish().status.model == model
        assert state(engine) == "ready"


async def test_the_first_worker_gates_ready_and_the_others_follow(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(FakeBackend(), FakeBackend(load_gate=gate))
    async with started(backends, num_workers=2) as engine:
        await engine.load(fake_spec(tmp_path))
        assert sorted(each.state for each in engine.publish().workers) != ["ready", "ready"]
        assert (await read(engine.submit(ask("x")))).last.finish == "length"
        gate.open()
        await all_ready(engine)


async def test_a_load_that_fails_leaves_the_reason_and_nothing_else(tmp_path: Path) -> None:
    failing = FakeBackend(load_error=UnsupportedModel("no such architecture"))
    async with started(Backends(failing)) as engine:
        with pytest.raises(UnsupportedModel, match="no such architecture"):
            await engine.load(fake_spec(tmp_path))
        snapshot = engine.publish()
        assert (snapshot.status.state, snapshot.workers, engine.tokenizer_of()) == ("failed", (), None)
        assert snapshot.status.error is not None
        assert snapshot.status.error.code == "unsupported_model"
        await engine.load(fake_spec(tmp_path))
        assert state(engine) == "ready"


async def test_an_unexpected_failure_is_one_sentence(tmp_path: Path) -> None:
    async with started(Backends(FakeBackend(load_error=ValueError("strange")))) as engine:
        with pytest.raises(ModelLoadFailed, match="strange"):
            await engine.load(fake_spec(tmp_path))


async def test_a_folder_that_is_no_model_fails_before_any_worker_starts(tmp_path: Path) -> None:
    backends = Backends()
    async with started(backends) as engine:
        with pytest.raises(UnsupportedModel, match="not a folder"):
            await engine.load(ModelSpec(path=tmp_path / "missing", name="missing"))
        broken = write_fake_model(tmp_path / "broken")
        (broken / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModel, match="tokenizer"):
            await engine.load(fake_spec(broken))
        assert backends.made == []


async def test_a_model_that_does_not_fit_is_refused_with_numbers_before_any_worker_starts(tmp_path: Path) -> None:
    backends = Backends()
    async with started(backends, probe=StillProbe(free_bytes=1)) as engine:
        with pytest.raises(InsufficientMemory, match="short by"):
            await engine.load(fake_spec(tmp_path))
        assert (backends.made, state(engine)) == ([], "failed")


async def test_a_cancelled_load_leaves_the_engine_unloaded(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(load_gate=gate))) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await asyncio.to_thread(gate.wait_until_reached)
        await engine.cancel_load()
        with pytest.raises(LoadCancelled):
            await loading
        assert (state(engine), engine.publish().workers) == ("unloaded", ())


async def test_cancelling_no_load_does_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await engine.cancel_load()
        assert state(engine) == "ready"


async def test_a_second_load_while_one_runs_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(load_gate=gate))) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await until(lambda: state(engine) == "loading")
        with pytest.raises(EngineBusy, match="loading"):
            await engine.load(fake_spec(tmp_path))
        gate.open()
        await loading


async def test_a_load_goes_on_when_its_caller_goes_away(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(load_gate=gate))) as engine:
        caller = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await asyncio.to_thread(gate.wait_until_reached)
        caller.cancel()
        gate.open()
        await until(lambda: state(engine) == "ready")


async def test_a_model_that_is_replaced_finishes_what_it_has(tmp_path: Path) -> None:
    gate = Gate()
    first = FakeBackend(gate=gate)
    async with serving(tmp_path / "a", Backends(first)) as engine:
        running = engine.submit(ask("x"))
        other = fake_spec(tmp_path / "b", max_model_len=77)
        assert (await engine.load(other)).max_model_len == 77
        assert engine.publish().status.spec == other
        assert [model.status.state for model in engine.publish().models] == ["draining", "ready"]
        gate.open()
        assert (await read(running)).text == expected_text(b"x", 8)
        await until(lambda: first.loaded is None and len(engine.publish().models) == 1)


async def test_unloading_finishes_what_runs_and_what_waits(tmp_path: Path) -> None:
    async with serving(tmp_path, max_prompts=1) as engine:
        reading = [asyncio.create_task(read(engine.submit(ask(str(number))))) for number in range(5)]
        await engine.unload()
        assert [answer.last.finish for answer in await asyncio.gather(*reading)] == ["length"] * 5
        assert (state(engine), engine.tokenizer_of(), engine.publish().workers) == ("unloaded", None, ())


async def test_unloading_ends_what_takes_too_long_with_an_error(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=1) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(2)]
        unloading = asyncio.create_task(engine.unload(drain_s=0.01))
        for answer in await asyncio.gather(*map(read, streams)):
            assert answer.last.error is not None
            assert answer.last.error.code == "no_model_loaded"
        gate.open()
        await unloading


async def test_unloading_twice_and_unloading_nothing_is_fine(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await asyncio.gather(engine.unload(), engine.unload())
        await engine.unload()
        assert state(engine) == "unloaded"


async def test_unloading_forgets_a_failed_load(tmp_path: Path) -> None:
    async with started(Backends(FakeBackend(load_error=UnsupportedModel("no")))) as engine:
        with pytest.raises(UnsupportedModel):
            await engine.load(fake_spec(tmp_path))
        await engine.unload()
        assert state(engine) == "unloaded"


async def test_unloading_while_loading_cancels_the_load(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(load_gate=gate))) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await until(lambda: state(engine) == "loading")
        await engine.unload()
        with pytest.raises(LoadCancelled):
            await loading
        assert state(engine) == "unloaded"


async def test_closing_gives_running_requests_their_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        reading = asyncio.create_task(read(engine.submit(ask("x", max_tokens=500))))
        await asyncio.sleep(0)
        await engine.close(drain_s=20)
        assert (await reading).text == expected_text(b"x", 500)


async def test_closing_ends_what_is_left_with_an_error_and_stops_every_thread(tmp_path: Path) -> None:
    gate = Gate()
    before = set(threading.enumerate())
    async with serving(tmp_path, Backends(then=lambda: FakeBackend(gate=gate)), num_workers=2) as engine:
        stream = engine.submit(ask("x"))
        closing = asyncio.create_task(engine.close(drain_s=0.01))
        answer = await read(stream)
        assert answer.last.error is not None
        assert answer.last.error.code == "engine_closed"
        gate.open()
        await closing
        await engine.close()
        await until(lambda: not [thread for thread in {*threading.enumerate()} - before if "worker-" in thread.name])


async def test_closing_cancels_a_load_under_way(tmp_path: Path) -> None:
    engine = Engine(config(), backend_factory=Backends(FakeBackend(load_gate=Gate())), probe=StillProbe())
    await engine.start()
    loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
    await until(lambda: state(engine) == "loading")
    await engine.close()
    with pytest.raises(LoadCancelled):
        await loading
    assert state(engine) == "unloaded"


async def test_an_engine_that_never_started_can_be_closed() -> None:
    engine = Engine(config(), probe=StillProbe())
    assert engine.publish().status.state == "unloaded"
    await engine.close()


def test_a_bad_setting_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="num_workers is 0"):
        Engine(config(num_workers=0))


async def test_every_transition_is_logged(tmp_path: Path) -> None:
    async with started() as engine:
        handler = RingHandler(engine.log)
        logger = logging.getLogger("engine")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            await engine.load(fake_spec(tmp_path))
            await engine.unload()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        lines = [entry.message for entry in engine.log.after(0)[1] if entry.source == "engine"]
        assert lines == ["fake: loading", "fake: ready", "fake: draining", "fake: unloading", "fake: unloaded"]
        assert engine.publish().log_total == engine.log.total


async def test_threads_are_shared_out_among_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.workers.desired_state.usable_cores", lambda: 8)
    async with serving(tmp_path, num_workers=3) as engine:
        assert [replica.desired.load.threads for replica in engine._models.replicas()] == [2, 2, 2]


async def test_the_models_shape_in_config_decides_the_memory_asked_for(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 10**4, "intermediate_size": 10**5}))
    async with started() as engine:
        with pytest.raises(InsufficientMemory, match="short by"):
            await engine.load(fake_spec(folder))
