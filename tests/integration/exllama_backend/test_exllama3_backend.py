"""What the ExLlamaV3 backend does beyond the contract: our sampler on its logits, and failures of one job alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.exllama import generator_backend
from engine.backends.sampling.sampler import SampleRow, sample
from engine.config import AdapterSpec, SamplingParams
from engine.errors import InvalidRequest
from tests.contract.driving import TOKENS, Drive, ask, params, prompt
from tests.fakes.exllama3 import RealExllama3
from tests.fakes.exllama_generator import foretell, hash_logits
from tests.fakes.model import VOCAB_SIZE
from tests.integration.exllama_backend.loaded import answer, flat, load


def ours(tokens: list[int], knobs: SamplingParams) -> list[int]:
    """The answer that our sampler gives by the model's logits, rounded as the library rounds them."""
    row = SampleRow(knobs, prompt_ids=tokens)
    known = list(tokens)
    for _ in range(TOKENS):
        [token] = sample(hash_logits(known, VOCAB_SIZE)[None], [row])
        assert token is not None
        row.push(token.token_id)
        known.append(token.token_id)
    return known[len(tokens) :]


def test_greedy_answers_are_the_models_alone_and_in_a_batch() -> None:
    requests = [ask(str(salt), prompt(salt, 3 + 90 * salt)) for salt in range(8)]
    together = Drive(load(RealExllama3(pages=32)), *requests).to_end()
    assert together == {each.id: foretell(each.prompt_ids, TOKENS, VOCAB_SIZE) for each in requests}


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 1.3, "top_p": 0.9},
        {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.2},
        {"temperature": 1.1, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"temperature": 1.2, "min_p": 0.05, "typical_p": 0.9, "smoothing_factor": 0.4},
        {"dry_multiplier": 0.9, "min_temp": 0.5, "max_temp": 1.5},
    ],
)
def test_every_parameter_of_our_sampler_does_what_it_does_on_torch(knobs: dict[str, Any]) -> None:
    settings = SamplingParams(seed=7, max_tokens=TOKENS, **knobs)
    assert answer(RealExllama3(), ask("a", prompt(0), settings)) == ours(prompt(0), settings)


drafts = pytest.mark.parametrize("ngram", [False, True], ids=["draft model", "n-grams"])


def cycle(ids: Sequence[int], vocab_size: int) -> Tensor:
    """A model that repeats five tokens, each after the one before."""
    row = torch.zeros(vocab_size)
    row[40 + (ids[-1] + 1) % 5] = 9.0
    return row


@drafts
def test_drafts_save_steps_and_are_counted(ngram: bool) -> None:
    logits = cycle if ngram else hash_logits
    backend = load(RealExllama3(draft_tokens=4, ngram=ngram, logits=logits))
    drive = Drive(backend, ask("a", [*range(40, 45), *range(40, 44)]))
    answered = drive.to_end()["a"]
    assert answered == answer(RealExllama3(logits=logits), ask("a", [*range(40, 45), *range(40, 44)]))
    stats = backend.stats()
    assert stats.steps < TOKENS // 2
    assert 0 < stats.draft_accepted <= stats.draft_tokens
    assert len(stats.drafts) == 4


@drafts
@pytest.mark.parametrize("length", [20, 240, 490])
def test_drafts_leave_seeded_and_penalised_answers_as_they_are(ngram: bool, length: int) -> None:
    """Those after longer prompts begin a page in their midst."""
    knobs = SamplingParams(seed=3, temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=80)
    requests = [ask(str(salt), prompt(salt, length), knobs) for salt in range(3)]
    alone = {request.id: answer(RealExllama3(), request) for request in requests}
    assert Drive(load(RealExllama3(pages=32, draft_tokens=3, ngram=ngram)), *requests).to_end() == alone


@drafts
def test_drafts_fill_the_rows_that_packed_weights_are_multiplied_with(ngram: bool) -> None:
    fakes = RealExllama3(pages=128, draft_tokens=4, ngram=ngram, logits=cycle)
    text = [*range(40, 45), *range(40, 44)]
    drive = Drive(load(fakes, max_prompts=80), *(ask(str(number), text) for number in range(40)))
    drive.until(lambda stats: stats.decoding == 40)
    drive.step()
    assert fakes.generators[-1].model.forwarded[-1] == (40, 3)  # 120 of 144 rows
    drive.to_end()


def test_a_draft_model_knows_the_tokens_of_steps_without_drafts() -> None:
    fakes = RealExllama3(pages=96, draft_tokens=4)
    drive = Drive(
        load(fakes, max_prompts=90),
        *(ask(str(salt), prompt(salt, 5), params(max_tokens=12)) for salt in range(75)),
        ask("long", prompt(99), params(max_tokens=100)),
    )
    drive.until(lambda stats: stats.decoding == 1)
    forwarded = fakes.generators[-1].model.forwarded
    assert (76, 1) in forwarded
    known, before = len(drive.tokens["long"]), len(forwarded)
    assert drive.to_end()["long"] == foretell(prompt(99), 100, VOCAB_SIZE)
    assert len(forwarded) - before < 0.5 * (100 - known)


