"""Tuning on a running engine: knobs are turned as it serves, users lose nothing, and everything is put back."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest

from console.link.tuning import TuneOrder
from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from console.tuning.autotune import traffic
from console.tuning.autotune.rig import KnobsChanged, LiveRig, setting_of
from console.tuning.autotune.space import Setting
from console.tuning.autotune.traffic import OWN_TOKENS, SOURCE, LoadGenerator, Mix, WindowMeter
from console.tuning.profiles import TunedProfiles, hardware_of
from engine.engine import Engine, GenerateRequest
from engine.errors import EngineBusy, InsufficientMemory, InvalidRequest, NoModelLoaded, WorkerFailed
from engine.metrics.slo import Slo
from engine.models.resolve import resolve_local
from engine.requests.stream import RequestStream
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, ask, read, serving, until
from tests.fakes.several import named, room_for, states

SHORT = Mix(source="", lengths=((8, 6), (4, 5)))
WINDOW_S, SETTLE_S = 0.04, 0.01
ENDLESS_S = 1000.0
KEPT = Slo(ttft_s=1e6)


def wait_for_first_tokens(patch: pytest.MonkeyPatch, count: int) -> None:
    """A window takes as long as it takes to see so many."""
    patch.setattr(traffic, "FEWEST_FIRST_TOKENS", count)
    patch.setattr(traffic, "LONGEST", 10**9)


def name_of(engine: Engine) -> str:
    return engine.publish().models[0].name


async def rig_of(engine: Engine, *, users: int | None = None) -> LiveRig:
    now = await engine.serving()
    load = LoadGenerator(engine, now.name, SHORT, KEPT, range(65, 90))
    return LiveRig(engine, now.name, load, setting_of(now.spec, now.config), users=users)


async def at(engine: Engine) -> Setting:
    now = await engine.serving()
    return setting_of(now.spec, now.config)


async def test_a_traces_questions_are_asked_but_for_their_first_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as engine:
        submit, sent = engine.submit, list[tuple[int, ...]]()

        def noted(request: GenerateRequest) -> RequestStream:
            sent.append(tuple(request.prompt_ids or ()))
            return submit(request)

        monkeypatch.setattr(engine, "submit", noted)
        words = tuple(range(65, 85))
        mix = Mix(source="", lengths=((len(words), 4),), prompts=(words,))
        now = await engine.serving()
        load = LoadGenerator(engine, now.name, mix, KEPT, range(65, 90))
        rig = LiveRig(engine, now.name, load, setting_of(now.spec, now.config))
        measuring = asyncio.ensure_future(rig.measure(ENDLESS_S, SETTLE_S))
        await until(lambda: len(sent) > 1)
        measuring.cancel()
        await rig.rest()
        assert {each[OWN_TOKENS:] for each in sent} == {words[OWN_TOKENS:]}
        assert len({each[:OWN_TOKENS] for each in sent}) > 1


async def test_knobs_are_turned_while_it_serves_and_a_window_sees_what_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as engine:
        rig = await rig_of(engine)
        wanted = msgspec.structs.replace(await at(engine), workers=2, max_prompts=3, step_tokens=64)
        await rig.use(wanted)
        assert await at(engine) == wanted
        asked_twice = wanted.places + 1  # some client has, so its first answer has ended
        wait_for_first_tokens(monkeypatch, asked_twice)
        sample = await rig.measure(WINDOW_S, SETTLE_S)
        assert len(engine.publish().workers) == 2
        assert sum(each.tokens for each in sample.slices) > 0
        assert sum(len(each.ttft_s) for each in sample.slices) >= asked_twice
        assert sum(each.met_slo for each in sample.slices) == sum(each.judged for each in sample.slices) > 0
        await rig.rest()
        await until(lambda: not engine.publish().running and not engine.publish().queued)


async def test_it_asks_with_as_many_clients_as_there_are_places_or_as_it_was_given(tmp_path: Path) -> None:
    for users, expected in ((None, 3), (2, 2)):
        gate = Gate()
        async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=3) as engine:
            rig = await rig_of(engine, users=users)
            measuring = asyncio.ensure_future(rig.measure(ENDLESS_S, SETTLE_S))
            await until(lambda: len(engine.publish().requests) == expected)  # noqa: B023
            assert {row.source for row in engine.publish().requests} == {SOURCE}
            measuring.cancel()
            gate.open()
            await rig.rest()


async def test_a_users_request_outlives_the_change_of_cache_bits(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        rig = await rig_of(engine)
        answer = asyncio.ensure_future(read(engine.submit(ask("user", max_tokens=12))))
        await until(lambda: engine.publish().running)
        turning = asyncio.ensure_future(rig.use(msgspec.structs.replace(await at(engine), cache_bits=8)))
        await asyncio.sleep(0)
        gate.open()
        await turning
        assert (await answer).text == expected_text(b"user", 12)
        assert (await engine.serving()).spec.cache_bits == 8


# -- what others do, and loads that fail --------------------------------------------------------------------------


def no_memory() -> FakeBackend:
    return FakeBackend(load_error=InsufficientMemory("CUDA out of memory"))


async def test_after_a_load_that_failed_on_a_full_device_the_model_is_loaded_again(tmp_path: Path) -> None:
    async with room_for(1, Backends(FakeBackend(), no_memory())) as engine:
        await engine.load(named(tmp_path, "a"))
        rig, before = await rig_of(engine), await at(engine)
        with pytest.raises(InsufficientMemory, match="out of memory"):
            await rig.use(msgspec.structs.replace(before, cache_bits=8))
        assert states(engine) == {"a": "failed"}
        await rig.use(before)
        assert (states(engine), await at(engine)) == ({"a": "ready"}, before)


async def test_beside_another_model_it_is_loaded_again_too_and_the_other_one_stays(tmp_path: Path) -> None:
    async with room_for(2, Backends(FakeBackend(), FakeBackend(), no_memory())) as engine:
        await engine.load(named(tmp_path, "a"))
        await engine.load(named(tmp_path, "b"), beside=True)
        now = await engine.serving("b")
        before = setting_of(now.spec, now.config)
        rig = LiveRig(engine, "b", LoadGenerator(engine, "b", SHORT, Slo(), range(65, 90)), before)
        with pytest.raises(InsufficientMemory, match="out of memory"):
            await rig.use(msgspec.structs.replace(before, cache_bits=8))
        assert states(engine) == {"a": "ready"}
        await rig.use(before)
        assert states(engine) == {"a": "ready", "b": "ready"}
        now = await engine.serving("b")
        assert setting_of(now.spec, now.config) == before


async def test_a_model_that_an_operator_unloaded_is_left_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        rig, before = await rig_of(engine), await at(engine)
        await rig.use(before)
        await engine.unload()
        with pytest.raises(NoModelLoaded):
            await rig.use(before)
        assert states(engine) == {}


async def test_a_window_in_which_another_operator_turned_a_knob_is_noticed_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_first_tokens(monkeypatch, 1)
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        rig, before = await rig_of(engine), await at(engine)
        await rig.use(before)
        measuring = asyncio.ensure_future(rig.measure(WINDOW_S, SETTLE_S))
        await until(lambda: engine.publish().running)
        await engine.reconfigure(max_prompts=before.max_prompts + 3)
        gate.open()
        with pytest.raises(KnobsChanged, match=f"changed by another operator: max prompts to {before.max_prompts + 3}"):
            await measuring
        await rig.use(before)
        assert await at(engine) == before
        await rig.rest()


async def test_where_nothing_is_answered_the_reason_is_given(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(then=lambda: FakeBackend(fail_at_steps=range(1, 10_000)))) as engine:
        rig = await rig_of(engine)
        with pytest.raises(WorkerFailed):
            await rig.measure(WINDOW_S, SETTLE_S)
        await rig.rest()


def test_first_tokens_of_requests_from_before_the_turn_are_not_counted() -> None:
    meter = WindowMeter(Slo(ttft_s=0.5, itl_s=0.1), since=10.0, began=10.0)
    meter.received(9.5, None, 11.0, 1, [])
    meter.received(9.5, 9.9, 11.0, 1, [1.1])
    meter.ended(9.5, 11.0, [1.0])
    meter.received(10.5, None, 10.9, 1, [])
    meter.received(10.5, 10.9, 11.3, 4, [0.05, 0.05, 0.1, 0.3])
    meter.ended(10.5, 10.9, [0.05, 0.05, 0.1, 0.3])
    found = meter.cut(12.0)
    assert (found.tokens, found.judged, found.met_slo, found.seconds) == (7, 1, 0, 2.0)
    assert found.ttft_s == pytest.approx([0.4])
    assert found.itl_s == [0.05, 0.05, 0.1, 0.3]
    assert meter.cut(13.0).tokens == 0


# -- on a real one ------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_demo_is_tuned_put_back_kept_and_used_when_it_is_asked_for(tmp_path: Path) -> None:
    runtime = Runtime(Settings(api=False, worker_host="thread"), state_dir=tmp_path)
    await runtime.start()
    try:
        with pytest.raises(InvalidRequest, match="No result to apply yet"):
            await runtime.tuning.use_best()
        await runtime.load("demo")
        before = await at(runtime.engine)
        order = TuneOrder(minutes=0.25, slo_ttft_s=60.0, knobs=("max_prompts",))
        await runtime.tuning.start(order, Mix(source="short", lengths=((16, 8),)))
        with pytest.raises(EngineBusy, match="Autotune is already running"):
            await runtime.tuning.start(order)
        await runtime.tuning.finished()
        report = runtime.tuning.report()
        assert (report.state, report.mix, report.knobs) == ("done", "short", ("max_prompts",)), report.outcome
        assert report.best is not None and report.best.verdict != "broken"
        assert await at(runtime.engine) == before
        key, hardware = str(resolve_local("demo", ())), hardware_of(runtime.engine.publish().devices)
        profiles = TunedProfiles(tmp_path)
        assert profiles.file is not None
        [entry] = json.loads(profiles.file.read_text())["entries"]
        assert (entry["applied"], entry["settings"]) == (False, {"max_prompts": report.best.setting.max_prompts})
        await runtime.tuning.use_best()
        assert (await at(runtime.engine)).max_prompts == report.best.setting.max_prompts
        profile = profiles.applied(key, hardware)
        assert profile is not None and profile.settings == {"max_prompts": report.best.setting.max_prompts}
    finally:
        await runtime.close(drain_s=0)


@pytest.mark.slow
async def test_a_best_that_breaks_the_slo_is_never_put_to_use_and_a_file_that_cannot_be_written_is_reported(
    tmp_path: Path,
) -> None:
    state_dir = tmp_path / "state"
    runtime = Runtime(Settings(api=False, worker_host="thread"), state_dir=state_dir)
    await runtime.start()
    try:
        await runtime.load("demo")
        before = await at(runtime.engine)
        slo = {"slo_ttft_s": 1e-9, "slo_itl_s": 1e-9}  # a busy machine may show either alone in a window
        order = TuneOrder(minutes=0.15, **slo, knobs=("max_prompts",), apply=True, prompt="16", output="8")
        await runtime.tuning.start(order)
        (state_dir / "tuned.json").mkdir(parents=True)
        await runtime.tuning.finished()
        report = runtime.tuning.report()
        assert (report.state, report.applied, await at(runtime.engine)) == ("done", False, before)
        assert report.mix == "prompts of 16 tokens, answers of 8"
        assert re.search("misses the latency SLO, closest", report.outcome), report.outcome
        assert "Not applied" in report.outcome
        assert "The result could not be saved" in report.outcome and "tuned.json cannot be written" in report.outcome
        with pytest.raises(InvalidRequest, match="misses the SLO and was not applied"):
            await runtime.tuning.use_best()
    finally:
        await runtime.close(drain_s=0)


@pytest.mark.slow
async def test_cancelled_before_a_window_everything_is_as_it_was_and_nothing_is_kept(tmp_path: Path) -> None:
    runtime = Runtime(Settings(api=False, worker_host="thread"), state_dir=tmp_path)
    await runtime.start()
    try:
        await runtime.load("demo")
        before = await at(runtime.engine)
        await runtime.tuning.start(TuneOrder(knobs=("max_prompts", "step_tokens"), apply=True))
        await until(lambda: runtime.engine.publish().running)
        await runtime.tuning.cancel()
        assert runtime.tuning.report().state == "cancelled"
        assert await at(runtime.engine) == before
        assert not runtime.engine.publish().running
        assert not (tmp_path / "tuned.json").exists()
    finally:
        await runtime.close(drain_s=0)
