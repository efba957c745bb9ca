"""All blocks in one native call give to the bit what they give one by one, and only where nothing else is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits
from tests.fakes.families import make_family
from tests.fakes.oracle import load_runner
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

PAGE_TOKENS = 16


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    if find_kernels(torch.float32, torch.device("cpu")).library is None:
        pytest.skip("the native kernels do not run here")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def loaded(folder: Path, dtype: str, bits: CacheBits = 16) -> ModelRunner:
    runner = load_runner(folder, dtype=dtype, cache_bits=bits)
    runner.allocate_kv(8, PAGE_TOKENS, report=lambda progress: None)
    return runner


def steps(runner: ModelRunner) -> Tensor:
    """Logits of two prompts in one step, then of a decode beside the rest of a prompt."""
    first = [
        ChunkInput(list(range(5, 26)), 0, [4, 1], sample=True),
        ChunkInput(list(range(40, 70)), 0, [0, 2, 5], sample=True),
    ]
    then = [ChunkInput([9], 21, [4, 1], sample=True), ChunkInput([8, 7, 6], 30, [0, 2, 5], sample=True)]
    return torch.cat([runner.forward(chunks) for chunks in (first, then)])


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "olmo2", "granite"])
def test_blocks_in_one_call_give_what_they_give_one_by_one(
    model: str, dtype: str, bits: CacheBits, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path) if model == "llama" else make_family(tmp_path, model)
    runner = loaded(folder, dtype, bits)
    decoder = runner._decoder
    assert decoder is not None
    if runner.attention is None or runner.attention.name != "native":
        pytest.skip("this model attends otherwise here")
    # Norms after the products, as olmo2 has them, are no part of them.
    assert (decoder.stack is not None) == (model != "olmo2")
    together = steps(runner)
    runner._decoder = replace(decoder, stack=None)
    assert torch.equal(together, steps(runner))


def test_new_pages_are_what_the_blocks_read(tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "float32")
    expected = steps(runner)
    runner.allocate_kv(6, PAGE_TOKENS, report=lambda progress: None)
    assert torch.equal(steps(runner), expected)
