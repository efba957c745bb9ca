"""The torch backend where an implementation of paged attention reads the pages, as on CUDA: the same answers, and the
same ends where something fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.base import LoadProgress
from engine.backends.common.native_build import SWITCH
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from engine.errors import InvalidRequest, LoadCancelled
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.torch_backend.running import load_spec
from tests.integration.torch_backend.test_torch_backend import *  # noqa: F403
from tests.integration.torch_backend.test_torch_backend_failures import *  # noqa: F403

MODELS = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2-mixed-windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
}
CHOICE = Choice("gathered", "the test wants it")


@pytest.fixture(autouse=True)
def _over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every runner made in a test attends over pages, with the implementation that a CPU has."""
    monkeypatch.setattr(ModelRunner, "pick_attention", over_pages)


def over_pages(runner: ModelRunner, page_tokens: int) -> tuple[Choice, PagedAttention | None]:
    return CHOICE, gathered.paged_attention


def greedy(folder: Path, steps: int = 12) -> list[list[int]]:
    """Prompts fed in uneven chunks beside each other, then decoded."""
    driver = Driver(load_runner(folder))
    prompts = [[(13 * position + 7 * salt) % 300 + 3 for position in range(9 + 14 * salt)] for salt in range(4)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.feed(*((sequence, 5) for sequence in sequences))
    driver.feed((sequences[3], 20), (sequences[1], 3), (sequences[0], 1))
    driver.greedy(sequences, steps)
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize("name", MODELS)
def test_paged_attention_gives_the_greedy_tokens_of_gathered_pages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, **MODELS[name])
    over = greedy(folder)
    monkeypatch.undo()
    assert greedy(folder) == over


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_in_pages_are_attended_to_as_gathered_ones(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    # In one layer, as a last bit of the first may become another code of the second.
    folder = make_tiny_model(tmp_path, with_tokenizer=False, num_hidden_layers=1)

    def logits(attention: str) -> list[torch.Tensor]:
        driver = Driver(load_runner(folder, dtype="float16", cache_bits=bits, attention=attention))
        sequences = [driver.add([5 + at % 290 for at in range(length)]) for length in (19, 3)]
        driver.feed((sequences[0], 14))
        driver.feed((sequences[0], 5), (sequences[1], 3))
        for sequence in sequences:
            sequence.tokens.append(7)
        driver.feed(*((sequence, 1) for sequence in sequences))
        return [each for sequence in sequences for each in sequence.logits]

    monkeypatch.setattr(
        ModelRunner, "pick_attention", lambda runner, _: (CHOICE, implementation("triton", runner._heads))
    )
    monkeypatch.setattr(HeadCodec, "decode", lambda *_: pytest.fail("only the kernel decodes"))
    found = logits("auto")
    monkeypatch.undo()
    expected = logits("gathered")
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_no_step_needs_a_kernel_that_the_load_has_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import TritonAttention

    attention, reports = TritonAttention(), list[tuple[int, int]]()
    monkeypatch.setattr(attention, "_launch", lambda plan, q, *_: q.new_zeros(plan.out_shape))
    monkeypatch.setattr(attention, "_launch_chunks", lambda plan, q, *_: q.new_zeros(q.shape))
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *_: (CHOICE, attention))
    options = MODELS["qwen2-mixed-windows"]
    runner = load_runner(make_tiny_model(tmp_path, with_tokenizer=False, **options), dtype="float16")
    runner.prepare_attention(lambda done, total: reports.append((done, total)))
    assert reports == [(done, reports[-1][1]) for done in range(len(reports))]
    prepared = attention.variants
    driver = Driver(runner)
    sequences = [driver.add([5 + at % 290 for at in range(length)]) for length in (60, 9, 3, 1)]
    driver.feed((sequences[0], 40), (sequences[1], 5), (sequences[2], 1))
    driver.feed((sequences[0], 10), (sequences[1], 1))
    driver.greedy(sequences, 3)
    assert prepared and attention.variants == prepared


def test_a_load_compiles_the_kernels_of_attention_with_progress_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import TritonAttention

    attention = TritonAttention()
    monkeypatch.setattr(attention, "_launch", lambda plan, q, *_: q.new_zeros(plan.out_shape))
    monkeypatch.setattr(attention, "_launch_chunks", lambda plan, q, *_: q.new_zeros(q.shape))
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *_: (CHOICE, attention))
    spec = ModelSpec(path=make_tiny_model(tmp_path), name="tiny", dtype="float16", device="cpu", kv_cache_tokens=512)
    reports: list[LoadProgress] = []

    def cancelled() -> bool:
        return len(reports) > 2 and reports[-1].phase == "kernels" and reports[-1].done == 2

    def load() -> None:
        TorchBackend().load(
            spec,
            max_prompts=2,
            step_tokens=64,
            page_tokens=16,
            report=reports.append,
            cancelled=lambda: stops and cancelled(),
        )

    stops = False
    load()
    kernels = [(each.done, each.total) for each in reports if each.phase == "kernels"]
    assert kernels == [(done, len(kernels) - 1) for done in range(len(kernels))] and len(kernels) > 3
    stops = True
    reports.clear()
    with pytest.raises(LoadCancelled):
        load()
    assert reports[-1].done == 2


def test_the_step_is_planned_for_pages_alone(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path, with_tokenizer=False))
    driver = Driver(runner)
    long, short, other = driver.add(list(range(3, 43))), driver.add([5, 6, 7]), driver.add([9, 8])
    assert runner._planner is not None
    plan = runner._planner.plan([long.chunk(30), short.chunk(1), other.chunk(1)])
    assert plan.groups == () and plan.paged is not None
    chunks = plan.paged.chunks
    assert chunks is not None and chunks.q_lens == (1, 1, 30)
    assert (chunks.starts.tolist(), chunks.key_starts.tolist()) == ([0, 1, 2, 32], [0, 1, 2, 32])
    assert plan.paged.lengths.tolist() == [1, 1, 30] and plan.paged.block_table.shape == (3, 4)
    assert plan.paged.block_table[2].tolist() == long.pages[:4]
    decodes = runner._planner.plan([short.chunk(1), other.chunk(1)]).paged
    assert decodes is not None and decodes.chunks is None and decodes.block_table.shape == (2, 1)


def test_a_load_tells_which_attention_computes_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(path=make_tiny_model(tmp_path), name="tiny", dtype="float32", device="cpu", kv_cache_tokens=512)
    loaded = load_spec(TorchBackend(), spec)
    assert (loaded.attention, loaded.attention_reason) == (CHOICE.name, CHOICE.reason)
    monkeypatch.undo()
    monkeypatch.setenv(SWITCH, "0")
    loaded = load_spec(TorchBackend(), spec)
    assert loaded.attention == "gathered"
    assert loaded.attention_reason == (
        "no CUDA device; the native kernels cannot be used: "
        "they need Linux on x86-64, a CPU with AVX2, and that ERICLLM_NATIVE is not 0"
    )
    assert loaded.native is False


@pytest.mark.parametrize("attention", ["flash", "triton", "varlen"])
def test_an_attention_that_takes_cuda_is_refused_on_a_cpu(attention: str, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest,
        match="attention is not supported: the torch backend supports only native and gathered on a CPU",
    ):
        load_runner(tmp_path / "nowhere", attention=attention)
