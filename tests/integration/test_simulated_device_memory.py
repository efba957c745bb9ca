"""Workers on simulated devices: they really compute, and what they may take of a device is what they were given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.base import BackendRequest, BackendStats, LoadedModel
from engine.backends.torch.backend import TorchBackend
from engine.config import AttentionName, DeviceShare, ModelSpec, SamplingParams
from engine.devices import simulated_readings
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload
from engine.placement.plan import place
from engine.worker_process.hosts import ProcessHost, ThreadHost, WorkerHost
from engine.worker_process.protocol import Load, Loaded, LoadFailed, LogLine, StepBatch, Submit
from tests.fakes.backend import PATIENCE_S
from tests.fakes.oracle import ignore_progress, never
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.worker import Probe

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie": True},
    "short context": {"max_position_embeddings": 24},
    "windows": {"architecture": "MistralForCausalLM", "sliding_window": 32, "dtype": "bfloat16"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "vocab_size": 3000},
}
LAYERS, PROMPTS, TOKENS = 4, 8, 40
PLENTY = 64 << 20
StartWorker = Callable[..., Awaitable[Probe]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Starts a worker with the real backend, in a thread unless told otherwise."""
    hosts: list[WorkerHost] = []

    async def start(host_type: type[ThreadHost | ProcessHost] = ThreadHost) -> Probe:
        hosts.append(host_type(f"w{len(hosts)}"))
        return await Probe(hosts[-1]).start()

    yield start
    for host in hosts:
        await host.stop(PATIENCE_S)


def load(folder: Path, *shares: DeviceShare, attention: AttentionName = "auto") -> Load:
    spec = ModelSpec(
        path=folder, name="tiny", dtype="float32", kv_cache_tokens=4096, shares=shares, attention=attention
    )
    return Load(spec=spec, max_prompts=PROMPTS, step_tokens=64, page_tokens=16, threads=1)


def plenty(*layers: int) -> tuple[DeviceShare, ...]:
    return tuple(
        DeviceShare(device=f"sim:{number}", layers=count, working_bytes=PLENTY) for number, count in enumerate(layers)
    )


async def loaded(worker: Probe, folder: Path, *shares: DeviceShare, attention: AttentionName = "auto") -> LoadedModel:
    worker.send(load(folder, *shares, attention=attention))
    return (await worker.wait_for(Loaded)).model


async def refused(worker: Probe, folder: Path, *shares: DeviceShare) -> LoadFailed:
    worker.send(load(folder, *shares))
    return await worker.wait_for(LoadFailed)


async def answers(worker: Probe, length: int) -> dict[str, list[int]]:
    """What PROMPTS requests at once get, each after a prompt of `length` tokens."""
    found: dict[str, list[int]] = {str(number): [] for number in range(PROMPTS)}
    for name in found:
        prompt_ids = [(13 * position + 7 * int(name)) % 300 + 3 for position in range(length)]
        params = SamplingParams(temperature=0, seed=0, max_tokens=TOKENS, ignore_eos=True)
        worker.send(Submit(request=BackendRequest(id=name, prompt_ids=prompt_ids, params=params)))
    async for output in worker.outputs(*found):
        found[output.request_id] += output.token_ids
        assert output.finish in (None, "length"), output.error
    return found


def stats(worker: Probe) -> BackendStats:
    """The last that it said."""
    return [event.stats for event in worker.events if isinstance(event, StepBatch)][-1]


@pytest.mark.parametrize("host_type", [ThreadHost, ProcessHost])
async def test_a_model_that_fits_no_one_card_is_served_from_two(
    folder: Path, start_worker: StartWorker, host_type: type[ThreadHost | ProcessHost]
) -> None:
    whole = await start_worker()
    [all_of_it] = (await loaded(whole, folder, *plenty(LAYERS))).shares
    card_bytes = all_of_it.total_bytes * 3 // 4

    parted = await start_worker(host_type)
    failed = await refused(parted, folder, DeviceShare(device="sim:0", layers=LAYERS, weights_bytes=card_bytes))
    assert failed.error.code == "insufficient_memory"
    details = failed.error.details
    assert details["device"] == "sim:0"
    assert details["short_bytes"] == details["needed_bytes"] - details["free_bytes"] > 0

    halves = [DeviceShare(device=f"sim:{number}", layers=2, weights_bytes=card_bytes) for number in range(2)]
    model = await loaded(parted, folder, *halves)
    assert model.devices == ("sim:0", "sim:1")
    assert [share.layers for share in model.shares] == [2, 2]
    assert all(share.total_bytes <= card_bytes for share in model.shares)
    assert sum(share.kv_bytes for share in model.shares) == model.kv_bytes == all_of_it.kv_bytes
    assert sum(share.weights_bytes for share in model.shares) == model.weights_bytes == all_of_it.weights_bytes
    assert await answers(parted, 50) == await answers(whole, 50)


