"""Guessing ahead with real (tiny) models: the answers are those that there are without, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from tests.fakes.drafting import eager
from tests.fakes.tiny_models import make_tiny_model

TOKENS = 120
FEW_TOKENS = dict.fromkeys((5, 6, 7), 60.0)  # so that what was said is said again
GREEDY = SamplingParams(temperature=0, logit_bias=FEW_TOKENS)
COOL = SamplingParams(temperature=0.05, seed=5, logprobs=2, logit_bias=FEW_TOKENS)
PROMPTS = {name: [3 + (7 * at + salt) % 11 for at in range(24)] for salt, name in enumerate("abc")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), with_tokenizer=False)


def load(
    folder: Path, *, guessing: bool, kv_tokens: int = 4096, max_prompts: int = 16, **changes: object
) -> TorchBackend:
    backend = TorchBackend()
    spec = ModelSpec(
        path=folder,
        name="tiny",
        dtype="float32",
        kv_cache_tokens=kv_tokens,
        ngram_draft=guessing,
        **changes,  # type: ignore[arg-type]
    )
    backend.load(
        spec,
        max_prompts=max_prompts,
        step_tokens=128,
        page_tokens=8,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return eager(backend, lookup=True) if guessing else backend


def answers(backend: TorchBackend, params: SamplingParams, limit: int = TOKENS) -> dict[str, list[TokenEvent]]:
    """What each prompt is answered, checked after every step."""
    found: dict[str, list[TokenEvent]] = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        backend.submit(BackendRequest(id=name, prompt_ids=prompt, params=params))
    while backend.has_work():
        for event in backend.step():
            if len(found[event.request_id]) < limit:
                found[event.request_id].append(event)
        backend.check()
        for name, events in found.items():
            if len(events) >= limit:
                backend.cancel(name)
    return found


@pytest.mark.parametrize("params", [GREEDY, COOL], ids=["greedy", "seeded"])
def test_answers_are_the_same_token_by_token(folder: Path, params: SamplingParams) -> None:
    plain, guessing = load(folder, guessing=False), load(folder, guessing=True)
    expected, found = answers(plain, params), answers(guessing, params)
    for name in PROMPTS:
        assert [event.token_id for event in found[name]] == [event.token_id for event in expected[name]]
        for ours, theirs in zip(found[name], expected[name], strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            if ours.logprob is not None and theirs.logprob is not None:
                assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)
        assert [event.cached_tokens for event in found[name]] == [0] + [None] * (TOKENS - 1)
    stats = guessing.stats()
    assert 0 < stats.draft_accepted <= stats.draft_tokens
    assert stats.draft_accepted == sum(position.accepted for position in stats.drafts)


def test_an_answer_that_says_the_same_again_and_again_takes_few_steps(folder: Path) -> None:
    backend = load(folder, guessing=True)
    found = answers(backend, SamplingParams(temperature=0, logit_bias={5: 60.0}))
    assert all([event.token_id for event in events] == [5] * TOKENS for events in found.values())
    assert backend.stats().steps < TOKENS / 3


def test_an_answer_that_depends_on_what_was_said_is_not_guessed(folder: Path) -> None:
    backend = load(folder, guessing=True)
    answers(backend, SamplingParams(temperature=0, repetition_penalty=1.3))
    assert backend.stats().draft_tokens == 0


def test_guesses_take_no_page_from_anybody(folder: Path) -> None:
    """Pages for all answers and not one more."""
    tokens = 8 * sum(-(-(len(prompt) + TOKENS) // 8) for prompt in PROMPTS.values())
    expected = answers(load(folder, guessing=False), GREEDY)
    backend = load(folder, guessing=True, kv_tokens=tokens)
    found = answers(backend, GREEDY)
    assert {name: [event.token_id for event in events] for name, events in found.items()} == {
        name: [event.token_id for event in events] for name, events in expected.items()
    }
    assert backend.stats().preemptions == 0


def test_the_end_of_the_context_ends_an_answer_in_the_middle_of_its_guesses(folder: Path) -> None:
    for length in range(60, 68):
        backend = load(folder, guessing=True, max_model_len=length)
        for events in answers(backend, GREEDY).values():
            assert len(events) == length - 24
            assert [event.finish for event in events] == [None] * (length - 25) + ["length"]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that each step samples."""
    found: list[int] = []
    forward = ModelRunner.forward

    def counted(self: ModelRunner, chunks: Sequence[ChunkInput], *rest: Any) -> Tensor:
        found.append(sum(chunk.num_sampled for chunk in chunks))
        return forward(self, chunks, *rest)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    return found


@pytest.mark.parametrize(("max_prompts", "most"), [(1, 8), (len(PROMPTS), 8), (16, 16)])
def test_a_step_has_rows_for_as_many_prompts_as_may_run_or_for_one_with_all_its_drafts(
    folder: Path, rows: list[int], max_prompts: int, most: int
) -> None:
    backend = load(folder, guessing=True, max_prompts=max_prompts)
    rows.clear()
    answers(backend, SamplingParams(temperature=0, logit_bias={5: 60.0}))
    assert backend.stats().draft_tokens > 0
    assert max(rows) == most


@pytest.mark.parametrize(("guessing", "most"), [(False, 1), (True, 8)])
def test_a_load_for_one_prompt_is_tried_with_the_rows_of_its_drafts(
    folder: Path, rows: list[int], guessing: bool, most: int
) -> None:
    load(folder, guessing=guessing, max_prompts=1)
    assert max(rows) == most


def test_no_drafts_are_added_beyond_the_rows_that_memory_was_found_to_allow(folder: Path) -> None:
    backend = load(folder, guessing=True)
    assert backend._scheduler is not None
    backend._scheduler.limits.limit_running(1)
    answers(backend, SamplingParams(temperature=0, logit_bias={5: 60.0}))
    assert backend.stats().draft_tokens == 0
