"""Several models at once, one replaced by another, one that sleeps: over fake backends in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.config import AdapterSpec, ModelSpec
from engine.engine import Engine, GenerateRequest
from engine.errors import EngineBusy, InsufficientMemory, InvalidRequest, LoadCancelled, ModelNotFound, NoModelLoaded
from engine.snapshot import DeviceReading, ModelReading
from engine.text.tokenizer import Tokenizer
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, StillProbe, ask, read, started, until
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
        held = 0 if self.engine is None else len(self.engine._fleet.roster.replicas())
        free = KEPT_FREE_BYTES + max(0, self._models - held) * WORKER_BYTES
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]


def named(folder: Path, name: str, **fields: object) -> ModelSpec:
    """The fake model under another name, in a folder of its own."""
    return msgspec.structs.replace(fake_spec(folder / name, **fields), name=name)


def models(engine: Engine) -> dict[str, ModelReading]:
    """What is shown of each model, by name; the newest of those that share one."""
    return {model.name: model for model in engine.snapshot().models}


def states(engine: Engine) -> dict[str, str]:
    """Each model's state."""
    return {name: model.status.state for name, model in models(engine).items()}


def encode(prompt: str) -> GenerateRequest:
    """A request that names no model and may go to any."""

    def again(tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=False)

    return msgspec.structs.replace(ask(prompt), encode=again)


@asynccontextmanager
async def room_for(number: int, backends: Backends | None = None, **settings: object) -> AsyncIterator[Engine]:
    """A started engine on a machine with room for so many workers."""
    probe = Room(number)
    async with started(backends, probe=probe, **settings) as engine:
        probe.engine = engine
        yield engine


# -- two at once --------------------------------------------------------------------------------------------------


async def test_two_models_answer_by_their_names_each_with_its_own_knobs(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True, workers=2, max_prompts=3)
        assert states(engine) == {"a": "ready", "b": "ready"}
        for name in ("a", "b"):
            answer = await read(engine.submit(ask("x", model=name)))
            assert answer.text == expected_text(b"x", 8)
            row = engine.snapshot().requests[0]
            owner = next(worker for worker in engine.snapshot().workers if worker.model == name)
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
        await until(lambda: len(engine.snapshot().workers) == 4)
        assert {worker.id for worker in engine.snapshot().workers} == {"w0", "w1", "w2", "w3"}


# -- one for another ----------------------------------------------------------------------------------------------


