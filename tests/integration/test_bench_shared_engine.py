"""Benches on an engine that serves others: what they are told, what is kept, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from console.bench.bench_runs import FOLDER, Benches
from console.bench.history import BenchHistory
from console.bench.result import read_result
from console.link.benches import BenchOrder
from console.link.tuning import TuneOrder
from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from engine.engine import Engine
from engine.errors import EngineBusy, InvalidRequest, NoModelLoaded
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends, ask, fake_spec, read, serving, started, until

SHORT = {"prompt_tokens": "8", "output_tokens": "6"}
USERS = BenchOrder(bench="users", settings={"users": "1,2", "requests": "2", "repeats": "2", **SHORT})


def benches(engine: Engine, folder: Path | None, *, tuning: bool = False) -> Benches:
    return Benches(engine, folder, lambda: tuning)


async def test_a_bench_is_measured_told_kept_and_written_for_programs(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        await found.start(USERS)
        assert found.report().state == "running"
        await found.finished()
        report = found.report()
        assert (report.state, report.number) == ("done", 1)
        assert report.progress is not None
        assert [row.keys for row in report.progress.rows] == [{"users": 1}, {"users": 2}]
        assert "mean response, users 2; saved as #1." in report.outcome
        [entry] = await found.history()
        assert (entry.id, entry.bench, entry.model, entry.complete) == (1, "users", "fake", True)
        assert entry.settings == "1×16, 2 requests, 8+6 tokens, 2 repeats"
        result = await found.result(1)
        assert result == BenchHistory(tmp_path).result(1)
        [file] = (tmp_path / FOLDER).iterdir()
        assert read_result(file) == result
        await found.forget(1)
        assert await found.history() == []
        assert not file.exists()
        with pytest.raises(InvalidRequest, match="no result 1"):
            await found.result(1)


async def test_a_bench_that_is_cancelled_keeps_what_was_measured_and_the_engine_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        settings = {"users": "1,400", "requests": "1", "prompt_tokens": "8", "output_tokens": "900"}
        await found.start(BenchOrder(bench="users", settings=settings))
        await until(lambda: (progress := found.report().progress) is not None and len(progress.rows) == 1)
        await found.cancel()
        assert found.report().state == "cancelled"
        [entry] = await found.history()
        assert not entry.complete
        assert len((await found.result(entry.id)).rows) == 1
        await until(lambda: not engine.publish().running and not engine.publish().queued)
        assert (await read(engine.submit(ask("user")))).text


async def test_a_bench_that_is_cancelled_before_its_first_row_leaves_nothing(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path / "fake", Backends(FakeBackend(gate=gate))) as engine:
        found = benches(engine, tmp_path)
        await found.start(USERS)
        await until(lambda: engine.publish().running)
        await found.cancel()
        assert found.report().outcome == "Cancelled before the first row was measured."
        assert await found.history() == []


async def test_others_are_answered_meanwhile_and_the_result_says_that_there_were_some(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        await found.start(USERS)
        answer = await read(engine.submit(ask("user", max_tokens=4)))
        assert len(answer.token_ids) == 4
        await found.finished()
        [entry] = await found.history()
        assert (
            "1 other request ran during the benchmark and is included in the results."
            in (await found.result(entry.id)).notes
        )


async def test_the_knobs_are_as_before_once_a_grid_is_cancelled(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        settings = {"workers": "2", "max_prompts": "4,3", "concurrent": "4", "requests": "400", **SHORT}
        await found.start(BenchOrder(bench="grid", settings={**settings, "output_tokens": "900"}))
        await until(lambda: engine.config.num_workers == 2)
        await found.cancel()
        assert (engine.config.num_workers, engine.config.max_prompts) == (1, 16)


async def test_clients_of_threads_ask_the_model_as_it_was_loaded(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        await found.start(BenchOrder(bench="threads", settings={"clients": "1,2", "requests": "4", **SHORT}))
        await found.finished()
        assert [row.keys["guessed"] for row in (await found.result(1)).rows] == [0, 0]


async def test_one_thing_is_measured_at_a_time(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path / "fake", Backends(FakeBackend(gate=gate))) as engine:
        found = benches(engine, tmp_path)
        await found.start(USERS)
        with pytest.raises(EngineBusy, match="Benchmark users is already running"):
            await found.start(USERS)
        await found.cancel()
        with pytest.raises(EngineBusy, match="Autotune is running"):
            await benches(engine, tmp_path, tuning=True).start(USERS)


async def test_what_the_model_cannot_take_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        for settings, said in (
            ({"prompt_tokens": "999999"}, "do not fit the model"),
            ({"users": "0"}, "users must be 1 or more"),
            ({"users": "5000"}, "exceed the queue limit"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await found.start(BenchOrder(bench="users", settings=settings))
        assert found.report().state == "none"
        assert engine.publish().totals.requests == 0


async def test_without_a_model_there_is_nothing_to_measure(tmp_path: Path) -> None:
    async with started() as engine:
        with pytest.raises(NoModelLoaded):
            await benches(engine, tmp_path).start(USERS)


async def test_a_model_that_goes_away_is_said_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, tmp_path)
        settings = {"users": "1,300", "requests": "1", "prompt_tokens": "8", "output_tokens": "900"}
        await found.start(BenchOrder(bench="users", settings=settings))
        await until(lambda: (progress := found.report().progress) is not None and len(progress.rows) == 1)
        await engine.unload(drain_s=0)
        await found.finished()
        report = found.report()
        assert report.state == "cancelled"
        assert report.outcome.startswith("Ended early")
        assert not (await found.history())[0].complete


async def test_the_end_of_the_program_ends_a_bench(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path / "fake", Backends(FakeBackend(gate=gate))) as engine:
        found = benches(engine, tmp_path)
        await found.start(USERS)
        async with asyncio.timeout(60):
            await found.close()
        assert not found.report().under_way


async def test_of_several_models_the_one_that_was_chosen_is_measured_with_its_own_knobs(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        other = msgspec.structs.replace(fake_spec(tmp_path / "other"), name="other")
        await engine.load(other, beside=True, num_workers=1, max_prompts=3)
        found = benches(engine, tmp_path)
        grid = {"workers": "1", "max_prompts": "2,4", "concurrent": "2", "requests": "4", **SHORT}
        await found.start(BenchOrder(bench="grid", model="other", settings=grid))
        await found.finished()
        result = await found.result(1)
        assert result.complete
        assert (result.target.model, result.settings["max_prompts"]) == ("other", [2, 4])
        knobs = {model.name: model.max_prompts for model in engine.publish().models}
        assert knobs == {"fake": 16, "other": 3}


@pytest.mark.slow
async def test_a_search_for_settings_is_refused_meanwhile_and_a_runtime_that_ends_ends_a_bench(
    tmp_path: Path,
) -> None:
    runtime = Runtime(Settings(api=False, worker_host="thread"), state_dir=tmp_path)
    await runtime.start()
    try:
        await runtime.load("demo")
        await runtime.benches.start(BenchOrder(bench="latency", settings={"prompts": "9999"}))
        with pytest.raises(EngineBusy, match="A benchmark is running"):
            await runtime.tuning.start(TuneOrder(minutes=0.1))
        await until(lambda: runtime.engine.publish().running)
    finally:
        await runtime.close(drain_s=0.0)
    assert runtime.benches.report().state == "cancelled"


async def test_without_a_state_folder_the_result_is_told_and_not_kept(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, None)
        await found.start(USERS)
        await found.finished()
        assert found.report().state == "done"
        assert "not saved" in found.report().outcome
        assert await found.history() == ()