@pytest.mark.parametrize("part", ["weights", "KV pages", "working memory"])
async def test_whatever_exceeds_a_cards_budget_fails_the_load_with_the_numbers(
    folder: Path, start_worker: StartWorker, part: str
) -> None:
    worker = await start_worker()
    [share] = (await loaded(worker, folder, *plenty(LAYERS))).shares
    budget = {
        "weights": share.weights_bytes,
        "KV pages": share.weights_bytes + share.kv_bytes,
        "working memory": share.total_bytes,
    }[part]
    failed = await refused(worker, folder, DeviceShare(device="sim:0", layers=LAYERS, weights_bytes=budget - 1))
    assert failed.error.code == "insufficient_memory"
    assert part in failed.error.message
    details = failed.error.details
    assert (details["device"], details["short_bytes"]) == ("sim:0", 1)
    assert (
        await loaded(worker, folder, DeviceShare(device="sim:0", layers=LAYERS, weights_bytes=budget + PLENTY))
    ).shares


async def test_a_budget_exceeded_in_a_step_makes_the_batch_smaller_and_everything_is_answered(
    folder: Path, start_worker: StartWorker
) -> None:
    """With attention that copies pages, and so takes more the longer answers become."""
    roomy = await start_worker()
    model = await loaded(roomy, folder, *plenty(1, 3), attention="gathered")
    expected = await answers(roomy, 400)
    assert stats(roomy).prompts_limit == 0

    tight = await start_worker()
    await loaded(
        tight,
        folder,
        *(msgspec.structs.replace(share, working_bytes=share.working_bytes * 5 // 4) for share in model.shares),
        attention="gathered",
    )
    assert await answers(tight, 400) == expected
    warnings = [event.message for event in tight.events if isinstance(event, LogLine)]
    assert [line for line in warnings if "ran out of memory" in line]
    assert 0 < stats(tight).prompts_limit < PROMPTS


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize(("step_tokens", "max_prompts"), [(16, 1), (64, 8), (512, 32)])
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_placement_gives_a_worker_is_what_its_load_takes(
    tmp_path: Path, cards: int, step_tokens: int, max_prompts: int, shape: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS, with_tokenizer=False, **SHAPES[shape])
    spec = ModelSpec(path=folder, name="tiny", backend="torch")
    workload = Workload(max_prompts=max_prompts, step_tokens=step_tokens, page_tokens=16)
    facts, devices = read_facts(spec), simulated_readings((0.25,) * cards)
    [placement] = place(1, facts, devices, spec, workload)
    if cards > 1:
        weights_bytes = sum(share.weights_bytes for share in placement.shares)
        spec = msgspec.structs.replace(spec, gpu_split_gb=(0.6 * weights_bytes / 2**30, 0.2))
        [placement] = place(1, facts, devices, spec, workload)
    placed = msgspec.structs.replace(
        spec, shares=placement.shares, kv_cache_tokens=placement.kv_tokens, device=placement.device
    )
    model = TorchBackend().load(
        placed,
        max_prompts=max_prompts,
        step_tokens=step_tokens,
        page_tokens=16,
        report=ignore_progress,
        cancelled=never,
    )
    assert len(model.shares) == len(placement.shares) == cards
    for planned, used in zip(placement.shares, model.shares, strict=True):
        assert (used.device, used.layers) == (planned.device, planned.layers)
        assert (used.weights_bytes, used.kv_bytes) == (planned.weights_bytes, planned.kv_bytes)
        assert 0 < used.working_bytes <= planned.working_bytes
