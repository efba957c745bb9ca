"""`link.models` at a real runtime: loads and prices with settings of their own, and remembers them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.api.admin.calls import AdminOperations
from console.link.local import LocalLink, LocalModels
from console.link.protocol import EngineLink
from console.link.rpc import CALLS, as_link
from console.runtime.loops import CurrentLoop
from console.runtime.runtime import Runtime
from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.settings.schema import Settings
from console.settings.sources import Sources
from console.tuning.profiles import TunedProfiles, hardware_of
from engine.devices import new_probe
from engine.errors import LoadCancelled, ModelNotFound
from engine.placement.estimate import Estimate
from tests.fakes.engines import until
from tests.fakes.hub import FakeHub, FakeRepo, serve_hub
from tests.fakes.tiny_models import make_tiny_model
from tests.unit.test_tuned_profiles import found

SMALL = LoadOptions(max_model_len=64, max_prompts=1, cache_bits=16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model "tiny" in it."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "tiny")
    return folder


@asynccontextmanager
async def linked(models: Path, state: Path | None = None, **settings: Any) -> AsyncIterator[tuple[EngineLink, Runtime]]:
    """A link to a runtime with nothing loaded."""
    runtime = Runtime(Settings(api=False, models_dir=(models,), worker_host="thread", **settings), state_dir=state)
    await runtime.start()
    try:
        yield as_link(LocalLink(runtime, CurrentLoop())), runtime
    finally:
        await runtime.close(drain_s=0.0)


async def test_a_load_with_settings_of_its_own_has_them_and_is_remembered(models: Path, tmp_path: Path) -> None:
    own = LoadOptions(max_prompts=3, max_model_len=64, cache_bits=8)
    async with linked(models, tmp_path) as (link, runtime):
        await link.models.load("tiny", own)
        reading = runtime.engine.publish().models[0]
        assert reading.status.spec is not None and reading.status.model is not None
        assert (reading.max_prompts, reading.status.model.max_model_len, reading.status.spec.cache_bits) == (3, 64, 8)
        expected = msgspec.structs.replace(own, num_workers=1)
        assert await link.models.remembered(str(models / "tiny")) == expected
    async with linked(models, tmp_path) as (link, _):
        assert await link.models.remembered("tiny") == expected
        await link.models.forget("tiny")
        assert await link.models.remembered("tiny") == NO_OPTIONS


async def test_knobs_that_are_turned_later_are_remembered_too(models: Path, tmp_path: Path) -> None:
    async with linked(models, tmp_path) as (link, _):
        await link.models.load("tiny", LoadOptions(max_model_len=64))
        await link.reconfigure(max_prompts=5, step_tokens=64, threads=1, idle_unload_s=90)
        last = await link.models.remembered("tiny")
    assert (last.max_prompts, last.max_model_len) == (5, 64)
    assert (last.step_tokens, last.threads, last.idle_unload) == (64, 1, 90)


async def test_a_load_that_fails_leaves_what_was_remembered(models: Path, tmp_path: Path) -> None:
    async with linked(models, tmp_path) as (link, _):
        await link.models.load("tiny", LoadOptions(max_prompts=2))
        before = await link.models.remembered("tiny")
        with pytest.raises(ModelNotFound):
            await link.models.load("tinier", LoadOptions(max_prompts=9))
        assert await link.models.remembered("tiny") == before
        assert await link.models.remembered("tinier") == NO_OPTIONS


async def test_the_estimate_is_of_the_values_given_and_else_of_the_knobs_in_use(models: Path) -> None:
    async with linked(models, devices="sim:1,1", max_prompts=4) as (link, _):
        small = await link.models.estimate("tiny", LoadOptions(max_model_len=32, cache_bits=8, num_workers=2))
        assert (small.context_tokens, small.cache_bits, small.workers, small.max_prompts) == (32, 8, 2, 4)
        whole = await link.models.estimate("tiny")
        assert (whole.workers, whole.max_prompts, whole.cache_bits) == (1, 4, 16)
        assert whole.kv_token_bytes > small.kv_token_bytes


async def test_the_estimate_is_of_what_the_load_will_do(models: Path) -> None:
    async with linked(models, devices="sim:1,1", max_prompts=4) as (link, runtime):
        await link.models.load("tiny", LoadOptions(num_workers=3))
        assert link.models.defaults().num_workers == 1  # the knob; three were this load's own
        for own in (NO_OPTIONS, LoadOptions(num_workers=3)):
            estimated = await link.models.estimate("tiny", own)
            await link.models.load("tiny", own)
            await until(
                lambda number=estimated.workers: (
                    [each.state for each in runtime.engine.publish().workers] == ["ready"] * number
                )
            )
            planned, real = (
                Counter(share.device for shares in all_shares for share in shares)
                for all_shares in (
                    [each.shares for each in estimated.placements],
                    [each.planned for each in runtime.engine.publish().workers],
                )
            )
            assert planned == real


async def test_the_estimate_of_an_order_over_http_has_the_knobs_of_the_load(models: Path) -> None:
    async with linked(models, devices="sim:1,1") as (link, runtime):
        await link.models.load("tiny")
        await link.reconfigure(max_prompts=5)
        operations = AdminOperations(runtime.link, runtime.open_folders.admit)
        estimated = await operations.carry_out(CALLS["models.estimate"], {"model": "tiny"})
        await operations.carry_out(CALLS["models.load"], {"model": "tiny"})
        assert isinstance(estimated, Estimate)
        assert estimated.max_prompts == runtime.engine.publish().models[0].max_prompts == 5


async def test_the_estimate_has_what_was_tuned_for_the_model(models: Path, tmp_path: Path) -> None:
    async with linked(models, tmp_path, devices="sim:1") as (link, runtime):
        assert runtime.state_dir is not None
        hardware = hardware_of(new_probe((1.0,)).read())
        TunedProfiles(runtime.state_dir).keep(found(str(models / "tiny"), hardware, settings={"max_prompts": 7}))
        estimated = await link.models.estimate("tiny")
        await link.models.load("tiny")
        assert estimated.max_prompts == runtime.engine.publish().models[0].max_prompts == 7


async def test_the_model_that_would_be_replaced_is_the_one_of_the_same_name(models: Path) -> None:
    make_tiny_model(models / "other")
    async with linked(models, devices="sim:1") as (link, _):
        device = (await link.models.estimate("tiny", SMALL)).devices[0]
    takes = device.weights_bytes + device.kv_bytes + device.working_bytes
    headroom = device.headroom_bytes - device.total_bytes // 100  # besides a hundredth
    room_for_two = (headroom + 2.5 * takes) / 0.99 / 2**30
    async with linked(models, devices=f"sim:{room_for_two}") as (link, _):
        await link.models.load("tiny", SMALL)
        await link.models.load("other", SMALL, beside=True)
        assert (await link.models.estimate("other", SMALL)).verdict.startswith("Replacing other: Fits")


async def test_bits_of_a_load_win_over_the_flag_of_the_program(models: Path) -> None:
    async with linked(models, devices="sim:1", cache_8bit=True) as (link, _):
        assert link.models.defaults().cache_bits == 8
        assert (await link.models.estimate("tiny")).cache_bits == 8
        assert (await link.models.estimate("tiny", LoadOptions(cache_bits=16))).cache_bits == 16


@pytest.fixture
def hub(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with org/tiny, and an empty cache."""
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        for variable in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        files = {file.name: file.read_bytes() for file in (models / "tiny").iterdir() if file.is_file()}
        hub.repos["org/tiny"] = FakeRepo(files)
        yield hub


