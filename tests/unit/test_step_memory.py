"""The bound on a step's working memory, held against what torch's allocator really gives out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.common.step_memory import largest_step
from engine.backends.sampling.sampler import SampleRow, sample
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.torch.backend import CPU_WARM_UP_TOKENS, warm_up
from engine.backends.torch.model.step_plan import HeadCounts, StepPlanner
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.prompt_logprobs import PromptLogprobs
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits, ModelSpec, SamplingParams
from tests.fakes.allocations import peak_bytes
from tests.fakes.oracle import ignore_progress, never
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

PAGE_TOKENS, PAGES = 16, 1500
PARAMS = SamplingParams(top_p=0.9, seed=0, logprobs=5, repetition_penalty=1.2, logit_bias={3: 1.0})
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128},
    "wide MLP, bfloat16": {"hidden_size": 256, "intermediate_size": 2048, "dtype": "bfloat16"},
    "large vocabulary": {"vocab_size": 8000},
    "all heads have keys": {"hidden_size": 512, "num_key_value_heads": 8, "dtype": "bfloat16"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "hidden_size": 128},
    "experts": {"architecture": "MixtralForCausalLM", "hidden_size": 128},
    "many small experts, bfloat16": {
        "architecture": "Qwen2MoeForCausalLM",
        "hidden_size": 256,
        "num_experts": 60,
        "dtype": "bfloat16",
    },
    "windows": {"architecture": "MistralForCausalLM", "sliding_window": 128},
    "keys and values of 8 bits": {
        "hidden_size": 256,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
        "cache_bits": 8,
    },
    "keys and values of 8 bits, gathered": {
        "hidden_size": 256,
        "dtype": "bfloat16",
        "cache_bits": 8,
        "attention": "gathered",
    },
    "keys and values of 4 bits": {"hidden_size": 512, "num_key_value_heads": 8, "cache_bits": 4},
    "keys and values of 4 bits, gathered": {
        "hidden_size": 512,
        "num_key_value_heads": 8,
        "cache_bits": 4,
        "attention": "gathered",
    },
}
STEPS: dict[str, list[tuple[int, int]]] = {
    "a prompt": [(512, 0)],
    "a late chunk": [(64, 2000)],
    "a later chunk": [(300, 700)],
    "decodes": [(1, 500)] * 32,
    "one decode": [(1, 3000)],
    "a mixture": [(1, 200), (1, 900), (30, 100), (17, 0), (400, 300), (3, 50)],
    "many decodes": [(1, 20)] * 100,
}
"""(tokens fed, tokens before them) of each sequence."""


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    sizes = {"num_attention_heads": 8, "max_position_embeddings": 4096, "with_tokenizer": False}
    settings = sizes | MODELS[request.param]
    asked = {name: settings.pop(name) for name in ("cache_bits", "attention") if name in settings}
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), **settings)
    spec = ModelSpec(path=folder, name="tiny", dtype=settings.get("dtype", "float32"), device="cpu", **asked)
    return ModelRunner.load(folder, spec, report=ignore_progress, cancelled=never)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_takes_no_more_than_its_bound_and_about_that(runner: ModelRunner, step: str) -> None:
    runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress)
    draw = random.Random(0)
    chunks = [
        ChunkInput([5] * count, start, [draw.randrange(PAGES) for _ in range(-(-(start + count) // PAGE_TOKENS))], True)
        for count, start in STEPS[step]
    ]
    rows = [SampleRow(PARAMS, prompt_ids=[0] * 50) for _ in chunks]

    @torch.inference_mode()
    def work() -> None:
        sample(runner.forward(chunks), rows)

    taken = peak_bytes(work)
    [share] = runner.shares
    assert taken <= share.working_bytes <= 2.75 * taken


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_that_the_kernel_reads_take_no_more_of_a_step_than_plain_pages(
    bits: CacheBits, step: str, tmp_path: Path
) -> None:
    if find_kernels(torch.bfloat16, torch.device("cpu")).library is None:
        pytest.skip("the native kernels do not run here")
    folder = make_tiny_model(tmp_path, max_position_embeddings=4096, with_tokenizer=False)
    chunks = [ChunkInput([5] * count, start, range(PAGES), True) for count, start in STEPS[step]]

    def foreseen(bits: CacheBits) -> int:
        spec = ModelSpec(path=folder, name="tiny", dtype="bfloat16", device="cpu", cache_bits=bits)
        runner = ModelRunner.load(folder, spec, report=ignore_progress, cancelled=never)
        runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress)
        runner.account_for(chunks)
        [share] = runner.shares
        return share.working_bytes

    assert foreseen(bits) == foreseen(16)


def test_telling_of_a_prompt_takes_no_more_than_its_bound_and_nothing_beyond_the_largest_step(
    runner: ModelRunner,
) -> None:
    runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress)
    pages = list(range(-(-512 // PAGE_TOKENS)))
    prompt = ChunkInput([5] * 512, 0, pages, sample=True)
    answers = [ChunkInput([5], 511, pages, sample=True)] * 8
    runner.forward([prompt, *answers])
    [before] = runner.shares
    telling = PromptLogprobs(prompt.token_ids, 5)
    told = replace(prompt, sample=False, prompt_states=range(511))

    @torch.inference_mode()
    def work() -> None:
        runner.forward([told], lambda index, states: telling.read(told, states))

    taken = peak_bytes(work)
    [share] = runner.shares
    assert taken <= share.working_bytes == before.working_bytes
    assert telling.add()
    assert len(telling.logprobs) == 512


def test_on_a_cpu_the_warm_up_counts_the_largest_step_and_computes_a_small_one(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    forward = runner.forward

    def noted(chunks: Sequence[ChunkInput]) -> Tensor:
        computed.append(sum(len(chunk.token_ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(runner, "forward", noted)
    runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress)
    took_s = warm_up(runner, PagePool(PAGES, PAGE_TOKENS, b"salt"), max_answers=4, step_tokens=512)
    [share] = runner.shares
    assert computed == [CPU_WARM_UP_TOKENS + 3] and took_s > 0
    pages = list(range(-(-512 // PAGE_TOKENS)))
    forward([ChunkInput([0] * 512, 0, pages, sample=True), *[ChunkInput([0], 511, pages, sample=True)] * 3])
    [after] = runner.shares
    assert share.working_bytes == after.working_bytes


@given(st.integers(16, 600), st.integers(1, 100), st.integers(1, 700), st.sampled_from([4, 16, 256]))
def test_no_warm_up_is_larger_than_the_largest_step(
    step_tokens: int, max_prompts: int, context: int, page_tokens: int
) -> None:
    longest = min(step_tokens, context)
    pages = list(range(-(-longest // page_tokens)))
    chunks = [ChunkInput([0] * longest, 0, pages, sample=True)] * max(1, step_tokens // longest)
    chunks += [ChunkInput([0], longest - 1, pages, sample=True)] * max(0, max_prompts - len(chunks))
    planner = StepPlanner(
        frozenset({None}), HeadCounts(2, 1, 16), page_tokens, dtype=torch.float32, device=torch.device("cpu")
    )
    found = planner.plan(chunks).sizes(page_tokens)
    bound = largest_step(step_tokens=step_tokens, max_prompts=max_prompts, context=context, page_tokens=page_tokens)
    assert found.rows <= bound.rows
    assert found.sampled <= bound.sampled
    assert found.padded <= bound.padded
    assert found.gathered <= bound.gathered
