"""A model over several devices computes what it computes on one, and every device's account is kept and enforced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import torch_device
from engine.backends.base import LoadProgress
from engine.backends.torch.device_memory import DeviceMemory, StepOutOfMemory
from engine.backends.torch.runner import ModelRunner
from engine.config import DeviceShare, ModelSpec
from engine.errors import InsufficientMemory, InvalidRequest
from tests.fakes.oracle import NUM_PAGES, PAGE_TOKENS, Driver, Running, ignore_progress, load_runner, never
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

pytestmark = pytest.mark.long

LAYERS = 3
MIB = 1 << 20
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ARCHITECTURES},
    "tied": {"tie": True},
    "mixed windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "experts": {"architecture": "Qwen2MoeForCausalLM", "mlp_only_layers": [1]},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = MODELS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, with_tokenizer=False, **settings)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS, with_tokenizer=False)


def shares(*layers: int, device: str = "sim:{}", budget_bytes: int = 64 * MIB) -> tuple[DeviceShare, ...]:
    """A share of each of several devices; {} stands for its number."""
    return tuple(
        DeviceShare(device=device.format(number), layers=count, working_bytes=budget_bytes)
        for number, count in enumerate(layers)
    )


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(13 * position + 7 * salt) % 300 + 3 for position in range(length)]


def answers(runner: ModelRunner) -> list[Running]:
    """Prefills in chunks and whole, decodes beside them, and a prefix taken over."""
    driver = Driver(runner)
    long, short, other = driver.add(prompt(70, 2)), driver.add(prompt(5, 3)), driver.add(prompt(40, 1))
    short.tokens.append(int(driver.feed((long, 33), (short, None))[1].argmax()))
    for sequence, row in zip((short, other), driver.feed((long, 20), (short, None), (other, None))[1:], strict=True):
        sequence.tokens.append(int(row.argmax()))
    driver.greedy([long, short, other], 8)
    return [long, short, other]


def assert_equal(found: list[Running], expected: list[Running]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logits) == len(other.logits)
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize(
    "split",
    [
        shares(1, 2),
        shares(2, 1),
        shares(1, 1, 1),
        shares(0, 3),
        shares(3, 0),
        shares(3),
        shares(1, 2, device="cpu"),
    ],
    ids=["1+2", "2+1", "1+1+1", "embedding alone", "head alone", "one", "cpu twice"],
)
def test_a_split_model_gives_the_logits_of_the_whole_to_the_bit(folder: Path, split: tuple[DeviceShare, ...]) -> None:
    whole = load_runner(folder, dtype="auto")
    parted = load_runner(folder, dtype="auto", shares=split, device="auto")
    assert_equal(answers(parted), answers(whole))


# --- accounts -------------------------------------------------------------------------------------------------------


def test_each_devices_share_tells_what_was_allocated_there(folder: Path) -> None:
    whole = load_runner(folder)
    parted = load_runner(folder, shares=shares(1, 2))
    answers(whole)
    answers(parted)
    [one] = whole.shares
    first, last = parted.shares
    assert (one.device, one.layers, first.device, first.layers, last.device, last.layers) == (
        "cpu",
        LAYERS,
        "sim:0",
        1,
        "sim:1",
        2,
    )
    assert (one.weights_bytes, one.kv_bytes) == (whole.weights_bytes, whole.kv_bytes)
    copied = parted.config.vocab_size * parted.config.hidden_size * 4 if parted.config.tie_embeddings else 0
    assert first.weights_bytes + last.weights_bytes == parted.weights_bytes == one.weights_bytes + copied
    assert (first.kv_bytes, last.kv_bytes) == (one.kv_bytes // 3, one.kv_bytes // 3 * 2)
    assert parted.kv_bytes == one.kv_bytes == NUM_PAGES * PAGE_TOKENS * whole.kv_bytes_per_token()
    assert 0 < first.working_bytes <= last.working_bytes <= one.working_bytes


def test_a_model_that_fits_only_split_is_refused_on_one_device_with_the_numbers(llama: Path) -> None:
    room = load_runner(llama).weights_bytes * 3 // 4
    with pytest.raises(InsufficientMemory, match="the weights need 1 MiB on sim:0, which has 0 MiB free") as refused:
        load_runner(llama, shares=shares(LAYERS, budget_bytes=room))
    details = refused.value.details
    assert (details["device"], details["free_bytes"]) == ("sim:0", room)
    assert details["short_bytes"] == details["needed_bytes"] - room > 0
    spec = ModelSpec(path=llama, name="tiny", dtype="float32", shares=shares(1, 2, budget_bytes=room))
    assert ModelRunner.load(llama, spec, report=ignore_progress, cancelled=never).devices == ("sim:0", "sim:1")


def test_what_cannot_fit_on_the_second_device_is_refused_before_anything_is_read(llama: Path) -> None:
    read: list[LoadProgress] = []
    split = (shares(1)[0], DeviceShare(device="sim:1", layers=2, weights_bytes=1000))
    spec = ModelSpec(path=llama, name="tiny", dtype="float32", shares=split)
    with pytest.raises(InsufficientMemory, match="the weights need 1 MiB on sim:1, which has 0 MiB free"):
        ModelRunner.load(llama, spec, report=read.append, cancelled=never)
    assert not [progress for progress in read if progress.phase == "weights"]


def test_kv_pages_beyond_a_devices_budget_are_refused_by_device_and_nothing_stays_entered(llama: Path) -> None:
    runner = load_runner(llama, shares=shares(1, 2, budget_bytes=8 * MIB))
    pages = 8 * MIB // (PAGE_TOKENS * runner.kv_bytes_per_token() // LAYERS)
    with pytest.raises(InsufficientMemory, match=f"{pages} KV pages of 8 tokens for 1 of 3 layers need 8 MiB on sim:0"):
        runner.allocate_kv(pages, PAGE_TOKENS, report=ignore_progress)
    assert runner.kv_bytes == 0
    runner.allocate_kv(NUM_PAGES, PAGE_TOKENS, report=ignore_progress)
    assert sum(share.kv_bytes for share in runner.shares) == runner.kv_bytes


def test_room_for_kv_pages_is_that_of_the_device_with_least_for_its_layers(llama: Path) -> None:
    split = (
        DeviceShare(device="sim:0", layers=1, kv_bytes=3 * MIB),
        DeviceShare(device="sim:1", layers=2, kv_bytes=4 * MIB),
    )
    spec = ModelSpec(path=llama, name="tiny", dtype="float32", shares=split)
    runner = ModelRunner.load(llama, spec, report=ignore_progress, cancelled=never)
    first, last = runner.shares
    assert runner.free_bytes() == min((3 * MIB - first.weights_bytes) * 3, (4 * MIB - last.weights_bytes) * 3 // 2)


def test_a_simulated_device_takes_no_more_than_the_ram_there_is(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 1000)
    with pytest.raises(InsufficientMemory, match="on cpu, which has 0 MiB free"):
        load_runner(llama, shares=shares(LAYERS, budget_bytes=10**12))


def test_a_step_that_a_devices_budget_cannot_hold_runs_out_of_memory_and_a_smaller_one_does_not(llama: Path) -> None:
    runner = load_runner(llama, shares=shares(1, 2, budget_bytes=4 * MIB))
    driver = Driver(runner)
    many = [driver.add(prompt(40, salt), room=0) for salt in range(30)]
    with pytest.raises(StepOutOfMemory, match="MiB of working memory on sim:") as failed:
        driver.feed(*((sequence, None) for sequence in many))
    assert isinstance(failed.value, torch.OutOfMemoryError)
    assert failed.value.needed_bytes > failed.value.free_bytes > 0
    driver.feed((many[0], None))
    assert_equal([many[0]], [alone(llama, prompt(40, 0))])


def test_working_memory_on_cuda_is_what_the_allocator_reserved_beyond_weights_and_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1000)
    account = DeviceMemory("cuda:1", torch.device("cuda", 1))
    assert called == ["init", "reset cuda:1"]
    account.weights_bytes, account.kv_bytes = 600, 300
    account.begin_step(10**12)
    assert account.working_bytes == 100


def alone(folder: Path, tokens: list[int]) -> Running:
    driver = Driver(load_runner(folder))
    sequence = driver.add(tokens)
    driver.feed((sequence, None))
    return sequence


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (shares(1, 1), r"the shares give 1 \+ 1 layers to sim:0, sim:1; the model has 3"),
        (shares(2, 2), r"2 \+ 2 layers"),
        (shares(4, -1), r"4 \+ -1 layers"),
        (shares(2), "give 2 layers to sim:0; the model has 3"),
        (shares(0, 0), r"0 \+ 0 layers"),
        ((*shares(1), DeviceShare(device="cpu", layers=2)), "devices of one kind, not of several: sim:0, cpu"),
        (shares(1, 2, device="tpu:{}"), "device is tpu:0; this machine has cpu"),
        (shares(1, 2, device="sim:x{}"), "device is sim:x0; simulated devices are sim:0, sim:1 and so on"),
    ],
)
def test_shares_that_cannot_be_are_refused(llama: Path, split: tuple[DeviceShare, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_runner(llama, shares=split)


def test_a_simulated_device_without_a_share_is_refused(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="device is sim:0, without a share: simulated devices need shares"):
        load_runner(llama, device="sim:0")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gpu_split_gb": (1.0,)}, "gpu_split is not supported: the torch backend runs on the CPU"),
        ({"tensor_parallel": True}, "tensor_parallel is not supported"),
        ({"attention": "triton", "shares": shares(LAYERS)}, "attention is not supported"),
    ],
)
def test_settings_that_mean_nothing_there_are_refused(llama: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_runner(llama, **settings)


def test_gpu_settings_mean_something_on_simulated_devices(llama: Path) -> None:
    runner = load_runner(llama, shares=shares(1, 2), gpu_split_gb=(1.0, 1.0), gpu_balance=True)
    assert runner.devices == ("sim:0", "sim:1")
