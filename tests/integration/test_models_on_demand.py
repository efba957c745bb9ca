"""Models that requests name: loaded where they are found, with room made for them, on virtual time over workers that
are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import AdapterSpec, EngineConfig
from engine.engine import Engine, FindModel, LoadOrder
from engine.errors import InsufficientMemory, ModelLoadFailed, ModelNotFound, QueueFull, RequestTimeout
from engine.models import manager
from engine.snapshot import LoadPlan
from engine.worker_process.hosts import WorkerExit
from engine.workers.pool import Pool
from tests.fakes.engines import ask, read, until
from tests.fakes.scripted_workers import Machine
from tests.fakes.several import models, named, states
from tests.fakes.virtual_time import VirtualLoop, run

Scene = Callable[[Engine, Machine], Coroutine[Any, Any, None]]


def play(scene: Scene, *, room: int = 2, seed: int = 0, **settings: object) -> None:
    """Play a scene on an engine with room for so many models."""
    random = Random(seed)

    async def main(loop: VirtualLoop) -> None:
        machine = Machine(random, room)
        machine.step_s, machine.load_s = 1.0, 10.0
        config = EngineConfig(**{"worker_host": "thread", "hang_s": 0.0, "timeout_s": 0.0, **settings})  # type: ignore[arg-type]
        engine = Engine(config, new_host=machine.new_host, probe=machine)
        await engine.start()
        loop.after_each.append(engine.check)
        try:
            await scene(engine, machine)
        finally:
            machine.stuck.clear()
            await engine.close(0.0)
        assert (machine.alive, machine.wrongs) == ([], [])

    run(main, random)


def finds(folder: Path, *names: str, **fields: object) -> FindModel:
    """Finds the models of these names."""

    async def find(name: str) -> LoadOrder | None:
        return LoadOrder(spec=named(folder, name, **fields)) if name in names else None

    return find


async def answered(
    engine: Engine, name: str, find: FindModel | None = None, tokens: int = 3, prepares_s: float = 0.0
) -> str:
    """Ask a model by name and return who answered. prepares_s: of the prompt, once the model is there."""
    serving = await engine.serving(name, find)
    await asyncio.sleep(prepares_s)
    request = msgspec.structs.replace(ask("x", max_tokens=tokens), model=name, key=serving.key)
    answer = await read(engine.submit(request), patience_s=1e4)
    assert answer.last.finish == "length", answer.last
    return serving.name


def test_a_name_that_is_found_is_loaded_and_the_request_answered(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        assert await answered(engine, "a", finds(tmp_path, "a")) == "a"
        assert states(engine) == {"a": "ready"}

    play(scene)


def test_a_name_that_is_not_found_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(ModelNotFound, match="available: a"):
            await engine.serving("b", finds(tmp_path, "c"))
        assert states(engine) == {"a": "ready"}

    play(scene)


def test_requests_for_one_model_share_one_load(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        names = await asyncio.gather(*(answered(engine, "a", finds(tmp_path, "a")) for _ in range(8)))
        assert (names, len(machine.hosts)) == (["a"] * 8, 1)

    play(scene)


def test_room_is_made_by_the_model_that_was_used_least(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b", "c")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "abbb":
            await answered(engine, name, find)
        await asyncio.sleep(60)
        await answered(engine, "c", find)
        assert states(engine) == {"a": "idle", "b": "ready", "c": "ready"}

    play(scene)


def test_a_model_that_left_is_loaded_again_by_the_next_request(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "abab":
            assert await answered(engine, name, find) == name
        assert states(engine) == {"a": "idle", "b": "ready"}

    play(scene, room=1)


def test_running_requests_are_finished_before_their_model_leaves(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        long = asyncio.create_task(answered(engine, "a", find, tokens=50))
        await until(lambda: any(each.generated for each in engine._tracker.live.values()))
        await asyncio.sleep(10)
        other = asyncio.create_task(answered(engine, "b", find))
        await asyncio.sleep(5)
        assert states(engine) == {"a": "draining", "b": "loading"}
        assert (await long, await other) == ("a", "b")

    play(scene, room=1)


def test_requests_for_a_model_that_is_leaving_wait_for_its_next_load(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        long = asyncio.create_task(answered(engine, "a", find, tokens=50))
        await until(lambda: any(each.generated for each in engine._tracker.live.values()))
        await asyncio.sleep(10)
        other = asyncio.create_task(answered(engine, "b", find))
        await until(lambda: states(engine)["a"] == "draining")
        late = asyncio.create_task(answered(engine, "a", find))
        assert list(await asyncio.gather(long, other, late)) == ["a", "b", "a"]

    play(scene, room=1)


def test_a_request_that_was_prepared_before_its_model_left_is_answered(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        serving = await engine.serving("a", find)
        await asyncio.sleep(60)
        await answered(engine, "b", find)
        assert states(engine) == {"a": "idle", "b": "ready"}
        request = msgspec.structs.replace(ask("x", max_tokens=3), model="a", key=serving.key)
        answer = await read(engine.submit(request), patience_s=1e4)
        assert answer.last.finish == "length", answer.last

    play(scene, room=1)


def test_a_client_that_fills_the_places_of_those_that_wait_for_a_load_leaves_others_theirs(tmp_path: Path) -> None:
    find = finds(tmp_path, "a")

    async def scene(engine: Engine, machine: Machine) -> None:
        greedy = [asyncio.create_task(engine.serving("a", find, client="greedy")) for _ in range(4)]
        await until(lambda: [each.waiting for each in engine._models] == [4])
        with pytest.raises(QueueFull, match="the queue for a is full: 4 requests, max 4"):
            await engine.serving("a", find, client="greedy")
        others = [asyncio.create_task(engine.serving("a", find, client="other")) for _ in range(2)]
        await until(lambda: [each.waiting for each in engine._models] == [6])
        with pytest.raises(QueueFull, match="6 requests, max 4"):
            await engine.serving("a", find, client="other")
        assert {each.name for each in await asyncio.gather(*greedy, *others)} == {"a"}
        assert [each.waiters for each in engine._models] == [{}]

    play(scene, max_queue=4)


@pytest.mark.parametrize(
    ("plan", "sentence", "details"),
    [
        (LoadPlan(load_s=31.0, loading=True), "the expected wait is 31 s", (31, True)),
        (LoadPlan(load_s=500.0, loading=True), "the expected wait is 500 s", (60, True)),
        (LoadPlan(unloads=("b",), load_s=31.0), "try again later", (5, False)),
    ],
)
def test_a_full_queue_of_a_model_that_loads_says_the_expected_wait(
    tmp_path: Path, plan: LoadPlan, sentence: str, details: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, began = finds(tmp_path, "a"), 1000.0
    monkeypatch.setattr(manager, "time", SimpleNamespace(time=lambda: began))  # the wall clock is not virtual

    async def scene(engine: Engine, machine: Machine) -> None:
        waiting = [asyncio.create_task(engine.serving("a", find, client="greedy")) for _ in range(4)]
        await until(lambda: (found := engine.load_plan("a")) is not None and found.loading)
        [deployment] = engine._models
        deployment.plan = msgspec.structs.replace(plan, began=began)
        with pytest.raises(QueueFull, match=f"the queue for a is full: 4 requests, max 4; {sentence}") as refused:
            await engine.serving("a", find, client="greedy")
        found = refused.value.details
        assert (found["retry_after_s"], "expected_wait_s" in found) == details
        await asyncio.gather(*waiting)

    play(scene, max_queue=4)


def test_a_pinned_model_never_leaves(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a", pin=True))
        await asyncio.sleep(60)
        with pytest.raises(InsufficientMemory, match="pinned and never unloaded: a"):
            await engine.serving("b", finds(tmp_path, "b"))
        assert states(engine) == {"a": "ready"}

    play(scene, room=1)


def test_no_more_models_are_in_memory_than_may_be(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b", "c")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "abc":
            await answered(engine, name, find)
            await asyncio.sleep(60)
        assert sorted(states(engine).values()) == ["idle", "ready", "ready"]

    play(scene, room=9, max_models=2)


def test_a_model_stays_as_long_as_its_load_took(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        machine.stuck = {"a"}
        first = asyncio.create_task(answered(engine, "a", find, tokens=1))
        await asyncio.sleep(100)
        machine.stuck = set()
        await first
        asked_at = asyncio.get_running_loop().time()
        other = asyncio.create_task(answered(engine, "b", find, tokens=1))
        await asyncio.sleep(1)
        plan = models(engine)["b"].plan
        assert plan is not None
        assert (plan.unloads, 80 < plan.stay_s <= 100, plan.loading) == (("a",), True, False)
        await other
        assert asyncio.get_running_loop().time() - asked_at > 80

    play(scene, room=1)


def test_a_load_that_failed_is_not_repeated_by_every_request(tmp_path: Path) -> None:
    find = finds(tmp_path, "a")

    async def scene(engine: Engine, machine: Machine) -> None:
        machine.broken = {"a"}
        for _ in range(5):
            with pytest.raises(ModelLoadFailed):
                await engine.serving("a", find)
        assert len(machine.hosts) == 1
        machine.broken = set()
        await asyncio.sleep(6)
        assert await answered(engine, "a", find) == "a"

    play(scene)


def test_a_load_that_nobody_waits_for_any_more_makes_no_room(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        machine.stuck = {"a"}
        first = asyncio.create_task(answered(engine, "a", find, tokens=1))
        await asyncio.sleep(100)
        machine.stuck = set()
        await first
        waits = asyncio.create_task(engine.serving("b", find))
        await asyncio.sleep(5)
        waits.cancel()
        await asyncio.sleep(200)
        assert states(engine) == {"a": "ready"}

    play(scene, room=1)


def test_a_request_that_waits_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        machine.stuck = {"a"}
        with pytest.raises(RequestTimeout):
            await engine.serving("a", finds(tmp_path, "a"))

    play(scene, timeout_s=20.0)


def test_an_alias_means_its_model_and_a_model_of_that_name_comes_first(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a", aliases=("gpt", "b")))
        assert await answered(engine, "gpt") == "a"
        assert await answered(engine, "b") == "a"
        await engine.load(named(tmp_path, "b"), beside=True)
        assert await answered(engine, "b") == "b"

    play(scene)


def test_an_operator_may_load_a_model_that_left(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "ab":
            await answered(engine, name, find)
            await asyncio.sleep(60)
        machine.room = 2
        await engine.load(named(tmp_path, "a"), beside=True)
        assert sorted(states(engine).items()) == [("a", "ready"), ("b", "ready")]

    play(scene, room=1)


def slow_to_stop(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Workers take that long to give their memory back."""
    stop = Pool.stop

    async def stop_later(self: Pool) -> None:
        await asyncio.sleep(seconds)
        await stop(self)

    monkeypatch.setattr(Pool, "stop", stop_later)