def test_a_long_answer_in_several_leases_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = SamplingParams(seed=5, temperature=1.2, repetition_penalty=1.2, max_tokens=600)
    monkeypatch.setattr(generator_backend, "LEASE_TOKENS", 256)
    whole = answer(RealExllama3(), ask("a", prompt(0), knobs))
    assert len(whole) == 600
    assert answer(RealExllama3(), ask("a", prompt(0), knobs, generated=whole[:300])) == whole


def test_tokens_of_padding_are_never_drawn() -> None:
    """The fake model gives them the highest logits of all."""
    knobs = params(temperature=2.0, seed=1, max_tokens=200)
    assert max(answer(RealExllama3(), ask("a", prompt(0), knobs))) < VOCAB_SIZE


def test_a_request_without_finite_probabilities_fails_alone() -> None:
    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        return hash_logits(ids, vocab_size) * (math.nan if ids[0] == 250 and len(ids) == 23 else 1)

    drive = Drive(load(RealExllama3(logits=logits)), ask("a", [250, *prompt(0)]), ask("b", prompt(1)))
    assert drive.to_end()["b"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert drive.finish["a"] == "error"
    assert "finite" in drive.events["a"][-1].message
    assert len(drive.tokens["a"]) == 2


def test_a_request_whose_first_logits_are_not_finite_fails_alone_too() -> None:
    """The library itself would end the whole step."""

    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        return hash_logits(ids, vocab_size) * (math.nan if ids[0] == 250 else 1)

    drive = Drive(load(RealExllama3(logits=logits)), ask("a", [250, *prompt(0)]), ask("b", prompt(1)))
    assert drive.to_end()["b"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert (drive.finish["a"], drive.tokens["a"]) == ("error", [])


def fail_prompts_of(fakes: RealExllama3, length: int, error: Callable[[], Exception]) -> None:
    """Let every prompt of that many tokens fail while it is computed."""
    model = fakes.generators[-1].model
    compute = model.prefill

    def prefill(*, input_ids: Tensor, params: dict[str, Any]) -> None:
        if input_ids.shape[1] == length - 1:
            raise error()
        compute(input_ids=input_ids, params=params)

    model.prefill = prefill


def test_a_prompt_that_fails_ends_its_request_alone() -> None:
    fakes = RealExllama3()
    drive = Drive(load(fakes), ask("stays", prompt(1)))
    drive.until(lambda stats: stats.decoding == 1)
    fail_prompts_of(fakes, 50, lambda: RuntimeError("a kernel failed"))
    drive.add(ask("fails", prompt(2, 50)))
    assert drive.to_end()["stays"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert drive.finish["fails"] == "error"
    assert "RuntimeError: a kernel failed" in drive.events["fails"][-1].message
    assert len(fakes.generators) == 1


def test_a_prompt_that_runs_out_of_memory_waits_until_fewer_run() -> None:
    fakes = RealExllama3()
    backend = load(fakes)
    drive = Drive(backend, ask("stays", prompt(1)))
    drive.until(lambda stats: stats.decoding == 1)
    left = [1]

    def error() -> Exception:
        left.pop()
        return torch.OutOfMemoryError("CUDA out of memory.")

    fail_prompts_of(fakes, 50, error)
    drive.add(ask("waits", prompt(2, 50)))
    drive.until(lambda stats: stats.oom_steps == 1)
    fakes.generators[-1].model.prefill = type(fakes.generators[-1].model).prefill.__get__(fakes.generators[-1].model)
    assert (backend.stats().prompts_limit, backend.stats().waiting) == (1, 1)
    assert drive.to_end() == {
        "stays": foretell(prompt(1), TOKENS, VOCAB_SIZE),
        "waits": foretell(prompt(2, 50), TOKENS, VOCAB_SIZE),
    }


def test_a_broken_generator_is_closed_and_its_successor_owns_the_cache() -> None:
    fakes = RealExllama3()
    drive = Drive(load(fakes), ask("a", prompt(0)))
    drive.step()
    fakes.faults.add("iterate", RuntimeError("a kernel failed"))
    drive.step()
    first, second = fakes.generators
    with pytest.raises(RuntimeError, match="after shutdown"):
        first.filter_pool.submit(int)
    assert second.cache.owner_serial == second.cache_owner_serial > first.cache_owner_serial
    assert answer(fakes, ask("b", prompt(1))) == foretell(prompt(1), TOKENS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("knobs", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"cfg_scale": 1.5, "negative_prompt_ids": (1,)}, "cfg_scale"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_parameters_that_it_lacks_are_refused_by_name(knobs: dict[str, Any], param: str) -> None:
    backend = load(RealExllama3())
    with pytest.raises(InvalidRequest, match=f"^{param} is not supported by the exllamav3 backend: ") as refused:
        backend.submit(ask("a", prompt(0), params(**knobs)))
    assert refused.value.details["param"] == param
    assert not backend.has_work()


def test_an_adapter_cannot_be_attached(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequest, match="applies no LoRA adapters, and so not mine"):
        load(RealExllama3()).attach(AdapterSpec(name="mine", path=tmp_path))


def test_xtc_leaves_all_likely_choices_out_but_the_least() -> None:
    fakes = RealExllama3(logits=flat((5, 0.5), (6, 0.3), (7, 0.15), (8, 0.05)))
    tokens = answer(fakes, ask("a", [1, 2, 3], SamplingParams(xtc_probability=1.0, max_tokens=200, seed=3)))
    assert set(tokens) == {7, 8}
