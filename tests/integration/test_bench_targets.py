"""Benches on an engine whose backend is foretold, and on its own API in every dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from console.bench.dialects import DIALECTS
from console.bench.engine_target import EngineTarget
from console.bench.http_target import HttpTarget
from console.bench.kinds.grid import Grid
from console.bench.kinds.latency import Latency
from console.bench.kinds.long import Long
from console.bench.kinds.model_load import Load
from console.bench.kinds.prefix import Prefix
from console.bench.kinds.serve import Serve
from console.bench.kinds.threads import Threads
from console.bench.kinds.users import Users
from console.bench.run import run_bench
from console.bench.target import TargetFailed
from console.bench.text import result_text
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.simulation.lengths import fixed
from engine.text.tokenizer import Tokenizer
from tests.api.harness import Served
from tests.api.harness import serving as api_serving
from tests.fakes.engines import serving, until

SHORT = {"prompt_tokens": fixed(8), "output_tokens": fixed(6)}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with serving(tmp_path / "fake") as engine:
        yield engine


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with api_serving(tmp_path / "fake") as served:
        yield served


async def test_an_engine_gives_exactly_the_tokens_that_are_asked_for(engine: Engine) -> None:
    result = await run_bench(Latency(prompts=3, **SHORT), EngineTarget(engine), samples=True)
    assert (result.target.kind, result.target.model, result.target.counted_by) == ("engine", "fake", "engine")
    assert result.target.forces_length
    assert (result.settings["num_workers"], result.settings["max_prompts"], result.settings["prompts"]) == (1, 16, 3)
    assert {(each.prompt_tokens, each.output_tokens, len(each.token_s)) for each in result.samples} == {(8, 6, 6)}
    assert result.rows[0].median("total_output_tokens") == 18


async def test_a_result_tells_how_the_engine_ran(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        plain = dict(EngineTarget(engine).settings)
        spec = engine.status.spec
        assert spec is not None
        await engine.load(msgspec.structs.replace(spec, weights="int8", deterministic=True))
        told = dict(EngineTarget(engine).settings)
    assert plain["step_tokens"] == told["step_tokens"] == engine.config.step_tokens
    assert plain.keys().isdisjoint({"weights", "deterministic"})
    assert (told["weights"], told["deterministic"]) == ("int8", True)


async def test_users_serve_and_prefix_run_on_an_engine(engine: Engine) -> None:
    target = EngineTarget(engine)
    for plan, rows in (
        (Users(users=(1, 2), requests=2, **SHORT), 2),
        (Serve(rates=(500.0,), requests=5, **SHORT), 1),
        (Prefix(requests=6, concurrent=2, prefix_tokens=16, **SHORT), 2),
    ):
        result = await run_bench(plan, target)
        assert (len(result.rows), result.complete) == (rows, True)
        assert all(row.median("failed") == 0 for row in result.rows)


async def test_grid_turns_the_knobs_of_a_running_engine_and_turns_them_back(engine: Engine) -> None:
    before = [worker.pid for worker in engine.publish().workers]
    result = await run_bench(
        Grid(workers=(1, 2), max_prompts=(2, 4), concurrent=4, requests=4, **SHORT), EngineTarget(engine)
    )
    assert [row.keys for row in result.rows] == [
        {"workers": workers, "max_prompts": prompts} for workers in (1, 2) for prompts in (2, 4)
    ]
    assert (engine.config.num_workers, engine.config.max_prompts) == (1, 16)
    await until(lambda: [worker.pid for worker in engine.publish().workers] == before)


async def test_threads_loads_anew_for_each_number_of_guesses(engine: Engine) -> None:
    asked: list[Mapping[str, object]] = []

    async def reload(changes: Mapping[str, object]) -> None:
        asked.append(changes)
        if changes.get("draft_tokens") == 8:
            raise InvalidRequest("draft_tokens is 8; it must be between 1 and 7")

    plan = Threads(clients=(1, 2), requests=4, guessed=(0, 1, 8), **SHORT)
    result = await run_bench(plan, EngineTarget(engine, reload))
    assert [row.keys["guessed"] for row in result.rows] == [0, 0, 1, 1]
    assert asked[0] == {"ngram_draft": True, "draft_tokens": 1}
    assert result.notes == ("8 draft tokens were not measured: draft_tokens is 8; it must be between 1 and 7",)


async def test_guessing_is_turned_off_with_its_number_of_tokens(tmp_path: Path) -> None:
    asked: list[Mapping[str, object]] = []
    async with serving(tmp_path / "fake") as engine:
        spec = engine.status.spec
        assert spec is not None
        await engine.load(msgspec.structs.replace(spec, ngram_draft=True, draft_tokens=4))

        async def reload(changes: Mapping[str, object]) -> None:
            asked.append(changes)

        await EngineTarget(engine, reload).set_draft_tokens(0)
    assert asked == [{"ngram_draft": False, "draft_tokens": None}]


async def test_a_model_that_others_use_is_not_loaded_anew(engine: Engine) -> None:
    result = await run_bench(Threads(clients=(2,), requests=2, guessed=(0, 2), **SHORT), EngineTarget(engine))
    assert [row.keys["guessed"] for row in result.rows] == [0]
    assert "cannot be reloaded" in result.notes[0]


async def test_load_leaves_a_model_that_others_use(engine: Engine) -> None:
    save_file({"unused": torch.zeros(8)}, engine.publish().status.spec.path / "model.safetensors")  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="cannot be reloaded"):
        await run_bench(Load(), EngineTarget(engine))
    assert engine.status.state == "ready"


async def test_long_makes_room_for_the_long_prompt_and_tells_the_gaps(engine: Engine) -> None:
    plan = Long(streams=20, long_tokens=10_000, stream_tokens=3000)
    result = await run_bench(plan, EngineTarget(engine))
    [row] = result.rows
    assert row.keys["streams"] == 20
    assert int(row.keys["long_tokens"]) < 10_000
    assert "the limit of the model" in result.notes[0]
    assert (row.median("longest_gap_ms") or 0) >= (row.median("median_gap_ms") or 1) > 0
    assert row.median("long_ttft_ms")
    assert engine.config.max_prompts == 16


async def test_load_reads_the_files_and_loads_the_model(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "fake"
    save_file({"unused": torch.zeros(1024)}, folder / "model.safetensors")

    spec = engine.status.spec
    assert spec is not None

    async def reload(changes: Mapping[str, object]) -> None:
        await engine.load(spec)

    result = await run_bench(Load(repeats=2), EngineTarget(engine, reload))
    assert result.rows[-1].keys == {"files": "in page cache"}
    for row in result.rows:
        assert (row.median("size_gib") or 0) >= 4096 / 2**30
        assert all(value and value > 0 for name in ("read_s", "load_s") for value in row.values[name])
        assert len(row.values["load_s"]) == 2


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
async def test_a_server_is_measured_in_every_dialect(dialect: str, served: Served) -> None:
    tokenizer = Tokenizer.from_folder(served.engine.publish().status.spec.path)  # type: ignore[union-attr]
    async with HttpTarget(served.url, dialect=dialect, model="fake", tokenizer=tokenizer) as target:
        result = await run_bench(Users(users=(1, 2), requests=2, **SHORT), target, samples=True)
    assert result.complete and not result.notes
    assert {each.output_tokens for each in result.samples} == {6}
    assert (result.target.kind, result.target.dialect, result.target.url) == ("http", dialect, served.url.rstrip("/"))
    assert result.target.counted_by == ("asked" if dialect in ("generate", "kobold", "textgen") else "usage")
    assert dialect in result_text(result)
    if DIALECTS[dialect].takes_ids:
        assert {len(each.prompt_ids) for each in served.backend.submitted} == {8}


async def test_the_model_of_a_server_is_the_first_that_it_names(served: Served) -> None:
    async with HttpTarget(served.url) as target:
        result = await run_bench(Latency(prompts=1, **SHORT), target)
    assert result.target.model == "fake"


async def test_prompts_for_an_unknown_vocabulary_are_words(served: Served) -> None:
    async with HttpTarget(served.url) as target:
        result = await run_bench(Latency(prompts=1, **SHORT), target, samples=True)
    assert result.samples[0].prompt_tokens > 8  # a token for each byte in this vocabulary, as the server counts


@pytest.mark.parametrize("url", ["", "ftp://here", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="not a server URL"):
        HttpTarget(url)


async def test_a_server_that_is_not_there_is_one_sentence() -> None:
    async with HttpTarget("http://127.0.0.1:9", model="m") as target:
        with pytest.raises(TargetFailed, match=r"127\.0\.0\.1:9"):
            await run_bench(Latency(prompts=1), target)


async def test_a_refusal_is_told_with_its_status(tmp_path: Path) -> None:
    async with api_serving(tmp_path / "fake") as served, HttpTarget(served.url, model="other") as target:
        with pytest.raises(TargetFailed, match="answered 404"):
            await run_bench(Latency(prompts=1, **SHORT), target)
