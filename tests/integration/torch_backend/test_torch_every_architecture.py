"""What every architecture does, however its models compute and whatever else is in the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from engine.backends.base import BackendRequest
from engine.backends.common.families import architectures
from engine.backends.common.native_build import SWITCH
from engine.config import SamplingParams
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES, make_family, make_multimodal
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.torch_backend.running import Run, ask, load, prompt

MODELS: Mapping[str, Callable[[Path], Path]] = {
    **{
        name: partial(make_tiny_model, architecture=name, with_tokenizer=False)
        for name in (*tiny_models.ARCHITECTURES, *tiny_models.MIXTURES)
    },
    **{name: partial(make_family, name=name) for name in FAMILIES},
    "gemma3 with images": partial(make_multimodal, kind="gemma3", model_type="gemma3_text", head_dim=16),
    "mistral with images": partial(make_multimodal, kind="mistral3", model_type="mistral"),
}
PROMPT_TOKENS, STEP_TOKENS, PAGE_TOKENS = 100, 24, 16


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["1", "0"], ids=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, request.param)


def test_no_architecture_is_left_out(tmp_path: Path) -> None:
    made = [make(tmp_path / name) for name, make in MODELS.items()]
    named = [json.loads((folder / "config.json").read_text())["architectures"] for folder in made]
    assert {name for names in named for name in names} == architectures().keys()


@pytest.mark.usefixtures("kernels")
def test_a_prompt_of_several_chunks_alone_is_answered_as_one_of_a_single_chunk(model: Path) -> None:
    whole = Run(load(model, page_tokens=PAGE_TOKENS), ask("a", prompt(1, PROMPT_TOKENS)), limit=4)
    cut = Run(
        load(model, page_tokens=PAGE_TOKENS, step_tokens=STEP_TOKENS), ask("a", prompt(1, PROMPT_TOKENS)), limit=4
    )
    assert cut.to_end() == whole.to_end()
    assert not cut.message


@pytest.mark.usefixtures("kernels")
def test_a_prompt_without_an_answer_is_computed_alone(model: Path) -> None:
    nothing = BackendRequest(id="a", prompt_ids=prompt(1, PROMPT_TOKENS), params=SamplingParams(seed=0, max_tokens=0))
    backend = load(model, page_tokens=PAGE_TOKENS)
    run = Run(backend, nothing)
    run.to_end()
    assert (run.finish, run.message) == ({"a": "length"}, {"a": ""})
    assert backend.stats().prompt_tokens_computed == PROMPT_TOKENS
