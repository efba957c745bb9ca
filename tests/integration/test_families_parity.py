"""Every family computes what transformers computes: logits and 200 greedy tokens, in float32 on small random models,
over pages that are gathered and over pages of a size that the native kernel takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.common.model_config import read_model_config
from engine.backends.torch.native.library import find_kernels
from tests.fakes.families import FAMILIES, as_older_folder, make_family, make_multimodal
from tests.fakes.oracle import NUM_PAGES, Driver, ignore_progress, load_runner, reference_logits

PROMPT = [7 * position % 300 + 3 for position in range(45)]
STEPS = 200
NATIVE_PAGE_TOKENS = 16


def assert_same_as_transformers(folder: Path, **spec: Any) -> str:
    """Greedy tokens, and the logits at every position: fed token by token, as a whole prompt, and in uneven chunks
    beside another sequence. Tokens are greedy where each is what transformers' logits for those before it say. The same
    logits come over larger pages; returns what attends over those."""
    runner = load_runner(folder, **spec)
    driver = Driver(runner)
    running, beside = driver.add(PROMPT, room=STEPS), driver.add(PROMPT[5:25], room=STEPS)
    for _ in PROMPT:
        driver.feed((running, 1))
    driver.feed((beside, 7))
    running.tokens.append(int(running.logits[-1].argmax()))
    driver.greedy([running, beside], STEPS - 1)
    expected = reference_logits(folder, running.tokens[:-1])
    torch.testing.assert_close(torch.stack(running.logits), expected, atol=3e-4, rtol=1e-4)
    assert running.tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 :].argmax(-1).tolist()
    whole, chunked = driver.add(running.tokens[:60]), driver.add(running.tokens[:60])
    torch.testing.assert_close(driver.feed((whole, None))[0], expected[59], atol=3e-4, rtol=1e-4)
    driver.feed((chunked, 3))
    driver.feed((chunked, 40))
    torch.testing.assert_close(driver.feed((chunked, None))[0], expected[59], atol=3e-4, rtol=1e-4)
    runner.allocate_kv(NUM_PAGES, NATIVE_PAGE_TOKENS, report=ignore_progress)
    assert_same_logits(Driver(runner), running.tokens[:-1], expected)
    assert runner.attention is not None
    return runner.attention.name


def assert_same_logits(driver: Driver, tokens: list[int], expected: torch.Tensor) -> None:
    """Fed as a prompt in uneven chunks beside another sequence, and from there on token by token."""
    sequence, beside = driver.add(tokens), driver.add(PROMPT[::-1])
    driver.feed((sequence, 3), (beside, 17))
    driver.feed((beside, 1), (sequence, 40))
    for _ in range(32):
        driver.feed((sequence, 1))
    driver.feed((sequence, None))
    ends = [2, *range(42, 75), len(tokens) - 1]
    torch.testing.assert_close(torch.stack(sequence.logits), expected[ends], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_computes_what_transformers_computes(tmp_path: Path, family: str) -> None:
    attending = assert_same_as_transformers(make_family(tmp_path, family))
    library = find_kernels(torch.float32, torch.device("cpu")).library
    assert attending == ("native" if library is not None else "gathered")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gemma3", {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 11, "num_hidden_layers": 7}),
        ("mistral3", {"model_type": "mistral", "head_dim": 16, "tie_word_embeddings": False}),
    ],
)
def test_of_a_folder_for_images_too_the_model_of_text_is_read(tmp_path: Path, kind: str, text: dict[str, Any]) -> None:
    assert_same_as_transformers(make_multimodal(tmp_path, kind, **text))


def test_a_folder_for_images_too_is_read_under_the_names_it_had_before(tmp_path: Path) -> None:
    new, old = make_multimodal(tmp_path / "new", "gemma3", model_type="gemma3_text", head_dim=24), tmp_path / "old"
    tensors = load_file(new / "model.safetensors")
    old.mkdir()
    shutil.copy(new / "config.json", old)
    names = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, old / "model.safetensors")

    before, after = (Driver(load_runner(folder)) for folder in (old, new))
    assert torch.equal(before.feed((before.add(PROMPT), None)), after.feed((after.add(PROMPT), None)))


def test_longrope_takes_its_short_factors_where_no_sequence_is_longer_than_in_training(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "phi4 mini", original_max_position_embeddings=400)
    assert_same_as_transformers(folder, max_model_len=400)


@pytest.mark.parametrize("family", ["gemma3 scaled", "phi4 mini", "stablelm"])
def test_folders_from_before_rope_parameters_are_read_the_same(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    before = read_model_config(folder)
    as_older_folder(folder)
    assert read_model_config(folder) == before
