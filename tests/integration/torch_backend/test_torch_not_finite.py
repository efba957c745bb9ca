"""A request whose numbers are not finite fails, and harms no other: in its steps, in the pages that it gives back, or
through what the prefix cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.base import BackendRequest
from engine.backends.sampling.sampler import NOT_FINITE
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from tests.fakes import queued, recording
from tests.fakes.drafting import eager
from tests.fakes.families import make_family
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.torch_backend.running import Run, ask, load_spec, prompt
from tests.integration.torch_backend.test_torch_paged_attention import over_pages

BAD = 319
"""A token whose embedding is infinite; those who are not to fail are held to answers without it."""

PARAMS = SamplingParams(temperature=0, logit_bias={BAD: -100.0})

PAGE_TOKENS, KV_TOKENS = 16, 1536
TORCH: dict[str, Any] = {"attention": "gathered"}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "native": ("llama", {}, {}),
    "mirror": ("llama", {}, TORCH),
    "window": ("mistral", {"sliding_window": 12}, TORCH),
    "soft-cap": ("gemma2", {}, TORCH),
    "8 bits": ("llama", {}, TORCH | {"cache_bits": 8}),
    "4 bits": ("llama", {}, TORCH | {"cache_bits": 4}),
    "n-grams": ("llama", {}, TORCH | {"ngram_draft": True}),
    "over pages": ("llama", {}, TORCH),
    "recorded": ("llama", {}, TORCH),
    "ahead": ("llama", {}, TORCH),
    "experts": ("mixtral", {}, TORCH),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}


class Place:
    """A folder, settings to load it by, and what computes it."""

    def __init__(self, folder: Path, settings: dict[str, Any], runner_type: type[ModelRunner] = ModelRunner) -> None:
        self.folder, self.settings, self.runner_type = folder, settings, runner_type

    def load(self, *, step_tokens: int = 64) -> TorchBackend:
        backend = TorchBackend(self.runner_type)
        spec = ModelSpec(path=self.folder, name="m", dtype="float32", kv_cache_tokens=KV_TOKENS, **self.settings)
        load_spec(backend, spec, max_prompts=6, step_tokens=step_tokens, page_tokens=PAGE_TOKENS)
        return eager(backend, lookup=True) if spec.ngram_draft else backend

    def alone(self, request: BackendRequest) -> list[int]:
        return Run(self.load(), request).to_end()[request.id]


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    model, overrides, settings = WAYS[request.param]
    runner_type = ModelRunner
    if request.param in ("over pages", "recorded"):
        monkeypatch.setattr(ModelRunner, "pick_attention", over_pages)
    if request.param == "recorded":
        recording.use(monkeypatch, recording.FakeRecorder())
    if request.param == "ahead":
        runner_type, _ = queued.use(monkeypatch)
    if model in ARCHITECTURES:
        folder = make_tiny_model(tmp_path, ARCHITECTURES[model], with_tokenizer=False, **overrides)
    else:
        folder = make_family(tmp_path, model, **overrides)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Place(folder, settings, runner_type)


def innocent(round_: int) -> list[BackendRequest]:
    return [ask(f"{round_}-{salt}", prompt(10 * round_ + salt, 21 + 9 * salt), PARAMS) for salt in range(3)]


def assert_answered(place: Place, run: Run, requests: Sequence[BackendRequest]) -> None:
    """All of `requests` got what they get in a backend of their own."""
    assert {each.id: run.finish.get(each.id, "") for each in requests} == {each.id: "" for each in requests}
    assert {each.id: run.tokens[each.id] for each in requests} == {each.id: place.alone(each) for each in requests}


def test_who_shares_its_steps_or_gets_its_pages_is_answered_as_ever(place: Place) -> None:
    backend = place.load()
    for round_ in range(3):
        spoilt = ask(f"bad-{round_}", [*prompt(7 + round_, 40), BAD, *prompt(8, 30)])
        run = Run(backend, spoilt, *innocent(round_))
        run.to_end()
        assert run.message[spoilt.id] == NOT_FINITE
        assert_answered(place, run, innocent(round_))
    after = Run(backend, *innocent(5))
    after.to_end()
    assert_answered(place, after, innocent(5))


@pytest.mark.parametrize("tokens", [0, 8], ids=["no answer", "an answer"])
def test_a_prompt_ends_with_the_step_that_spoils_it(place: Place, tokens: int) -> None:
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens)
    run = Run(place.load(step_tokens=32), ask("bad", [*prompt(7, 40), BAD, *prompt(8, 200)], params))
    run.step()
    assert not run.finish
    run.step()
    assert (run.finish, run.message) == ({"bad": "error"}, {"bad": NOT_FINITE})
    run.to_end()


@pytest.mark.parametrize("tokens", [0, 8], ids=["no answer", "several chunks"])
def test_the_prefix_that_it_shares_with_others_stays_good(place: Place, tokens: int) -> None:
    shared = prompt(1, 2 * PAGE_TOKENS)
    backend = place.load(step_tokens=64 if tokens else 256)
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens)
    Run(backend, ask("bad", [*shared, BAD, *prompt(2, 100)], params)).to_end()
    requests = [ask(str(salt), [*shared, *prompt(salt, 5)], PARAMS) for salt in (3, 4)]
    run = Run(backend, *requests)
    run.to_end()
    assert_answered(place, run, requests)


def test_a_guess_that_spoils_its_step_is_not_the_requests_end(tmp_path: Path) -> None:
    class Fragile(ModelRunner):
        """A runner whose numbers are not finite where tokens are guessed."""

        guesses = 0

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: torch.Tensor | None = None
        ) -> torch.Tensor:
            logits = super().forward(chunks, tell, drawn)
            guessed = sum(chunk.num_drafts for chunk in chunks)
            Fragile.guesses += guessed
            return logits * torch.nan if guessed else logits

    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    params = SamplingParams(temperature=0, logit_bias={5: 60.0, 6: 60.0})
    request = ask("a", prompt(1, 40), params)
    run = Run(Place(folder, {"ngram_draft": True}, Fragile).load(), request)
    assert run.to_end() == Run(Place(folder, {}).load(), request).to_end()
    assert Fragile.guesses
    assert not run.finish
