"""Real keys and values in tiers: what a model computed outlives its worker, its unload and the engine, to the bit."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.backends.base import Backend, LoadProgress
from engine.backends.common import kv_tiers, page_folder
from engine.backends.common.kv_tiers import KvTiers
from engine.backends.torch import runner
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import code_digest
from engine.config import CacheBits, DeviceShare, ModelSpec, SamplingParams
from engine.engine import Engine
from engine.errors import LoadCancelled
from engine.models import manager
from engine.models.manager import ModelManager
from engine.workers import replica
from engine.workers.replica import Replica
from tests.fakes import held
from tests.fakes.engines import StillProbe, all_ready, ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.oracle import never
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.torch_backend.running import GREEDY, Run, load_spec, prompt
from tests.integration.torch_backend.running import ask as backend_ask

pytestmark = pytest.mark.slow

PATIENCE_S = 200.0


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Give up on no disk or worker that this process waits for: what is counted here depends on them."""
    for name in ("_HUNG_S", "_OPEN_S", "_CLOSE_S"):
        patch.setattr(kv_tiers, name, PATIENCE_S)
    patch.setattr(KvTiers.restore, "__defaults__", (PATIENCE_S,))
    patch.setattr(replica, "STOP_PATIENCE_S", PATIENCE_S)
    patch.setattr(Replica.stop, "__defaults__", (PATIENCE_S,))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def make_patient(spec: ModelSpec) -> Backend:
    """What ERICLLM_BACKEND_FACTORY names: a worker's own process inherits no fixture."""
    be_patient(pytest.MonkeyPatch())
    return held.make_torch(spec)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def backend(spec: ModelSpec, *, page_tokens: int = 16) -> TorchBackend:
    made = TorchBackend()
    load_spec(made, spec, page_tokens=page_tokens)
    return made


def disk_spec(path: Path, folder: Path, **wanted: object) -> ModelSpec:
    fields = {"path": path, "name": "tiny", "dtype": "float32", "kv_cache_tokens": 2048, "kv_disk_gib": 0.01}
    return msgspec.convert({**fields, "kv_dir": folder, "prefix_salt": b"salt", **wanted}, ModelSpec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_tokens", [8, 16], ids=["gathered", "native"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_an_answer_continues_to_the_bit_in_another_worker(
    llama: Path, tmp_path: Path, bits: CacheBits, page_tokens: int, dtype: str
) -> None:
    spec = disk_spec(llama, tmp_path, cache_bits=bits, dtype=dtype)
    first = backend(spec, page_tokens=page_tokens)
    run = Run(first, backend_ask("a", prompt(0, 70)), limit=40)
    expected = run.to_end()["a"]
    first.unload()
    second = backend(spec, page_tokens=page_tokens)
    resumed = Run(second, backend_ask("a", prompt(0, 70), GREEDY, expected[:25]), limit=40)
    assert resumed.to_end()["a"] == expected
    stats = second.stats()
    assert stats.restored_tokens == 94 // page_tokens * page_tokens
    assert stats.prompt_tokens_computed == 0
    assert [tier.name for tier in stats.kv_tiers] == ["disk"]
    second.unload()


