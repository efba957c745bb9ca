"""A model has one owner: what is wanted of it while it moves is neither lost nor half done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from engine.config import AdapterSpec, ModelSpec
from engine.engine import Engine
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed, ModelNotFound, NoModelLoaded
from engine.models.deployment import TRANSITIONS, Deployment, IllegalTransition
from engine.placement import load_history, model_facts
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, DyingBackend, all_ready, ask, read, started, until
from tests.fakes.model import fake_spec, write_fake_model
from tests.fakes.several import models, named, room_for, states


def workers(engine: Engine) -> dict[str, str]:
    """Each worker's state."""
    return {worker.id: worker.state for worker in engine.publish().workers}


async def asleep(engine: Engine) -> None:
    """Wait until the first model sleeps, and let no other fall asleep."""
    await until(lambda: engine.status.state == "idle")


# -- the transition table -----------------------------------------------------------------------------------------


async def test_a_state_that_may_not_follow_is_refused(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        deployment = next(iter(engine._models))
        for state in TRANSITIONS.keys() - TRANSITIONS["ready"]:
            with pytest.raises(IllegalTransition, match=f"a cannot go from ready to {state}"):
                deployment._go(state)


# -- sleeping and replacing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a"])
async def test_a_sleeping_model_that_was_replaced_is_never_woken(tmp_path: Path, name: str) -> None:
    gate = Gate()
    backends = Backends(FakeBackend(), FakeBackend(load_gate=gate))
    async with started(backends) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await asleep(engine)
        loading = asyncio.create_task(engine.load(named(tmp_path, "b"), idle_unload_s=0.0))
        await asyncio.to_thread(gate.wait_until_reached)
        asked = asyncio.create_task(engine.serving(name))
        await until(lambda: engine._models.num_waiting == 1)
        gate.open()
        await loading
        if name:
            with pytest.raises(ModelNotFound, match="available: b"):
                await asked
        else:
            assert (await asked).name == "b"
        await until(lambda: states(engine) == {"b": "ready"})
        assert [backend.loaded.name for backend in backends.made if backend.loaded is not None] == ["b"]


async def test_a_model_that_is_unloaded_while_it_wakes_is_gone(tmp_path: Path) -> None:
    backends = Backends()
    async with started(backends) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await asleep(engine)
        asked = asyncio.create_task(engine.serving())
        await asyncio.sleep(0)
        await engine.unload()
        with pytest.raises(EngineError):
            await asked
        assert engine.publish().models == ()
        assert all(backend.loaded is None for backend in backends.made)


async def test_who_waits_for_a_model_whose_waking_is_cancelled_may_come_again(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(), FakeBackend(load_gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await asleep(engine)
        asked = asyncio.create_task(engine.serving())
        await asyncio.to_thread(gate.wait_until_reached)
        await engine.cancel_load()
        with pytest.raises(NoModelLoaded, match="is unloaded while idle, until") as refused:
            await asked
        assert refused.value.details["retry_after_s"]


async def test_a_request_submitted_as_its_model_falls_asleep_keeps_it_awake(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.reconfigure(idle_unload_s=0.001)
        engine._models.tick(asyncio.get_running_loop().time() + 100)
        stream = engine.submit(ask("x"))
        assert (await read(stream)).text == expected_text(b"x", 8)


# -- knobs and adapters -------------------------------------------------------------------------------------------


async def test_knobs_that_a_load_brings_are_shown_and_built_on(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"), num_workers=4, max_prompts=3)
        await all_ready(engine)
        shown = engine.publish()
        assert (shown.target_workers, shown.max_prompts) == (4, 3)
        await engine.reconfigure(num_workers=shown.target_workers + 1)
        await until(lambda: list(workers(engine).values()) == ["ready"] * 5)


@pytest.mark.parametrize("name", ["", "a"])
async def test_knobs_given_while_a_model_is_replaced_are_its_successors_too(tmp_path: Path, name: str) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(), FakeBackend(load_gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=100)))
        await asyncio.to_thread(gate.wait_until_reached)
        await engine.reconfigure(model=name, max_prompts=32, num_workers=2)
        gate.open()
        await loading
        await until(lambda: len(engine.publish().models) == 1)
        await all_ready(engine)
        shown = models(engine)["a"]
        assert (shown.max_prompts, shown.target_workers) == (32, 2)
        assert [worker.max_prompts for worker in engine.publish().workers] == [32, 32]


async def test_an_adapter_attached_while_its_model_is_replaced_by_itself_stays(tmp_path: Path) -> None:
    gate, second = Gate(), FakeBackend()
    second.load_gate = gate
    async with started(Backends(FakeBackend(), second)) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=100)))
        await asyncio.to_thread(gate.wait_until_reached)
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        gate.open()
        await loading
        await until(lambda: [each.workers for each in models(engine)["a"].adapters] == [1])
        await read(engine.submit(ask("x", adapter="polite")))
        assert second.submitted[-1].adapter.split("\0")[0] == "polite"