def test_a_request_that_comes_while_its_model_is_unloading_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_to_stop(monkeypatch, 3.0)
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        serving = await engine.serving("a", find)
        await asyncio.sleep(60)
        other = asyncio.create_task(answered(engine, "b", find))
        await until(lambda: states(engine)["a"] == "unloading")
        request = msgspec.structs.replace(ask("x", max_tokens=3), model="a", key=serving.key)
        answer = await read(engine.submit(request), patience_s=1e4)
        assert (answer.last.finish, await other) == ("length", "b")

    play(scene, room=1)


def test_a_model_waits_for_one_that_leaves_anyhow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_to_stop(monkeypatch, 3.0)

    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        unloading = asyncio.create_task(engine.unload("a"))
        await until(lambda: states(engine)["a"] == "unloading")
        assert await answered(engine, "b", finds(tmp_path, "b")) == "b"
        await unloading

    play(scene, room=1)


def test_an_eviction_is_taken_back_where_nobody_waits_any_more(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        long = asyncio.create_task(answered(engine, "a", find, tokens=600))
        await until(lambda: any(each.generated for each in engine._tracker.live.values()))
        await asyncio.sleep(20)
        waits = asyncio.create_task(engine.serving("b", find))
        await until(lambda: states(engine)["a"] == "draining")
        waits.cancel()
        began = asyncio.get_running_loop().time()
        assert await answered(engine, "a", find) == "a"
        assert asyncio.get_running_loop().time() - began < 20
        assert (await long, len(machine.hosts)) == ("a", 1)

    play(scene, room=1)


def test_a_model_that_fits_does_not_wait_behind_one_that_needs_room(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "c")

    async def big(name: str) -> LoadOrder | None:
        return LoadOrder(spec=named(tmp_path, name), knobs={"num_workers": 2})

    async def scene(engine: Engine, machine: Machine) -> None:
        long = asyncio.create_task(answered(engine, "a", find, tokens=600))
        await until(lambda: any(each.generated for each in engine._tracker.live.values()))
        await asyncio.sleep(20)
        waits = asyncio.create_task(answered(engine, "b", big))
        await until(lambda: states(engine)["a"] == "draining")
        began = asyncio.get_running_loop().time()
        assert await answered(engine, "c", find) == "c"
        assert asyncio.get_running_loop().time() - began < 30
        assert [await long, await waits] == ["a", "b"]

    play(scene, room=2)


def test_who_may_not_load_models_does_not_wake_those_that_others_had_loaded(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "ab":
            await answered(engine, name, find)
        assert states(engine) == {"a": "idle", "b": "ready"}
        assert (await engine.serving("b", may_wake=False)).name == "b"
        with pytest.raises(ModelNotFound, match=r"There is no model 'a'; available: b$"):
            await engine.serving("a", may_wake=False)

    play(scene, room=1)


def test_a_model_whose_settings_changed_is_loaded_with_the_new_ones(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "ab":
            await answered(engine, name, finds(tmp_path, name))
        assert await answered(engine, "a", finds(tmp_path, "a", max_model_len=77)) == "a"
        assert {
            each.name: each.status.model.max_model_len for each in engine.publish().models if each.status.model
        } == {"a": 77}

    play(scene, room=1)


def test_a_request_without_a_name_wakes_the_first_model_whoever_loaded_it(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in "ab":
            await answered(engine, name, find)
        assert states(engine) == {"a": "idle", "b": "ready"}
        assert await answered(engine, "", find) == "a"

    play(scene, room=1)


def test_an_adapter_of_a_model_that_left_is_loaded_with_it(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        await answered(engine, "a", find)
        await engine.attach(AdapterSpec(name="polite", path=tmp_path), "a")
        await asyncio.sleep(60)
        await answered(engine, "b", find)
        serving = await engine.serving("polite", find)
        assert (serving.name, serving.adapter) == ("a", "polite")

    play(scene, room=1)


def test_folders_of_one_name_are_two_models(tmp_path: Path) -> None:
    first, second = named(tmp_path / "1", "a"), named(tmp_path / "2", "a")

    async def find(name: str) -> LoadOrder | None:
        return LoadOrder(spec={"a": first, "2/a": second}[name])

    async def scene(engine: Engine, machine: Machine) -> None:
        for name in ("a", "2/a", "a", "2/a"):
            assert (await engine.serving(name, find)).spec.path == {"a": first, "2/a": second}[name].path

    play(scene)


def test_a_model_whose_workers_died_for_good_is_loaded_again_and_in_nobodys_way(tmp_path: Path) -> None:
    find = finds(tmp_path, "a", "b")

    async def scene(engine: Engine, machine: Machine) -> None:
        await answered(engine, "a", find)
        machine.alive[0].die(WorkerExit(signal="SIGKILL"))
        await until(lambda: states(engine)["a"] == "failed")
        assert await answered(engine, "b", find) == "b"
        await asyncio.sleep(6)
        assert await answered(engine, "a", find) == "a"

    play(scene, room=1, max_models=1, max_deaths=1)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_for_in_any_order_everything_is_answered(tmp_path: Path, seed: int) -> None:
    find = finds(tmp_path, *"abcde")

    async def scene(engine: Engine, machine: Machine) -> None:
        random = Random(seed)

        async def client() -> None:
            for _ in range(random.randint(3, 12)):
                await asyncio.sleep(random.choice((0, 0.1, 3, 20)))
                name = random.choice("aaabbcde")
                prepares_s = random.choice((0.0, 0.0, 0.2, 1.5))
                assert await answered(engine, name, find, random.randint(1, 20), prepares_s) == name

        await asyncio.gather(*(client() for _ in range(random.randint(1, 8))))

    play(scene, room=Random(seed).randint(1, 3), seed=seed)
