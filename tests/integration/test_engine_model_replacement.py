"""One model put in the place of another, and none of the requests lost: over fake backends in threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from engine.devices import simulated_readings
from engine.errors import EngineBusy, InsufficientMemory, LoadCancelled, ModelNotFound
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, StillProbe, ask, read, started, until
from tests.fakes.several import encode, models, named, room_for, states

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


async def test_workers_loaded_in_place_lie_as_they_would_alone(tmp_path: Path) -> None:
    probe = StillProbe()
    probe.readings = (*simulated_readings((8.0, 8.0)), *probe.readings)
    async with started(probe=probe, num_workers=3) as engine:
        places = []
        for name in ("a", "b", "b"):
            await engine.load(named(tmp_path, name))
            await until(
                lambda name=name: (
                    states(engine) == {name: "ready"}
                    and [worker.state for worker in engine.publish().workers] == ["ready"] * 3
                )
            )
            workers = engine.publish().workers
            places.append(Counter(share.device for worker in workers for share in worker.planned))
        assert places == [{"sim:0": 2, "sim:1": 1}] * 3


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
        assert engine.publish().queued == 2
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
    monkeypatch.setattr("engine.models.handover.DRAIN_S", 0.0)
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
        await until(lambda: engine.publish().models[0].status.state == "draining")
        gate.open()
        await loading
        refused = await read(waiting)
        assert refused.last.error is not None
        details = refused.last.error.details
        assert (details["prompt_tokens"], details["max_model_len"]) == (40, 20)
        assert len((await read(cut)).token_ids) == 15