async def test_a_model_can_be_fetched_and_not_loaded(hub: FakeHub, models: Path) -> None:
    async with linked(models) as (link, runtime):
        await link.models.download("org/tiny")
        assert [entry.name for entry in await link.list_models() if entry.origin == "hub cache"] == ["org/tiny"]
        assert runtime.engine.publish().status.state == "unloaded"
        assert link.models.fetching() is None


async def test_a_download_is_seen_beside_a_model_that_serves_and_can_be_cancelled(hub: FakeHub, models: Path) -> None:
    hub.hold = "model.safetensors"
    async with linked(models) as (link, _):
        await link.models.load("tiny")
        download = asyncio.create_task(link.models.download("org/tiny"))
        await asyncio.to_thread(hub.half_sent.wait, 60)
        seen = link.models.fetching()
        assert seen is not None
        assert (seen.model, seen.progress.phase) == ("org/tiny", "download")
        assert link.snapshot().status.state == "ready"
        await link.cancel_load()
        hub.release.set()
        with pytest.raises(LoadCancelled, match="cancelled"):
            await download


async def test_a_console_on_a_gpu_has_a_default_of_max_prompts_for_each_backend() -> None:
    for flags, expected in (({}, (64, 32, None)), ({"max_prompts": 64}, (64, 0, 64))):
        sources = Sources(flags=flags, has_gpu=True)
        runtime = Runtime(sources.settings(), sources=sources)
        defaults = runtime.engine.defaults
        assert (defaults.max_prompts, defaults.library_prompts, LocalModels(runtime).defaults().max_prompts) == expected
