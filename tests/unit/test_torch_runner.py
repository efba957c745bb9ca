"""The runner's promises: a sequence's tokens do not depend on how or beside whom it is fed; memory is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine.backends import torch_device
from engine.backends.base import LoadProgress
from engine.backends.common.native_build import InstructionSet
from engine.backends.torch.device_memory import pick_device
from engine.backends.torch.native import library
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.backends.torch.weights.model_loader import pick_dtype
from engine.config import ModelSpec
from engine.errors import InsufficientMemory, InvalidRequest
from tests.fakes.oracle import PAGE_TOKENS, Driver, Running, ignore_progress, load_runner, never
from tests.fakes.tiny_models import make_tiny_model

STEPS = 20
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2-mixed-windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """One tiny model of each kind of attention, in float32."""
    return load_runner(make_tiny_model(tmp_path_factory.mktemp(request.param), **MODELS[request.param]))


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(13 * position + 7 * salt) % 300 + 3 for position in range(length)]


def alone(runner: ModelRunner, tokens: list[int], steps: int = STEPS) -> Running:
    """The reference: the prompt whole, then one token at a time, in a batch of one."""
    driver = Driver(runner)
    sequence = driver.add(tokens)
    driver.greedy([sequence], steps)
    return sequence


def assert_same(found: Running, expected: Running) -> None:
    assert found.tokens == expected.tokens
    torch.testing.assert_close(found.logits[-1], expected.logits[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, PAGE_TOKENS, 17, 40])
def test_a_prompt_fed_in_chunks_gives_the_tokens_of_the_whole(runner: ModelRunner, chunk: int) -> None:
    driver = Driver(runner)
    sequence = driver.add(prompt(41))
    while len(sequence.tokens) - sequence.computed > chunk:
        driver.feed((sequence, chunk))
    driver.greedy([sequence], STEPS)
    assert_same(sequence, alone(runner, prompt(41)))


def test_sequences_decoded_together_give_the_tokens_they_give_alone(runner: ModelRunner) -> None:
    lengths = [1, 2, 9, 16, 17, 40, 41, 100, 160]
    driver = Driver(runner)
    sequences = [driver.add(prompt(length, salt=length), room=STEPS) for length in lengths]
    driver.greedy(sequences, STEPS)
    for sequence, length in zip(sequences, lengths, strict=True):
        assert_same(sequence, alone(runner, prompt(length, salt=length)))


def test_prefill_chunks_and_decodes_share_a_step_without_touching_each_other(runner: ModelRunner) -> None:
    driver = Driver(runner)
    decoding, long, short = driver.add(prompt(9, 1)), driver.add(prompt(70, 2)), driver.add(prompt(5, 3))
    driver.greedy([decoding], 4)
    for length in (33, 20):
        row = driver.feed((long, length), (decoding, None))[1]
        decoding.tokens.append(int(row.argmax()))
    driver.greedy([short, decoding, long], 8)
    assert_same(decoding, alone(runner, prompt(9, 1), 14))
    assert_same(long, alone(runner, prompt(70, 2), 8))
    assert_same(short, alone(runner, prompt(5, 3), 8))


def test_a_prefix_computed_by_another_sequence_gives_the_same_tokens(runner: ModelRunner) -> None:
    driver = Driver(runner)
    first, second = driver.add(prompt(40)), driver.add(prompt(40) + prompt(9, 5))
    driver.feed((first, None))
    shared = 40 // PAGE_TOKENS
    second.pages[:shared] = first.pages[:shared]
    second.computed = shared * PAGE_TOKENS
    driver.greedy([second], STEPS)
    assert_same(second, alone(runner, prompt(40) + prompt(9, 5)))


def test_a_preempted_sequence_goes_on_with_the_same_tokens_in_other_pages(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sequence = driver.add(prompt(30))
    driver.greedy([sequence], 7)
    resumed = driver.add(sequence.tokens)
    driver.greedy([resumed], STEPS - 7)
    assert_same(resumed, alone(runner, prompt(30)))


def test_pages_that_another_sequence_left_full_do_not_leak_into_a_new_one(runner: ModelRunner) -> None:
    driver = Driver(runner)
    old = driver.add(prompt(60, 8))
    driver.greedy([old], 4)
    reused = Running(prompt(21), old.pages)
    driver.greedy([reused], STEPS)
    assert_same(reused, alone(runner, prompt(21)))


def test_only_chunks_that_sample_get_logits_in_their_order(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sequences = [driver.add(prompt(length, length)) for length in (30, 4, 12)]
    chunks = [sequence.chunk() for sequence in sequences]
    both = runner.forward(chunks)
    silent = type(chunks[1])(chunks[1].token_ids, chunks[1].start, chunks[1].pages, sample=False)
    torch.testing.assert_close(runner.forward([chunks[0], silent, chunks[2]]), both[[0, 2]], atol=1e-5, rtol=1e-5)
    assert runner.forward([silent]).shape == (0, runner.config.vocab_size)
    assert both.dtype == torch.float32


def test_pages_beyond_the_free_memory_are_refused_with_the_numbers(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path))
    with pytest.raises(InsufficientMemory, match="KV pages of 16 tokens need") as refusal:
        runner.allocate_kv(10**12, 16, report=ignore_progress)
    details = refusal.value.details
    assert isinstance(details["needed_bytes"], int) and isinstance(details["free_bytes"], int)
    assert details["needed_bytes"] == 10**12 * 16 * runner.kv_bytes_per_token()
    assert details["short_bytes"] == details["needed_bytes"] - details["free_bytes"]
    assert details["device"] == "cpu"
    assert runner.kv_bytes == 0


def test_weights_that_do_not_fit_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 1000)
    read: list[LoadProgress] = []
    with pytest.raises(InsufficientMemory, match="the weights need") as refusal:
        spec = ModelSpec(path=tmp_path, name="tiny", dtype="float32", device="cpu")
        ModelRunner.load(make_tiny_model(tmp_path), spec, report=read.append, cancelled=never)
    assert refusal.value.details["free_bytes"] == 1000
    assert not [progress for progress in read if progress.phase == "weights"]


def test_kv_pages_are_accounted_and_reported_in_bytes(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path))
    seen: list[LoadProgress] = []
    held = runner.allocate_kv(10, 16, report=seen.append)
    assert held == runner.kv_bytes == 10 * 16 * runner.kv_bytes_per_token()
    assert runner.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4
    assert (seen[-1].phase, seen[-1].done, seen[-1].total) == ("kv_cache", held, held)


def test_weights_and_parameters_are_counted_as_the_folder_has_them(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path, tie=True))
    assert runner.weights_bytes == 4 * runner.parameters
    assert runner.parameters == 320 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)


def test_unloading_twice_is_fine_and_using_an_unloaded_model_is_an_error(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path))
    chunk = Driver(runner).add(prompt(3)).chunk()
    runner.unload()
    runner.unload()
    assert runner.kv_bytes == 0
    with pytest.raises(RuntimeError, match="needs a loaded model"):
        runner.forward([chunk])


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cuda:x", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"device is {name}; this machine has cpu"):
        pick_device(name)


def test_dtype_auto_is_the_stored_one_on_cuda_and_a_fast_one_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert pick_dtype("auto", "float16", torch.device("cuda", 0), kernels=False) == torch.float16
    assert pick_dtype("auto", "float16", cpu, kernels=True) == torch.bfloat16
    monkeypatch.setattr(model_loader, "native_bfloat16", lambda: False)
    assert pick_dtype("auto", "bfloat16", cpu, kernels=False) == torch.float32
    assert pick_dtype("float32", "bfloat16", cpu, kernels=True) == torch.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_batches_give_logits_close_to_those_alone(tmp_path: Path, dtype: str) -> None:
    runner = load_runner(make_tiny_model(tmp_path, dtype=dtype), dtype=dtype)
    driver = Driver(runner)
    sequences = [driver.add(prompt(length, length)) for length in (40, 3, 17, 100)]
    together = driver.feed(*((sequence, None) for sequence in sequences))
    for row, sequence in zip(together, sequences, strict=True):
        single = Driver(runner).add(sequence.tokens)
        torch.testing.assert_close(row, runner.forward([single.chunk()])[0], atol=0.15, rtol=0.05)


def test_a_load_that_has_no_use_for_the_kernels_does_not_wait_for_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(isa: InstructionSet, *_: object) -> NoReturn:
        raise AssertionError(f"the kernels for {isa} were wanted")

    monkeypatch.setattr(library, "native_isa", lambda: "avx2")
    monkeypatch.setattr(library, "_load_or_build", wanted)
    runner = load_runner(make_tiny_model(tmp_path), dtype="float16")
    assert runner.attention is not None
    assert (runner.dtype_name, runner.attention.name) == ("float16", "gathered")
    assert "not float16" in runner.attention.reason
    with pytest.raises(AssertionError, match="avx2 were wanted"):
        load_runner(tmp_path, dtype="float32")


def test_a_load_reports_inspection_before_weights(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    spec = ModelSpec(path=tmp_path, name="tiny", dtype="float32", device="cpu")
    ModelRunner.load(make_tiny_model(tmp_path), spec, report=seen.append, cancelled=never)
    phases = [progress.phase for progress in seen]
    assert phases == sorted(phases, key=("inspect", "weights").index)
    assert set(phases) == {"inspect", "weights"}


def test_settings_are_refused_before_the_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="attention"):
        load_runner(tmp_path / "nowhere", attention="triton")


def test_an_allocation_that_fails_in_torch_is_told_in_our_words() -> None:
    device = torch.device("cpu")
    with pytest.raises(InsufficientMemory, match="the weights need"), torch_device.room_for(1, device, "the weights"):
        torch.empty(1 << 50)


def test_an_allocation_that_fails_outside_torch_s_allocator_is_a_lack_of_memory_too() -> None:
    with pytest.raises(InsufficientMemory), torch_device.room_for(1, torch.device("cpu"), "the weights"):
        raise torch.AcceleratorError("CUDA error: out of memory")
    with pytest.raises(torch.AcceleratorError), torch_device.room_for(1, torch.device("cpu"), "the weights"):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
