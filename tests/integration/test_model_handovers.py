"""What becomes of requests, adapters and names while models are replaced, cancelled and unloaded: on virtual time, over
workers that are played, so that half a minute of draining takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from engine.config import AdapterSpec, EngineConfig
from engine.engine import Engine, GenerateRequest, RequestStream
from engine.errors import EngineBusy, InsufficientMemory, InvalidRequest, LoadCancelled, NoModelLoaded
from engine.models.deployment import Deployment
from engine.models.handover import Handover
from engine.text.tokenizer import Tokenizer
from engine.worker_process.hosts import WorkerExit
from engine.workers.pool import Pool
from tests.fakes.engines import ask, read, until
from tests.fakes.model import fake_spec
from tests.fakes.scripted_workers import Machine, answer_of
from tests.fakes.several import encode, models, named, states
from tests.fakes.virtual_time import VirtualLoop, run

Scene = Callable[[Engine, Machine], Coroutine[Any, Any, None]]


def play(scene: Scene, *, room: int = 3, step_s: float = 1.0, seed: int = 0, **settings: object) -> None:
    """Play a scene on an engine with room for so many workers, and close it."""
    random = Random(seed)

    async def main(loop: VirtualLoop) -> None:
        machine = Machine(random, room)
        machine.step_s = step_s
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


async def answered(stream: RequestStream, request: GenerateRequest, adapter: str = "") -> int:
    """Read an answer to its end, which is no error and all of which is right; how many tokens it has."""
    answer = await read(stream, patience_s=1e4)
    assert answer.last.error is None, answer.last.error.message
    assert answer.token_ids == answer_of(request.prompt_ids, len(answer.token_ids), adapter)
    assert answer.last.finish == "length"
    return len(answer.token_ids)


async def began(engine: Engine, request: GenerateRequest, tokens: int = 1) -> RequestStream:
    """Submit a request and wait until so many tokens of its answer have come."""
    stream = engine.submit(request)
    await until(lambda: len(engine._tracker.live[stream.request_id].generated) >= tokens)
    return stream


def first_of(engine: Engine) -> Deployment:
    """The model that was loaded first."""
    return next(iter(engine._models))


# -- requests that move to other settings of their model ----------------------------------------------------------


@pytest.mark.parametrize("prompt", ["x", "longer than ten"])
def test_an_answer_longer_than_the_new_context_is_complete_when_it_moves(tmp_path: Path, prompt: str) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = ask(prompt, max_tokens=100)
        stream = await began(engine, request, 12)
        await engine.load(named(tmp_path, "a", max_model_len=10))
        assert 12 <= await answered(stream, request) < 60

    play(scene)


def test_what_moves_from_a_model_whose_successor_has_left_waits_for_the_one_after(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = ask("x", max_tokens=100)
        stream = await began(engine, request)
        await engine.load(named(tmp_path, "a", max_model_len=200))
        machine.stuck = {"a"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=300)))
        await asyncio.sleep(40)
        assert [model.status.state for model in engine.publish().models] == ["loading"]
        assert engine.publish().queued == 1
        machine.stuck = set()
        await loading
        assert await answered(stream, request) == 100

    play(scene, room=2)


def test_a_model_whose_handover_fails_unforeseen_is_gone_and_its_requests_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(self: Handover) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(Handover, "expire", surprise)

    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        stream = await began(engine, ask("x", max_tokens=100))
        await engine.load(named(tmp_path, "a", max_model_len=200))
        await asyncio.sleep(40)
        assert states(engine) == {"a": "ready"}
        assert len(engine.publish().models) == 1
        await read(stream, patience_s=1e4)

    play(scene)


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("then", ["attach", "detach"])
def test_a_version_of_an_adapter_moves_with_the_requests_that_use_it(tmp_path: Path, room: int, then: str) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        request, other = ask("x", max_tokens=100, adapter="polite"), ask("y", max_tokens=2)
        stream = await began(engine, request)
        key = engine._tracker.live[stream.request_id].adapter_key
        machine.stuck = {"a"} if room == 1 else set()
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=200)))
        await until(lambda: len(engine.publish().models) == 2 and (room == 1 or loading.done()))
        if then == "detach":
            await engine.detach("polite", "a")
        elif room == 2:
            await engine.attach(AdapterSpec(name="polite", path=tmp_path / "other"), "a")
        if room == 2:
            await answered(engine.submit(other), other)
        await asyncio.sleep(40)
        machine.stuck = set()
        await loading
        assert await answered(stream, request, key) == 100

    if (room, then) != (1, "detach"):  # a model that drains first has no name any more
        play(scene, room=room)


def test_a_version_of_an_adapter_is_kept_for_requests_that_wait_for_another_model(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        requests = ask("x", max_tokens=5), ask("y", max_tokens=30)
        running = [await began(engine, request) for request in requests]
        request = ask("z", adapter="polite")
        waiting = engine.submit(request)
        key = engine._tracker.live[waiting.request_id].adapter_key
        await engine.detach("polite")
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=200)))
        await until(lambda: engine._models.num_queued == 1 and first_of(engine).state == "draining")
        await answered(running[0], requests[0])
        await engine.cancel_load()
        with pytest.raises(LoadCancelled):
            await loading
        await answered(running[1], requests[1])
        await answered(waiting, request, key)

    play(scene, room=1, max_prompts=2)


def test_a_model_that_requests_are_to_move_to_does_not_fall_asleep(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = ask("x", max_tokens=100)
        stream = await began(engine, request)
        await engine.load(named(tmp_path, "a", max_model_len=200), idle_unload_s=2.0)
        assert await answered(stream, request) == 100
        await until(lambda: states(engine) == {"a": "idle"})

    play(scene)


def test_what_loses_its_last_worker_goes_on_with_the_model_that_takes_over(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        machine.stuck = {"a"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=200)))
        request = ask("x", max_tokens=20)
        stream = await began(engine, request, 3)
        machine.alive[0].die(WorkerExit(signal="SIGKILL"))
        await until(lambda: first_of(engine).state == "failed")
        machine.stuck = set()
        await loading
        assert await answered(stream, request) == 20

    play(scene, max_deaths=1)


def test_a_request_that_cannot_be_made_for_the_new_model_ends_alone(tmp_path: Path) -> None:
    async def surprise(tokenizer: object) -> list[int]:
        raise ZeroDivisionError("surprise")

    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = encode("waits")
        running, broken, waiting = map(engine.submit, (ask("runs"), ask("broken", encode=surprise), request))
        await engine.load(named(tmp_path, "b"))
        assert (await read(running)).last.finish == "length"
        await answered(waiting, request)
        error = (await read(broken)).last.error
        assert error is not None
        assert error.message == "the request could not be moved to b: ZeroDivisionError: surprise"

    play(scene, room=1, max_prompts=1)


@pytest.mark.parametrize(("successor", "shared"), [("a", 3), ("b", 0)])
def test_a_prompt_made_anew_shares_no_system_prompt(tmp_path: Path, successor: str, shared: int) -> None:
    """How many tokens that is was said of the tokens of the first model."""

    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = msgspec.structs.replace(encode("waits"), tenant="alice", shared_tokens=3)
        running, waiting = engine.submit(ask("runs")), engine.submit(request)
        moved = engine._tracker.live[waiting.request_id]
        await engine.load(named(tmp_path, successor, max_model_len=500))
        assert await answered(waiting, request) == 8
        assert (moved.cache_scope, moved.shared_tokens) == ("5:alice", shared)
        assert (await read(running)).last.finish == "length"

    play(scene, room=1, max_prompts=1, prefix_sharing="system")


# -- prompts that take a while to be made for the new model -----------------------------------------------------------


def slowly(prompt: str, seconds: float) -> GenerateRequest:
    """A request for any model, whose prompt takes so long to be made again."""
    request = encode(prompt)
    assert request.encode is not None
    again = request.encode

    async def later(tokenizer: Tokenizer) -> list[int]:
        await asyncio.sleep(seconds)
        return await again(tokenizer)

    return msgspec.structs.replace(request, encode=later)


def test_a_prompt_that_takes_long_to_be_made_anew_holds_nobody_up(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        slow, quick = slowly("slow", 60), encode("quick")
        running = engine.submit(ask("runs"))
        waiting = engine.submit(slow), engine.submit(quick)
        await engine.load(named(tmp_path, "b"))
        assert await answered(waiting[1], quick) == 8
        assert engine.publish().queued == 1
        assert await answered(waiting[0], slow) == 8
        assert (await read(running)).last.finish == "length"

    play(scene, room=1, max_prompts=1)


def test_a_request_that_is_cancelled_while_its_prompt_is_made_anew_is_gone(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        running, waiting = engine.submit(ask("runs")), engine.submit(slowly("slow", 1e6))
        await engine.load(named(tmp_path, "b"))
        assert engine.cancel(waiting.request_id)
        assert (await read(waiting)).last.finish == "cancelled"
        assert (await read(running)).last.finish == "length"
        await until(lambda: first_of(engine).model_queue.idle)

    play(scene, room=1, max_prompts=1)


def test_a_request_whose_prompt_is_made_anew_moves_on_with_what_replaces_that_model(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        request = slowly("slow", 50)
        running, waiting = engine.submit(ask("runs")), engine.submit(request)
        await engine.load(named(tmp_path, "b"))
        await engine.load(named(tmp_path, "c"))
        assert await answered(waiting, request) == 8
        assert first_of(engine).spec.name == "c"
        assert (await read(running)).last.finish == "length"

    play(scene, room=1, max_prompts=1)


def test_an_unload_ends_a_request_whose_prompt_is_made_anew(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        running, waiting = engine.submit(ask("runs")), engine.submit(slowly("slow", 1e6))
        await engine.load(named(tmp_path, "b"))
        await engine.unload()
        error = (await read(waiting)).last.error
        assert error is not None and error.code == "no_model_loaded"
        assert (await read(running)).last.finish == "length"

    play(scene, room=1, max_prompts=1)


def test_a_prompt_made_for_a_model_that_was_replaced_before_it_came_is_made_anew(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        key = first_of(engine).key
        await engine.load(named(tmp_path, "b"))
        await until(lambda: list(states(engine)) == ["b"])
        request = msgspec.structs.replace(slowly("late", 10), key=key, prompt_ids=[255])
        assert (await read(engine.submit(request), patience_s=1e4)).token_ids == answer_of(list(b"late"), 8)
        too_long = msgspec.structs.replace(encode("x" * 5000), key=key, prompt_ids=[255])
        error = (await read(engine.submit(too_long), patience_s=1e4)).last.error
        assert error is not None and error.code == "context_length_exceeded"

    play(scene, room=1)


# -- adapters of models that move meanwhile -----------------------------------------------------------------------


def test_an_adapter_attached_as_its_model_is_replaced_by_itself_is_the_new_ones(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        machine.stuck = {"polite"}
        attaching = asyncio.create_task(engine.attach(AdapterSpec(name="polite", path=tmp_path)))
        await asyncio.sleep(2)
        await began(engine, ask("x", max_tokens=10))
        await engine.load(named(tmp_path, "a", max_model_len=200))
        machine.stuck = set()
        await attaching
        assert (await engine.serving("polite")).adapter == "polite"
        await until(lambda: [each.workers for each in models(engine)["a"].adapters] == [1])

    play(scene)


def test_an_adapter_of_a_model_that_was_unloaded_meanwhile_is_not_attached(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        machine.stuck = {"polite"}
        attaching = asyncio.create_task(engine.attach(AdapterSpec(name="polite", path=tmp_path)))
        await asyncio.sleep(2)
        await engine.unload("a")
        with pytest.raises(NoModelLoaded, match="a is being unloaded"):
            await attaching

    play(scene)


def test_an_adapter_stays_for_a_request_whose_prompt_is_being_made_again_as_its_model_is_replaced(
    tmp_path: Path,
) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        replaced = first_of(engine).key
        await engine.load(named(tmp_path, "a", max_model_len=3000))
        await until(lambda: [each.key for each in engine._models] != [replaced] and len(engine._models) == 1)
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        request, other = encode("slow"), ask("y")
        stream = engine.submit(
            msgspec.structs.replace(slowly("slow", 60), key=replaced, model="a", adapter="polite", prompt_ids=[255])
        )
        key = engine._tracker.live[stream.request_id].adapter_key
        machine.stuck = {"a"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=2000)))
        await asyncio.sleep(5)
        await engine.detach("polite", "a")
        machine.stuck = set()
        await loading
        await answered(engine.submit(other), other)
        assert await answered(stream, request, key) == 8

    play(scene)


def test_an_adapter_stays_for_a_request_that_moves_behind_one_that_is_too_long_to(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        running = await began(engine, ask("runs", max_tokens=3000))
        request = ask("z", adapter="polite")
        too_long, waiting = engine.submit(ask("x" * 300)), engine.submit(request)
        key = engine._tracker.live[waiting.request_id].adapter_key
        machine.stuck = {"a"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=200)))
        await asyncio.sleep(5)
        await engine.detach("polite", "a")
        machine.stuck = set()
        await loading
        error = (await read(too_long)).last.error
        assert error is not None and error.code == "context_length_exceeded"
        assert await answered(waiting, request, key) == 8
        assert (await read(running, patience_s=1e4)).last.finish == "length"

    play(scene, max_prompts=1)


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("name", ["", "a"])
def test_unloading_a_name_unloads_all_that_has_it(tmp_path: Path, room: int, name: str) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        stream = await began(engine, ask("x", max_tokens=100))
        machine.stuck = {"a"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=200)))
        await asyncio.sleep(5)
        await engine.unload(name, drain_s=1.0)
        assert engine.publish().models == ()
        with pytest.raises(LoadCancelled):
            await loading
        assert (await read(stream)).last.finish == "error"

    play(scene, room=room)


def test_unloading_a_model_cancels_the_load_of_another_one_in_its_place(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        machine.stuck = {"b"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine) == {"a": "ready", "b": "loading"})
        await engine.unload("a")
        assert engine.publish().models == ()
        with pytest.raises(LoadCancelled):
            await loading

    play(scene)


def test_unloading_a_name_ends_what_still_drains_under_it(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        stream = await began(engine, ask("x", max_tokens=100))
        await engine.load(named(tmp_path, "a", max_model_len=200))
        await engine.unload("a", drain_s=0.0)
        assert engine.publish().models == ()
        error = (await read(stream)).last.error
        assert error is not None and error.message == "the model was unloaded before the answer was complete"

    play(scene)


def test_unloading_a_model_leaves_the_loads_of_others_alone(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"), idle_unload_s=1.0)
        await engine.load(named(tmp_path, "b"), beside=True)
        await until(lambda: states(engine) == {"a": "idle", "b": "ready"})
        machine.stuck = {"a"}
        waking = asyncio.create_task(engine.serving("a"))
        await until(lambda: states(engine)["a"] == "loading")
        await engine.unload("b")
        machine.stuck = set()
        assert (await waking).name == "a"

    play(scene)


def test_a_load_is_refused_until_one_that_was_cancelled_is_over(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        stream = await began(engine, ask("x", max_tokens=100))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine).get("a") == "draining")
        cancelling = asyncio.create_task(engine.cancel_load())
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="the load of b is being cancelled"):
            await engine.load(named(tmp_path, "a", max_model_len=200))
        await cancelling
        await engine.load(named(tmp_path, "a", max_model_len=200))
        await until(lambda: [model.name for model in engine.publish().models] == ["a"])
        assert (await read(stream, patience_s=1e4)).last.error is None
        await asyncio.gather(loading, return_exceptions=True)

    play(scene, room=1)


def test_a_name_is_taken_by_a_model_whose_workers_are_dead_too(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        machine.alive[0].die(WorkerExit(signal="SIGKILL"))
        await until(lambda: states(engine) == {"a": "failed"})
        with pytest.raises(InvalidRequest, match="a model named a exists"):
            await engine.load(named(tmp_path, "a"), beside=True)
        await engine.load(named(tmp_path, "a"))
        assert [model.status.state for model in engine.publish().models] == ["ready"]

    play(scene, max_deaths=1)


# -- memory that others still hold --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 4])
def test_a_worker_that_was_loaded_a_moment_ago_counts_before_another_is_placed(tmp_path: Path, seed: int) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(InsufficientMemory):
            await engine.reconfigure(num_workers=2)
        assert engine.publish().target_workers == 1

    play(scene, room=1, seed=seed)


def test_more_workers_than_will_fit_are_refused_while_a_model_waits_for_room(tmp_path: Path) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        stream = await began(engine, ask("x", max_tokens=20))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine).get("a") == "draining")
        with pytest.raises(InsufficientMemory):
            await engine.reconfigure(model="b", num_workers=2)
        await loading
        assert states(engine) == {"b": "ready"}
        assert (await read(stream)).last.finish == "length"

    play(scene, room=1)


# -- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain_s", [0.0, 3.0])
def test_closing_ends_in_time_what_comes_back_from_a_load_that_it_cancels(tmp_path: Path, drain_s: float) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        streams = [await began(engine, ask("x", max_tokens=9)), engine.submit(encode("y" * 50))]
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: engine._models.num_queued == 1 and first_of(engine).state == "draining")
        before = asyncio.get_running_loop().time()
        await engine.close(drain_s)
        assert asyncio.get_running_loop().time() - before < drain_s + 2
        error = (await read(streams[1])).last.error
        assert error is not None and error.code == "engine_closed"
        await asyncio.gather(loading, return_exceptions=True)

    play(scene, room=1, max_prompts=1)


def test_what_waits_for_a_model_that_close_keeps_from_coming_learns_that_the_engine_was_shut_down(
    tmp_path: Path,
) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(named(tmp_path, "a"))
        await began(engine, ask("x", max_tokens=2))
        waiting = engine.submit(encode("y"))
        machine.stuck = {"b"}
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine) == {"b": "loading"})
        await engine.close(5.0)
        error = (await read(waiting)).last.error
        assert error is not None and error.code == "engine_closed"
        with pytest.raises(LoadCancelled):
            await loading

    play(scene, room=1, max_prompts=1)


def test_an_unload_that_fails_for_no_known_reason_fails_the_model_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(engine: Engine, machine: Machine) -> None:
        await engine.load(fake_spec(tmp_path))
        stop, failures = Pool.stop, iter([ZeroDivisionError("surprise")])

        async def stop_or_fail(self: Pool) -> None:
            for failure in failures:
                raise failure
            await stop(self)

        monkeypatch.setattr(Pool, "stop", stop_or_fail)
        async with asyncio.timeout(100):
            await engine.unload()
        assert engine.publish().models == ()

    play(scene)