async def test_where_both_fit_the_old_model_serves_until_the_new_one_is_ready(tmp_path: Path) -> None:
    loading_gate = Gate()
    async with room_for(2, Backends(FakeBackend(), FakeBackend(load_gate=loading_gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await asyncio.to_thread(loading_gate.wait_until_reached)
        assert states(engine) == {"a": "ready", "b": "loading"}
        assert (await read(engine.submit(ask("x")))).text == expected_text(b"x", 8)
        loading_gate.open()
        await loading
        assert (await engine.serving()).name == "b"
        await until(lambda: states(engine) == {"b": "ready"})


async def test_where_only_one_fits_the_old_model_goes_first(tmp_path: Path) -> None:
    gate, first, second = Gate(), FakeBackend(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first, second)) as engine:
        await engine.load(named(tmp_path, "a"))
        running = engine.submit(ask("x"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine)["a"] == "draining")
        assert second.loaded is None
        gate.open()
        assert (await read(running)).text == expected_text(b"x", 8)
        await loading
        assert (states(engine), first.loaded) == ({"b": "ready"}, None)


async def test_what_waits_is_kept_for_the_new_model_but_what_names_the_old_one_is_its_own(tmp_path: Path) -> None:
    gate, first, second = Gate(), FakeBackend(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first, second), max_prompts=1) as engine:
        await engine.load(named(tmp_path, "a"))
        running = engine.submit(encode("runs"))
        await until(lambda: first.submitted)
        anywhere = engine.submit(encode("any"))
        own = engine.submit(ask("own", model="a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine)["a"] == "draining")
        assert engine.snapshot().queued == 2
        gate.open()
        for stream, prompt in ((running, b"runs"), (own, b"own"), (anywhere, b"any")):
            assert (await read(stream)).text == expected_text(prompt, 8)
        await loading
        assert [bytes(request.prompt_ids) for request in first.submitted] == [b"runs", b"own"]
        assert [bytes(request.prompt_ids) for request in second.submitted] == [b"any"]


async def test_a_request_that_waits_for_a_switch_gets_the_new_model(tmp_path: Path) -> None:
    gate, first = Gate(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first)) as engine:
        await engine.load(named(tmp_path, "a"))
        running = engine.submit(ask("x"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine)["a"] == "draining")
        asked, by_name = (asyncio.create_task(engine.serving(name)) for name in ("", "a"))
        gate.open()
        await loading
        assert (await asked).name == "b"
        with pytest.raises(ModelNotFound, match="available: b"):
            await by_name
        assert (await read(running)).last.finish == "length"


async def test_a_model_that_cannot_fit_is_refused_with_the_numbers_and_changes_nothing(tmp_path: Path) -> None:
    async with room_for(1) as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(InsufficientMemory, match="short by") as refused:
            await engine.load(named(tmp_path, "b", kv_cache_tokens=10**9))
        assert refused.value.details["short_bytes"]
        assert states(engine) == {"a": "ready"}
        assert (await read(engine.submit(ask("x")))).text == expected_text(b"x", 8)


async def test_a_load_that_fails_beside_the_old_model_leaves_it_serving(tmp_path: Path) -> None:
    async with started(Backends(FakeBackend(), FakeBackend(load_error=RuntimeError("no")))) as engine:
        await engine.load(named(tmp_path, "a"))
        with pytest.raises(Exception, match="no"):
            await engine.load(named(tmp_path, "b"))
        assert states(engine) == {"a": "ready"}
        assert (await read(engine.submit(ask("x")))).last.finish == "length"


async def test_a_switch_cancelled_while_the_old_model_drains_keeps_it_and_what_waits(tmp_path: Path) -> None:
    gate, first = Gate(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first), max_prompts=1) as engine:
        await engine.load(named(tmp_path, "a"))
        running, waiting = engine.submit(encode("x")), engine.submit(encode("y"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await until(lambda: states(engine)["a"] == "draining")
        await engine.cancel_load()
        with pytest.raises(LoadCancelled):
            await loading
        assert states(engine) == {"a": "ready"}
        gate.open()
        assert (await read(running)).text == expected_text(b"x", 8)
        assert (await read(waiting)).text == expected_text(b"y", 8)


async def test_a_second_load_is_refused_while_one_runs(tmp_path: Path) -> None:
    gate = Gate()
    async with started(Backends(FakeBackend(), FakeBackend(load_gate=gate))) as engine:
        await engine.load(named(tmp_path, "a"))
        loading = asyncio.create_task(engine.load(named(tmp_path, "b")))
        await asyncio.to_thread(gate.wait_until_reached)
        with pytest.raises(EngineBusy, match="b is loading"):
            await engine.load(named(tmp_path, "c"))
        gate.open()
        await loading


# -- the same model with other settings ---------------------------------------------------------------------------


async def test_other_settings_of_the_same_model_take_over_what_waits_and_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.switch.SWITCH_DRAIN_S", 0.0)
    gate, first, second = Gate(), FakeBackend(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first, second), max_prompts=1) as engine:
        await engine.load(named(tmp_path, "a"))
        running, waiting = engine.submit(ask("x", model="a")), engine.submit(ask("y"))
        gate.allow(3)
        await until(lambda: first.steps >= 3)
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=100)))
        gate.open()
        await loading
        assert (await read(running)).text == expected_text(b"x", 8)
        assert (await read(waiting)).text == expected_text(b"y", 8)
        assert models(engine)["a"].status.model is not None
        assert models(engine)["a"].status.model.max_model_len == 100