async def test_an_adapter_for_a_model_that_another_one_replaces_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(), FakeBackend(load_gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await asyncio.to_thread(gate.wait_until_reached)
        with pytest.raises(EngineError, match="b is replacing a"):
            await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        gate.open()
        await loading


async def test_a_knob_leaves_dead_workers_for_the_operator_to_restart(tmp_path: Path) -> None:
    dying = DyingBackend(dies_at=1)
    async with started(Backends(dying, FakeBackend()), max_deaths=1, num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        await all_ready(engine)
        await asyncio.gather(*(read(engine.submit(ask(str(number)))) for number in range(4)))
        await until(lambda: sorted(workers(engine).values()) == ["failed", "ready"])
        await engine.reconfigure(max_prompts=8)
        assert sorted(workers(engine).values()) == ["failed", "ready"]
        dead = next(worker for worker, state in workers(engine).items() if state == "failed")
        await engine.restart_worker(dead)
        await all_ready(engine)


async def test_asking_for_as_many_workers_again_replaces_those_that_died(tmp_path: Path) -> None:
    dying = DyingBackend(dies_at=1)
    async with started(Backends(dying), max_deaths=1) as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(AssertionError):
            assert (await read(engine.submit(ask("x")))).last.finish == "length"
        await until(lambda: engine.status.state == "failed")
        await engine.reconfigure(num_workers=1)
        await until(lambda: engine.status.state == "ready")
        assert (await read(engine.submit(ask("x")))).text == expected_text(b"x", 8)


# -- loads that do not come to an end -----------------------------------------------------------------------------


async def test_a_load_cancelled_while_the_old_model_is_unloaded_leaves_no_trace(tmp_path: Path) -> None:
    first = FakeBackend()
    async with room_for(1, Backends(first)) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine).get("a") == "unloading")
        await engine.cancel_load()
        with pytest.raises(LoadCancelled):
            await loading
        await until(lambda: engine.publish().models == ())
        with pytest.raises(NoModelLoaded, match="no model is loaded"):
            await engine.serving("a")
        await engine.load(named(tmp_path, "a"))
        assert states(engine) == {"a": "ready"}


async def test_a_load_cancelled_while_a_failed_model_leaves_says_so(tmp_path: Path) -> None:
    async with started(Backends(DyingBackend(dies_at=1)), max_deaths=1) as engine:
        await engine.load(named(tmp_path, "a"))
        await read(engine.submit(ask("x")))
        await until(lambda: engine.status.state == "failed")
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await asyncio.sleep(0)
        await engine.cancel_load()
        with pytest.raises(LoadCancelled):
            await loading


@pytest.mark.parametrize("surprise", [TypeError("unhashable type: 'list'"), None])
async def test_a_folder_that_cannot_be_understood_fails_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surprise: Exception | None
) -> None:
    folder, read_facts = write_fake_model(tmp_path / "odd"), load_history.read_facts
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 10**9}))

    def surprised(spec: ModelSpec) -> model_facts.ModelFacts:
        if surprise is not None and spec.path == folder:
            raise surprise
        return read_facts(spec)

    monkeypatch.setattr(load_history, "read_facts", surprised)
    async with started() as engine:
        with pytest.raises(ModelLoadFailed) as failed:
            await engine.load(ModelSpec(path=folder, name="odd", backend="torch"))
        assert "Traceback" not in failed.value.message
        assert engine.status.state == "failed"
        await engine.load(named(tmp_path, "a"))
        assert states(engine) == {"a": "ready"}