def test_another_model_or_cache_never_finds_the_pages(llama: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    specs = [
        disk_spec(llama, tmp_path / "kv"),
        disk_spec(other, tmp_path / "kv"),
        disk_spec(llama, tmp_path / "kv", dtype="bfloat16"),
        disk_spec(llama, tmp_path / "kv", cache_bits=8),
        disk_spec(llama, tmp_path / "kv", alpha_value=2.0),
        disk_spec(llama, tmp_path / "kv", attention="gathered"),
    ]
    for spec in specs:
        made = backend(spec)
        Run(made, backend_ask("a", prompt(0, 70)), limit=4).to_end()
        assert made.stats().restored_tokens == 0, spec
        made.unload()


def test_workers_on_other_devices_of_a_kind_find_the_pages(llama: Path, tmp_path: Path) -> None:
    found = []
    for index in range(2):
        shares = (DeviceShare(device=f"sim:{index}", layers=2, weights_bytes=2**26, kv_bytes=2**24),)
        made = backend(disk_spec(llama, tmp_path / "kv", device=f"sim:{index}", shares=shares))
        Run(made, backend_ask("a", prompt(0, 70)), limit=4).to_end()
        found.append(made.stats().restored_tokens)
        made.unload()
    assert found == [0, 64]


def test_other_code_of_the_backend_never_finds_the_pages(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    code = tmp_path / "kv" / "codec.py"
    code.write_text("rotate()")
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    code.write_text("rotate(2)")
    assert code_digest(tmp_path) != before


def test_pages_of_a_model_whose_files_changed_while_it_was_loaded_are_for_that_worker_alone(
    llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    spec = disk_spec(model, tmp_path / "kv")

    def change(progress: LoadProgress) -> None:
        os.utime(model / "config.json", (1, 1))

    first = TorchBackend()
    first.load(spec, max_prompts=8, step_tokens=64, page_tokens=16, report=change, cancelled=never)
    Run(first, backend_ask("a", prompt(0, 70)), limit=4).to_end()
    first.unload()
    second = backend(spec)
    Run(second, backend_ask("a", prompt(0, 70)), limit=4).to_end()
    assert second.stats().restored_tokens == 0
    second.unload()


def test_a_load_that_is_cancelled_once_its_tiers_are_open_leaves_no_thread(llama: Path, tmp_path: Path) -> None:
    before, begun = threading.enumerate(), list[threading.Thread]()

    def cancelled() -> bool:
        begun.extend(each for each in threading.enumerate() if each.name == "kv-tiers-read" and each not in before)
        return bool(begun)

    with pytest.raises(LoadCancelled):
        load_spec(TorchBackend(), disk_spec(llama, tmp_path), cancelled=cancelled)
    (reader,) = begun
    reader.join(60)
    assert not reader.is_alive()


def test_pages_belong_to_the_code_that_a_process_has_imported_not_to_files_that_are_newer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is forked after an upgrade from a process that began before it, say."""
    found = []
    for _ in range(2):
        made = backend(disk_spec(llama, tmp_path / "kv"))
        Run(made, backend_ask("a", prompt(0, 70)), limit=4).to_end()
        found.append(made.stats().restored_tokens)
        made.unload()
        monkeypatch.setattr(runner, "code_digest", lambda folder: "newer")
    assert found == [0, 64]


@pytest.mark.parametrize("bits", [16, 8])
def test_pages_of_a_device_are_copied_out_and_in_between_steps(llama: Path, tmp_path: Path, bits: CacheBits) -> None:
    """As a GPU's pages are, here of tensors in RAM. Steps run in torch's inference mode, these copies do not."""
    made = backend(disk_spec(llama, tmp_path, cache_bits=bits))
    run = Run(made, backend_ask("a", prompt(0, 70)), limit=4)
    run.to_end()
    assert made._runner is not None
    pool = made._runner.kv
    as_in_ram = pool.read_pages([0, 1, 2])
    assert as_in_ram[0] != as_in_ram[1]
    pool.in_host_memory = False
    assert pool.read_pages([0, 1, 2]) == as_in_ram
    pool.write_pages([5, 4], as_in_ram[0] + as_in_ram[1])
    assert pool.read_pages([4, 5]) == [as_in_ram[1], as_in_ram[0]]
    made.unload()


# In the engine.


@pytest.fixture
def forget_pages() -> Iterator[Callable[[], None]]:
    """Remove the pages of this test from shared memory, which those of others share; called at the end too."""
    root = kv_tiers.tier_roots(ModelSpec(path=Path(), name="", kv_host_gib=1))["host"]
    before = set(root.glob("*/"))

    def forget() -> None:
        for folder in set(root.glob("*/")) - before:
            shutil.rmtree(folder)

    yield forget
    forget()


@asynccontextmanager
async def engine_for(**settings: object) -> AsyncIterator[Engine]:
    engine = Engine(config(page_tokens=16, **settings), probe=StillProbe())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain_s=0.0)


def host_spec(path: Path, name: str) -> ModelSpec:
    return ModelSpec(path=path, name=name, threads=1, kv_cache_tokens=4096, dtype="float32", kv_host_gib=0.05)


async def test_a_conversation_is_found_again_after_two_swaps_and_in_the_next_engine(
    llama: Path, tmp_path: Path, forget_pages: Callable[[], None]
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    conversation = prompt(3, 200)
    async with engine_for() as engine:
        for path, name in ((llama, "a"), (other, "b"), (llama, "a")):
            await engine.load(host_spec(path, name))
            answer = await read(engine.submit(ask(conversation, max_tokens=4, model=name)))
            await engine.unload(name)
        assert answer.last.cached_tokens == 192
    async with engine_for() as engine:
        await engine.load(host_spec(llama, "a"))
        answer = await read(engine.submit(ask(conversation, max_tokens=4)))
        assert answer.last.cached_tokens == 192


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_conversation_is_found_again_after_an_unload_while_idle(
    llama: Path, tmp_path: Path, forget_pages: Callable[[], None], tier: str
) -> None:
    spec = host_spec(llama, "tiny") if tier == "host" else disk_spec(llama, tmp_path / "kv", threads=1)
    conversation, params = prompt(4, 200), SamplingParams(temperature=0, max_tokens=4)
    async with engine_for() as engine:
        await engine.load(spec)
        first = await read(engine.submit(ask(conversation, params=params)))
        await engine.reconfigure(idle_unload_s=0.001)
        await until(lambda: [model.status.state for model in engine.publish().models] == ["idle"])
        assert engine.publish().workers == ()
        await engine.reconfigure(idle_unload_s=60.0)
        key = (await engine.serving()).key
        again = await read(engine.submit(ask(conversation, params=params, key=key)))
        await until(lambda: [each.stats.restored_tokens for each in engine.publish().workers] == [192])
    assert again.last.cached_tokens == 192
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("kv_host_gib", [0.0, 0.05], ids=["memory", "tier"])
async def test_a_killed_worker_costs_no_more_than_the_last_page_of_each_request(
    llama: Path,
    tmp_path: Path,
    forget_pages: Callable[[], None],
    kv_host_gib: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold = Hold(monkeypatch, tmp_path, steps=60)
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", f"{__name__}:{make_patient.__name__}")
    if kv_host_gib:
        monkeypatch.setattr(ModelManager, "keeps_memory", False)
    spec = msgspec.structs.replace(host_spec(llama, "a"), kv_host_gib=kv_host_gib)
    params = SamplingParams(temperature=0, max_tokens=200, min_tokens=200)
    prompts = [prompt(salt, 100 + salt) for salt in range(6)]
    async with engine_for(worker_host="process", max_prompts=6) as engine:
        await engine.load(spec)
        await all_ready(engine)
        expected = [await read(engine.submit(ask(each, params=params))) for each in prompts]
        await engine.unload("a")
        forget_pages()  # they are to be computed again, with the same answers
        await engine.load(spec)
        await all_ready(engine)
        hold.begin()
        reading = [asyncio.create_task(read(engine.submit(ask(each, params=params)))) for each in prompts]
        await until(lambda: all(row.output_tokens > 20 for row in engine.publish().requests[: len(prompts)]))
        (worker,) = engine.publish().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        hold.end()
        answers = await asyncio.gather(*reading)
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
        (worker,) = engine.publish().workers
        assert worker.restarts == 1
        whole_pages = sum(len(each) // 16 * 16 for each in prompts)
        assert worker.stats.restored_tokens >= (whole_pages if kv_host_gib else 0)
        assert worker.stats.prefix_hit_tokens == 0, "they go on, and are no new requests"
        assert worker.stats.prompt_tokens_computed <= sum(len(each) % 16 for each in prompts)


async def test_a_tier_that_stops_working_is_an_alert(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_folder.os, "writev", full)
    async with engine_for() as engine:
        await engine.load(disk_spec(llama, tmp_path / "kv", threads=1))
        for salt in range(2):
            await read(engine.submit(ask(prompt(salt, 60), max_tokens=40)))
        await until(lambda: engine.publish().alerts)
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.level) == ("kv_tier", "warning")
        assert alert.text.startswith("KV pages are not kept in the disk tier: No space left on device (")


async def test_a_worker_begins_again_though_the_folder_of_a_tier_cannot_be_used_any_more(
    llama: Path, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    async with engine_for(worker_host="process") as engine:
        await engine.load(disk_spec(llama, tmp_path / "kv", threads=1))
        await all_ready(engine)
        first = await read(engine.submit(ask(prompt(0, 60), params=params)))
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").write_text("no folder")
        (worker,) = engine.publish().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: [(each.state, each.restarts) for each in engine.publish().workers] == [("ready", 1)])
        again = await read(engine.submit(ask(prompt(0, 60), params=params)))
        assert again.token_ids == first.token_ids
        await until(lambda: [each.cause for each in engine.publish().alerts if each.cause == "kv_tier"])
        (alert,) = [each for each in engine.publish().alerts if each.cause == "kv_tier"]
        assert alert.text.startswith("the folder of the disk tier of the KV cache cannot be used: ")


async def test_other_models_answer_while_the_folder_of_a_tier_does_not(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def wait(spec: ModelSpec) -> bytes:
        assert answers.wait(60)
        return b"salt"

    async with engine_for() as engine:
        await engine.load(host_spec(llama, "a"))
        monkeypatch.setattr(manager, "tier_salt", wait)
        loading = asyncio.create_task(engine.load(disk_spec(llama, tmp_path / "kv", name="b"), beside=True))
        answer = await read(engine.submit(ask(prompt(0, 20), max_tokens=4, model="a")))
        assert len(answer.token_ids) == 4
        assert not loading.done()
        answers.set()
        await loading
