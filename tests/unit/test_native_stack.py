"""A step in one native call gives to the bit what separate calls give, and only where nothing else is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.native.layer import CodedEmbedding
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.native.stack import ANGLE_ROWS
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits
from tests.fakes.families import make_family
from tests.fakes.gguf_models import write_gguf
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
    if runner.attention is None or runner.attention.name != "native":
        pytest.skip("this model attends otherwise here")
    # Norms after the products, as olmo2 has them, are no part of them.
    assert (runner._stack is not None) == (model != "olmo2")
    together = steps(runner)
    runner._stack = None
    assert torch.equal(together, steps(runner))


def test_an_embedding_in_the_codes_of_a_file_is_looked_up_in_the_same_call(tmp_path: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "folder"), tmp_path / "model.gguf", kind="Q8_0")
    runner = loaded(file, "float32")
    assert runner._stack is not None
    assert isinstance(runner._decoder.embedding, CodedEmbedding)  # type: ignore[union-attr]
    together = steps(runner)
    with pytest.raises(IndexError):
        runner.forward([ChunkInput([320], 0, [4], sample=True)])
    runner._stack = None
    assert torch.equal(together, steps(runner))


def test_a_step_finds_the_best_token_of_each_sampled_row(tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "float32")
    chunks = [ChunkInput([9, 8], 0, [4], sample=False), ChunkInput([8, 7, 6], 0, [0], sample=True, num_drafts=1)]
    logits = runner.forward(chunks)
    assert runner.best is not None
    assert len(runner.best) == 2
    assert torch.equal(runner.best, runner.find_best(logits))


def test_a_prompt_without_sampled_rows_has_no_logits(tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "float32")
    whole = runner.forward([ChunkInput([9, 8, 7, 6], 0, [3], sample=True)])
    assert len(runner.forward([ChunkInput([9, 8, 7], 0, [4], sample=False)])) == 0
    assert torch.equal(runner.forward([ChunkInput([6], 3, [4], sample=True)]), whole)


@pytest.mark.parametrize("token_id", [-1, 320])
def test_an_id_beyond_the_embedding_is_refused(token_id: int, tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "float32")
    with pytest.raises(IndexError):
        runner.forward([ChunkInput([token_id], 0, [4], sample=True)])


def test_angles_go_on_beyond_what_was_computed_of_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_position_embeddings=4 * ANGLE_ROWS)
    tokens, pages = 2 * ANGLE_ROWS + 40, list(range(2 * ANGLE_ROWS // PAGE_TOKENS + 3))
    runner = load_runner(folder, dtype="float32")
    runner.allocate_kv(len(pages), PAGE_TOKENS, report=lambda progress: None)
    steps = (
        [ChunkInput([5] * 20, 0, pages, sample=True)],
        [ChunkInput([5 + n % 290 for n in range(tokens - 20)], 20, pages, sample=True)],
        [ChunkInput([9], tokens, pages, sample=True)],
    )
    together = [runner.forward(chunks) for chunks in steps]
    runner._stack = None
    assert all(torch.equal(each, runner.forward(chunks)) for each, chunks in zip(together, steps, strict=True))


def test_states_of_prompts_are_those_of_separate_calls(tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "bfloat16")
    chunks = [
        ChunkInput([9, 8, 7], 0, [4], sample=True),
        ChunkInput([8, 7, 6, 5], 0, [0], sample=True, prompt_states=range(1, 3)),
    ]

    def read() -> list[Tensor]:
        found: list[Tensor] = []
        found.append(runner.forward(chunks, lambda index, states: found.append(states.rows.clone())))
        assert runner.finite is not None
        assert runner.finite.tolist() == [True, True]
        return found

    together = read()
    runner._stack = None
    assert all(map(torch.equal, together, read()))


def test_new_pages_are_what_the_blocks_read(tmp_path: Path) -> None:
    runner = loaded(make_tiny_model(tmp_path), "float32")
    expected = steps(runner)
    runner.allocate_kv(6, PAGE_TOKENS, report=lambda progress: None)
    assert torch.equal(steps(runner), expected)