async def test_what_no_longer_fits_the_new_context_ends_with_the_numbers(tmp_path: Path) -> None:
    gate, first = Gate(), FakeBackend()
    first.gate = gate
    async with room_for(1, Backends(first), max_prompts=1) as engine:
        await engine.load(named(tmp_path, "a"))
        engine.submit(ask("x"))
        waiting = engine.submit(ask("long" * 10, max_tokens=None))
        cut = engine.submit(ask("short", max_tokens=None))
        loading = asyncio.create_task(engine.load(named(tmp_path, "a", max_model_len=20)))
        await until(lambda: engine.snapshot().models[0].status.state == "draining")
        gate.open()
        await loading
        refused = await read(waiting)
        assert refused.last.error is not None
        assert refused.last.error.details == {"param": "prompt", "prompt_tokens": 40, "limit": 20}
        assert len((await read(cut)).token_ids) == 15


# -- sleep --------------------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_asks_gives_its_memory_back_and_comes_when_asked(tmp_path: Path) -> None:
    first = FakeBackend()
    async with started(Backends(first)) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        assert (first.loaded, engine.snapshot().workers) == (None, ())
        with pytest.raises(NoModelLoaded, match="sleeps"):
            engine.submit(ask("x"))
        await engine.reconfigure(idle_unload_s=60.0)
        serving, again = await asyncio.gather(engine.serving(), engine.serving("a"))
        assert serving.key == again.key
        assert (await read(engine.submit(ask("x", key=serving.key)))).text == expected_text(b"x", 8)


async def test_a_model_at_work_does_not_fall_asleep(tmp_path: Path) -> None:
    gate, backend = Gate(), FakeBackend()
    backend.gate = gate
    async with started(Backends(backend)) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        stream = engine.submit(ask("x"))
        engine._fleet.tick(asyncio.get_running_loop().time() + 100)
        assert states(engine) == {"a": "ready"}
        gate.open()
        assert (await read(stream)).last.finish == "length"


async def test_a_model_that_cannot_wake_says_why_and_sleeps_on(tmp_path: Path) -> None:
    async with room_for(1, Backends()) as engine:
        await engine.load(named(tmp_path, "a"), idle_unload_s=0.001)
        await until(lambda: states(engine) == {"a": "idle"})
        await engine.load(named(tmp_path, "b"), beside=True, idle_unload_s=0.0)
        with pytest.raises(InsufficientMemory):
            await engine.serving("a")
        assert states(engine) == {"a": "idle", "b": "ready"}


# -- adapters -----------------------------------------------------------------------------------------------------


async def test_an_adapter_is_attached_to_every_worker_and_named_as_a_model(tmp_path: Path) -> None:
    async with started(num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        await until(lambda: [worker.state for worker in engine.snapshot().workers] == ["ready", "ready"])
        await engine.attach(AdapterSpec(name="polite", path=tmp_path))
        assert [(each.name, each.workers) for each in models(engine)["a"].adapters] == [("polite", 2)]
        serving = await engine.serving("polite")
        assert (serving.name, serving.adapter) == ("a", "polite")
        await engine.reconfigure(workers=3)
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
        assert backend.submitted[-1].adapter == "polite"


async def test_the_workers_of_all_models_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.pool.usable_cores", lambda: 8)

    def threads() -> list[int]:
        return [replica._load.threads for replica in engine._fleet.roster.replicas()]

    async with started(num_workers=2) as engine:
        await engine.load(named(tmp_path, "a"))
        assert threads() == [4, 4]
        await engine.load(named(tmp_path, "b"), beside=True)
        assert threads() == [2, 2, 2, 2]
        await engine.unload("a")
        assert threads() == [4, 4]