async def test_what_nothing_foresaw_fails_a_load_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))

        async def surprise(self: Deployment) -> None:
            raise ZeroDivisionError("surprise")

        monkeypatch.setattr(Deployment, "_read", surprise)
        with pytest.raises(ModelLoadFailed, match="surprise"):
            await engine.load(named(tmp_path, "b"))
        assert states(engine) == {"a": "ready"}


async def test_an_unload_that_fails_unforeseen_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Backends(FakeBackend(load_error=RuntimeError("no")))) as engine:
        with pytest.raises(ModelLoadFailed):
            await engine.load(named(tmp_path, "a"))
        ends = engine._tracker.end
        calls = iter([True])

        def fail_once(*given: object) -> None:
            if next(calls, False):
                raise ZeroDivisionError("surprise")
            ends(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._tracker, "end", fail_once)
        await engine.unload()
        assert engine.publish().models == ()


async def test_accounts_that_disagree_are_logged_once_while_the_engine_is_idle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        model_queue = next(iter(engine._models)).model_queue
        model_queue._live["x"] = None  # type: ignore[assignment]
        engine._publisher._check_accounts()
        engine._publisher._check_accounts()
        del model_queue._live["x"]
        assert caplog.text.count("internal accounting error") == 1


# -- unloading and closing ----------------------------------------------------------------------------------------


async def test_closing_while_a_model_is_replaced_gives_its_answers_their_time(tmp_path: Path) -> None:
    gate, second = Gate(), FakeBackend()
    second.load_gate = Gate()
    async with room_for(1, Backends(FakeBackend(gate=gate), second), max_prompts=1) as engine:
        await engine.load(named(tmp_path, "a"))
        running, waiting = engine.submit(ask("x", max_tokens=40)), engine.submit(ask("y"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine)["a"] == "draining")
        closing = asyncio.create_task(engine.close(drain_s=60))
        gate.open()
        assert (await read(running)).text == expected_text(b"x", 40)
        assert (await read(waiting)).text == expected_text(b"y", 8)
        await closing
        with pytest.raises(LoadCancelled):
            await loading


async def test_closing_gives_a_model_that_was_replaced_its_time_too(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        running = engine.submit(ask("x", max_tokens=40))
        gate.allow(5)
        await engine.load(named(tmp_path, "b"))
        await until(lambda: states(engine) == {"a": "draining", "b": "ready"})
        closing = asyncio.create_task(engine.close(drain_s=60))
        await until(lambda: "b" not in states(engine))
        gate.open()
        assert (await read(running)).text == expected_text(b"x", 40)
        await closing


async def test_a_model_is_unloaded_while_another_one_drains(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        running = engine.submit(ask("x", model="a"))
        unloading = asyncio.create_task(engine.unload("a"))
        await until(lambda: states(engine)["a"] == "draining")
        await engine.unload("b")
        assert states(engine) == {"a": "draining"}
        gate.open()
        assert (await read(running)).last.finish == "length"
        await unloading


async def test_unloading_a_model_that_loads_ends_its_load_and_is_done(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(), FakeBackend(load_gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b"), beside=True))
        await asyncio.to_thread(gate.wait_until_reached)
        await engine.unload("b")
        with pytest.raises(LoadCancelled):
            await loading
        assert states(engine) == {"a": "ready"}


async def test_an_unload_that_close_overtakes_ends_without_a_cancellation(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(gate=gate))) as engine:
        await engine.load(fake_spec(tmp_path))
        stream = engine.submit(ask("x"))
        unloading = asyncio.create_task(engine.unload(drain_s=600))
        await until(lambda: engine.status.state == "draining")
        closing = asyncio.create_task(engine.close(drain_s=0.0))
        assert (await read(stream)).last.finish == "error"
        gate.open()
        await asyncio.gather(closing, unloading)


async def test_what_a_replaced_model_runs_past_its_time_goes_to_the_one_that_answers_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.handover.DRAIN_S", 0.05)
    gate = Gate()
    async with started(Backends(FakeBackend(gate=gate), FakeBackend(), FakeBackend()), num_workers=1) as engine:
        await engine.load(named(tmp_path, "a"))
        stream = engine.submit(ask("x", model="a"))
        gate.allow(3)
        await engine.load(named(tmp_path, "a", max_model_len=200))
        await engine.load(named(tmp_path, "a", max_model_len=100))
        answer = asyncio.create_task(read(stream))
        await until(lambda: stream.finished)
        gate.open()
        assert (await answer).text == expected_text(b"x", 8)
