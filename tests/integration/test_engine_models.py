"""Several models at once, one that sleeps, and adapters: over fake backends in threads."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from engine.config import AdapterSpec, SamplingParams
from engine.errors import InsufficientMemory, InvalidRequest, ModelNotFound, NoModelLoaded
from engine.models import deployment
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload
from engine.placement.plan import plan
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.engines import Backends, DyingBackend, StillProbe, ask, read, started, until
from tests.fakes.renderers import renderers
from tests.fakes.several import models, named, room_for, states

# -- one after another --------------------------------------------------------------------------------------------


async def test_the_process_that_renders_a_models_chat_template_ends_with_the_model(tmp_path: Path) -> None:
    before = renderers()
    gc.disable()  # a busy server looks for cycles among what it does not use any more once an hour, if at all
    try:
        async with started() as engine:
            for name in ("a", "b", "a"):
                await engine.load(named(tmp_path, name))
                chat = [{"role": "user", "content": "hello"}]
                assert "hello" in await (await engine.serving(name)).tokenizer.apply_chat_template(chat)
                await until(lambda: len(engine.publish().models) == 1)
                await until(lambda: len(renderers() - before) == 1)
            await engine.unload()
            assert renderers() <= before
    finally:
        gc.enable()


async def test_reading_the_snapshot_builds_none_and_models_are_read_without_one(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        snapshot = engine.publish()
        assert engine.snapshot() is snapshot
        await engine.load(named(tmp_path, "b"), beside=True)
        assert [model.name for model in engine.models()] == ["a", "b"]
        assert engine.publish() is engine.snapshot() is not snapshot


async def test_a_model_that_goes_while_its_chat_template_is_compiled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_WARM_UP_S", 0.0)
    before = renderers()
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await until(lambda: renderers() - before)
        await engine.unload()
        assert renderers() <= before


async def test_a_model_that_sleeps_has_no_process_of_its_chat_template_and_renders_when_it_is_woken(
    tmp_path: Path,
) -> None:
    before = renderers()
    chat = [{"role": "user", "content": "hello"}]
    async with started() as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        assert renderers() <= before
        assert "hello" in await (await engine.serving("a")).tokenizer.apply_chat_template(chat)
        await until(lambda: states(engine) == {"a": "idle"})
        assert renderers() <= before


async def test_a_model_on_a_library_has_its_own_default_of_max_prompts_until_someone_sets_it(tmp_path: Path) -> None:
    def prompts() -> dict[str, int]:
        return {name: model.max_prompts for name, model in models(engine).items()}

    async with started(max_prompts=64, library_prompts=32) as engine:
        await engine.load(named(tmp_path, "a", backend="torch"))
        await engine.load(named(tmp_path, "b", backend="exllamav2"), beside=True)
        await engine.load(named(tmp_path, "c", backend="exllamav2"), beside=True, max_prompts=64)
        assert prompts() == {"a": 64, "b": 32, "c": 64}
        await engine.reconfigure(model="b", num_workers=2)
        await engine.reconfigure(model="a", max_prompts=48)
        await engine.load(named(tmp_path, "d", backend="exllamav2"), beside=True)
        assert prompts() == {"a": 48, "b": 32, "c": 64, "d": 48}


async def test_a_default_of_max_prompts_that_does_not_fit_becomes_smaller_and_one_that_is_set_is_refused(
    tmp_path: Path,
) -> None:
    spec = named(tmp_path, "a", backend="torch")
    full = StillProbe(free_bytes=0).readings
    needed = [
        plan(1, read_facts(spec), full, spec, Workload(max_prompts=prompts)).device_plans[0].short_bytes
        for prompts in (1000, 4000)
    ]
    probe = StillProbe(free_bytes=sum(needed) // 2)
    async with started(probe=probe, max_prompts=4000, library_prompts=1000) as engine:
        with pytest.raises(InsufficientMemory):
            await engine.load(spec, max_prompts=4000)
        await engine.load(spec)
        assert models(engine)["a"].max_prompts == 1000
        assert engine.defaults.max_prompts == 4000


async def test_a_default_of_max_prompts_that_became_smaller_is_itself_again_once_it_fits(tmp_path: Path) -> None:
    spec = named(tmp_path, "a", backend="torch")
    full = StillProbe(free_bytes=0).readings
    needed = [
        plan(1, read_facts(spec), full, spec, Workload(max_prompts=prompts)).device_plans[0].short_bytes
        for prompts in (1000, 4000)
    ]
    probe = StillProbe(free_bytes=sum(needed) // 2)
    async with started(probe=probe, max_prompts=4000, library_prompts=1000) as engine:
        await engine.load(spec, idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        assert models(engine)["a"].max_prompts == 1000
        probe.readings = StillProbe(free_bytes=2 * needed[1]).readings
        await read(engine.submit(ask("x", key=(await engine.serving("a")).key)))
        assert models(engine)["a"].max_prompts == 4000


# -- two at once --------------------------------------------------------------------------------------------------


async def test_two_models_answer_by_their_names_each_with_its_own_knobs(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True, num_workers=2, max_prompts=3)
        assert states(engine) == {"a": "ready", "b": "ready"}
        for name in ("a", "b"):
            answer = await read(engine.submit(ask("x", model=name)))
            assert answer.text == expected_text(b"x", 8)
            row = engine.publish().requests[0]
            owner = next(worker for worker in engine.publish().workers if worker.model == name)
            assert row.model == name
            assert owner.model == name
        assert (models(engine)["b"].target_workers, models(engine)["b"].max_prompts) == (2, 3)
        assert (models(engine)["a"].target_workers, models(engine)["a"].max_prompts) == (1, 16)
        await engine.reconfigure(max_prompts=5, model="b")
        assert (models(engine)["b"].max_prompts, models(engine)["a"].max_prompts) == (5, 16)


async def test_a_request_without_a_name_goes_to_the_first_model(tmp_path: Path) -> None:
    first, second = FakeBackend(), FakeBackend()
    async with started(Backends(first, second)) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        await read(engine.submit(ask("x")))
        assert (len(first.submitted), len(second.submitted)) == (1, 0)


async def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        with pytest.raises(ModelNotFound, match="a, b"):
            await engine.serving("c")
        with pytest.raises(ModelNotFound, match="a, b"):
            engine.submit(ask("x", model="c"))


async def test_a_model_beside_another_needs_a_name_of_its_own(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(InvalidRequest, match="another name"):
            await engine.load(named(tmp_path, "a"), beside=True)


async def test_unloading_one_model_leaves_the_other_which_is_the_first_then(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        await engine.unload("a")
        assert states(engine) == {"b": "ready"}
        assert (await engine.serving()).name == "b"


async def test_worker_ids_are_unique_over_all_models(tmp_path: Path) -> None:
    async with started(num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        await until(lambda: len(engine.publish().workers) == 4)
        assert {worker.id for worker in engine.publish().workers} == {"w0", "w1", "w2", "w3"}


# -- sleep --------------------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_asks_gives_its_memory_back_and_comes_when_asked(tmp_path: Path) -> None:
    first = FakeBackend()
    async with started(Backends(first)) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        assert (first.loaded, engine.publish().workers) == (None, ())
        with pytest.raises(NoModelLoaded, match="is unloaded while idle"):
            engine.submit(ask("x"))
        await engine.reconfigure(idle_unload_s=60.0)
        serving, again = await asyncio.gather(engine.serving(), engine.serving("a"))
        assert serving.key == again.key
        assert (await read(engine.submit(ask("x", key=serving.key)))).text == expected_text(b"x", 8)


async def test_a_model_at_work_does_not_fall_asleep(tmp_path: Path) -> None:
    gate, backend = Gate(), FakeBackend()
    backend.gate = gate
    async with started(Backends(backend)) as engine:
        await engine.load(named(tmp_path, "a"))
        stream = engine.submit(ask("x"))
        await engine.reconfigure(idle_unload_s=0.001)
        engine._models.tick(asyncio.get_running_loop().time() + 100)
        assert states(engine) == {"a": "ready"}
        gate.open()
        assert (await read(stream)).last.finish == "length"


async def test_a_model_that_cannot_wake_says_why_and_sleeps_on(tmp_path: Path) -> None:
    async with room_for(1, Backends()) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        await engine.load(named(tmp_path, "b", pin=True), beside=True, idle_unload_s=0.0)
        with pytest.raises(InsufficientMemory):
            await engine.serving("a")
        assert states(engine) == {"a": "idle", "b": "ready"}


# -- adapters -----------------------------------------------------------------------------------------------------


async def test_an_adapter_is_attached_to_every_worker_and_named_as_a_model(tmp_path: Path) -> None:
    async with started(num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        await until(lambda: [worker.state for worker in engine.publish().workers] == ["ready", "ready"])
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        assert [(each.name, each.workers) for each in models(engine)["a"].adapters] == [("polite", 2)]
        serving = await engine.serving("polite")
        assert (serving.name, serving.adapter) == ("a", "polite")
        await engine.reconfigure(num_workers=3)
        await until(lambda: [each.workers for each in models(engine)["a"].adapters] == [3])
        await engine.detach("polite")
        assert models(engine)["a"].adapters == ()
        with pytest.raises(ModelNotFound, match="available: a"):
            await engine.serving("polite")


async def test_an_adapter_that_no_worker_can_take_changes_nothing(tmp_path: Path) -> None:
    class Refusing(FakeBackend):
        def attach(self, adapter: AdapterSpec) -> int:
            raise InvalidRequest(f"{adapter.name} does not fit", param="adapter")

    async with started(Backends(Refusing())) as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(InvalidRequest, match="does not fit"):
            await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        assert models(engine)["a"].adapters == ()


async def test_a_request_names_an_adapter_that_is_there(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with started(Backends(backend)) as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(ModelNotFound, match="no adapter"):
            engine.submit(ask("x", adapter="polite"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        await read(engine.submit(ask("x", adapter="polite")))
        assert list(backend.adapters) == [backend.submitted[-1].adapter]


async def test_an_adapter_replaced_under_its_name_changes_no_answer_under_way(tmp_path: Path) -> None:
    gate, later = Gate(), FakeBackend(gate=Gate())
    dying = DyingBackend(dies_at=48, gate=gate, reply=saying("." * 40 + "a bad end"))
    async with started(Backends(dying, later)) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path / "one"))
        [first] = dying.adapters
        params = SamplingParams(max_tokens=49, banned_strings=("bad",))
        old = engine.submit(ask("x", params=params, adapter="polite"))
        reading = asyncio.create_task(read(old))
        await asyncio.to_thread(gate.wait_until_reached)
        replacing = asyncio.create_task(engine.attach(AdapterSpec(name="polite", path=tmp_path / "two")))
        await until(lambda: any(len(each.desired.load.adapters) == 2 for each in engine._models.replicas()))
        while not replacing.done():  # the worker hears of it between two steps
            gate.allow()
            await asyncio.to_thread(gate.wait_until_reached)
        await replacing
        gate.open()
        await until(lambda: bool(later.submitted))
        [second] = later.adapters.keys() - {first}
        new = asyncio.create_task(read(engine.submit(ask("x", adapter="polite"))))
        assert later.gate is not None
        later.gate.open()
        await asyncio.gather(reading, new)
        assert len(dying.submitted) > 1
        assert {request.adapter for request in dying.submitted} == {first}
        assert [request.adapter for request in later.submitted][:1] == [first]
        assert [request.adapter for request in later.submitted][-1:] == [second]
        await until(lambda: list(later.adapters) == [second])


async def test_an_adapter_that_cannot_take_the_place_of_another_leaves_it_there(tmp_path: Path) -> None:
    class Choosy(FakeBackend):
        def attach(self, adapter: AdapterSpec) -> int:
            if adapter.scale != 1.0:
                raise InvalidRequest(f"{adapter.name} does not fit", param="adapter")
            return super().attach(adapter)

    backend = Choosy()
    async with started(Backends(backend)) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        first = list(backend.adapters)
        with pytest.raises(InvalidRequest, match="does not fit"):
            await engine.attach(AdapterSpec(name="polite", path=tmp_path, scale=2.0))
        await read(engine.submit(ask("x", adapter="polite")))
        assert [backend.submitted[-1].adapter] == first == list(backend.adapters)


async def test_the_workers_of_all_models_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.workers.desired_state.usable_cores", lambda: 8)

    def threads() -> list[int]:
        return [replica.desired.load.threads for replica in engine._models.replicas()]

    async with started(num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        assert threads() == [4, 4]
        await engine.load(named(tmp_path, "b"), beside=True)
        assert threads() == [2, 2, 2, 2]
        await engine.unload("a")
        assert threads() == [4, 4]


async def test_an_adapter_is_not_counted_on_a_worker_that_is_gone_until_it_has_it_again(tmp_path: Path) -> None:
    gate = Gate()
    again = FakeBackend(load_gate=gate)
    async with started(Backends(FakeBackend(), again)) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        await engine.restart_worker("w0")
        assert [each.workers for each in models(engine)["a"].adapters] == [0]
        gate.open()
        await until(lambda: [each.workers for each in models(engine)["a"].adapters] == [1])
