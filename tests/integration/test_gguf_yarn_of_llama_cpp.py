"""YaRN as a GGUF file's metadata has it, with betas of its own, gives the log-probabilities that llama.cpp gives.

Of the architectures read here, llama.cpp takes betas from the metadata of mistral3 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.gguf_models import write_gguf
from tests.fakes.llama_cpp import Ask, llama_cpps
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import make_tiny_model

pytest.importorskip("xllamacpp")

BETAS: dict[str, dict[str, float]] = {
    "usual": {},
    "narrow": {"beta_fast": 6.0, "beta_slow": 4.0},
    "wide": {"beta_fast": 90.0, "beta_slow": 0.25},
    "fast alone": {"beta_fast": 3.0},
    "slow alone": {"beta_slow": 9.0},
    "divided by all": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "divided by a part": {"mscale": 1.0, "mscale_all_dim": 0.4},
}
PROMPT = [7 * position % 300 + 3 for position in range(300)]
NEAR = 0.02
"""Of log-probabilities: llama.cpp keeps keys and values in 16 bits."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, betas in BETAS.items():
        scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, **betas}
        sizes = {"head_dim": 64, "max_position_embeddings": 1024}
        model = make_tiny_model(folder / name, "MistralForCausalLM", rope_scaling=scaling, **sizes)
        found[name] = write_gguf(model, folder / f"{name}.gguf", name="mistral3")
    return found


@pytest.fixture(scope="module")
def theirs(files: dict[str, Path]) -> Iterator[dict[str, Ask]]:
    with llama_cpps(*files.values()) as asks:
        yield dict(zip(files, asks, strict=True))


def scores(file: Path) -> Tensor:
    """Log-probabilities of what follows the prompt, by token."""
    driver = Driver(load_runner(file))
    return driver.feed((driver.add(PROMPT), None))[-1].float().log_softmax(-1)


def their_scores(ask: Ask, count: int) -> Tensor:
    """Those of llama.cpp."""
    asked = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "n_probs": count, "cache_prompt": False}
    found = ask("/completion", asked)["completion_probabilities"][0]["top_logprobs"]
    return torch.tensor([each["logprob"] for each in sorted(found, key=lambda each: each["id"])])


@pytest.mark.parametrize("name", BETAS)
def test_yarn_with_any_betas_is_that_of_llama_cpp(files: dict[str, Path], theirs: dict[str, Ask], name: str) -> None:
    ours = scores(files[name])
    assert float((ours - their_scores(theirs[name], len(ours))).abs().max()) < NEAR


def test_betas_change_what_follows(files: dict[str, Path]) -> None:
    usual = scores(files["usual"])
    assert all(float((scores(files[name]) - usual).abs().max()) > 5 * NEAR for name in BETAS if name != "usual")
