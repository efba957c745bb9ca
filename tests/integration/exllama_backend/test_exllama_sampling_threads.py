"""Threads that sample for the library's own generator: each computes alone, whatever the worker's own may use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from engine.backends.exllama.load import ModelAndCache
from engine.backends.exllamav2.generator import GeneratorMaker, LoadAllocations
from tests.fakes.exllama_kernels import ByteTokenizer, PagedTokens, TokenModel, real_modules
from tests.fakes.exllama_model import FakeGpus

VOCAB_SIZE = 64
LARGE = 200_000
"""Elements from which on torch shares a reduction out among its threads."""


@pytest.fixture(params=[False, True], ids=["first", "second"])
def generator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The library's generator as a load makes it, and the one that takes its place."""
    real = real_modules()
    model = TokenModel(vocab_size=VOCAB_SIZE, max_seq_len=1024, max_input_len=256)
    plan = SimpleNamespace(
        library=SimpleNamespace(generator=real.dynamic.ExLlamaV2DynamicGenerator),
        draft_tokens=0,
        max_prompts=8,
        is_packed=True,
        spec=SimpleNamespace(ngram_draft=False),
    )
    holdings = LoadAllocations(FakeGpus(0), [ModelAndCache(model, PagedTokens(4096))])
    make = GeneratorMaker(plan, ByteTokenizer(VOCAB_SIZE), holdings)  # type: ignore[arg-type]
    yield [make() for _ in range(1 + request.param)][-1]
    holdings.free()


@pytest.fixture
def four_threads() -> Iterator[None]:
    """torch may use four threads for what the test's thread computes."""
    real_modules()  # its import leaves one
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_jobs_are_sampled_on_threads_of_which_each_computes_alone(generator: Any) -> None:
    real, found = real_modules(), []
    for number in range(8):
        job = real.dynamic.ExLlamaV2DynamicJob(
            input_ids=torch.tensor([[3 + number, 5, 7]]),
            max_new_tokens=3,
            gen_settings=real.sampler.ExLlamaV2Sampler.Settings.greedy(),
        )
        receive = job.receive_logits

        def received(logits: Tensor, receive: Any = receive) -> Any:
            found.append((threading.get_ident(), torch.get_num_threads()))
            return receive(logits)

        job.receive_logits = received
        generator.enqueue(job)
    while generator.num_remaining_jobs():
        generator.iterate()
    sampling = [each for each in found if each[0] != threading.get_ident()]
    assert len(sampling) > 8
    assert {threads for _, threads in sampling} == {1}
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_sampling_starts_no_more_threads_than_its_pool_has(generator: Any) -> None:
    together = threading.Barrier(16)

    def work(before: int) -> int:
        together.wait()
        torch.ones(LARGE).amax()
        together.wait()
        return psutil.Process().num_threads() - before

    torch.ones(LARGE).amax()  # the threads that this one computes with are there
    before = psutil.Process().num_threads()
    started = [each.result() for each in [generator.sampling_pool.submit(work, before) for _ in range(16)]]
    assert max(started) <= 16
