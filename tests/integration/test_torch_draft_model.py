"""Guessing ahead with a draft model: the answers are those that there are without, however good or bad it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.model.linear import linear_kind
from engine.backends.torch.speculation.draft_model import DraftModel
from engine.config import SamplingParams
from engine.errors import ModelLoadFailed, UnsupportedModel
from tests.fakes.drafting import answers, eager, ids, load
from tests.fakes.gguf_models import write_gguf
from tests.fakes.tiny_models import make_tiny_model

TOKENS = 200
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, logprobs=2)
PROMPTS = {name: [3 + (7 * at + salt) % 211 for at in range(24)] for salt, name in enumerate("abc")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("main"), with_tokenizer=False)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bad"), with_tokenizer=False, seed=9, num_hidden_layers=1)


def guessing(folder: Path, draft: Path, **changes: Any) -> TorchBackend:
    return eager(load(folder, draft_model=draft, **changes))


def everyone(params: SamplingParams) -> dict[str, SamplingParams]:
    return dict.fromkeys(PROMPTS, params)


def plainly(folder: Path, params: Mapping[str, SamplingParams], **changes: Any) -> dict[str, list[int | None]]:
    return ids(answers(load(folder, **changes), PROMPTS, params, TOKENS))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["itself", "random"])
def test_answers_are_the_same_token_by_token(folder: Path, bad: Path, params: SamplingParams, draft: str) -> None:
    backend = guessing(folder, folder if draft == "itself" else bad)
    found = answers(backend, PROMPTS, everyone(params), TOKENS)
    assert ids(found) == plainly(folder, everyone(params))
    assert all(len(events) == TOKENS for events in found.values())
    assert all((event.logprob is None) == (params.logprobs is None) for event in found["a"])
    assert backend.stats().draft_tokens > TOKENS


@pytest.mark.parametrize("main", ["folder", "file"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_answers_with_a_draft_from_the_codes_of_a_gguf_file_are_those_without(
    tmp_path: Path, main: str, kind: str
) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    draft = write_gguf(folder, tmp_path / "draft.gguf", kind=kind)
    path = folder if main == "folder" else write_gguf(folder, tmp_path / "main.gguf", kind="Q8_0")
    backend = guessing(path, draft, page_tokens=16)  # native attention: equal to the bit however many tokens a step has
    assert backend._draft is not None
    decoder = backend._draft.runner._decoder
    assert decoder is not None
    assert linear_kind(decoder.stages[0].blocks[0].qkv).endswith("from the file's codes")
    found = ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS))
    assert found == plainly(path, everyone(GREEDY), page_tokens=16)
    stats = backend.stats()
    assert stats.draft_tokens / 8 < stats.draft_accepted


def test_a_draft_that_is_the_model_itself_is_always_right_whatever_the_temperature(folder: Path) -> None:
    for params in (GREEDY, SEEDED):
        backend = guessing(folder, folder, draft_tokens=4)
        answers(backend, PROMPTS, everyone(params), TOKENS)
        stats = backend.stats()
        assert stats.draft_accepted == stats.draft_tokens
        assert stats.steps < TOKENS / 3


def test_guesses_that_hold_are_counted_by_position(folder: Path, bad: Path) -> None:
    backend = guessing(folder, folder)
    answers(backend, PROMPTS, everyone(GREEDY), TOKENS)
    stats = backend.stats()
    assert len(stats.drafts) > 1
    assert stats.draft_tokens == sum(each.drafted for each in stats.drafts)
    assert all(0 < each.accepted == each.drafted for each in stats.drafts)
    worse = guessing(folder, bad)
    answers(worse, PROMPTS, everyone(GREEDY), TOKENS)
    assert worse.stats().draft_accepted < worse.stats().draft_tokens / 10


def test_preempted_requests_go_on_as_without_guesses(folder: Path) -> None:
    backend = guessing(folder, folder, kv_tokens=448)
    assert ids(answers(backend, PROMPTS, everyone(SEEDED), TOKENS)) == plainly(folder, everyone(SEEDED))
    assert backend.stats().preemptions > 0
    assert backend.stats().draft_accepted > 0


def test_a_found_prefix_has_what_the_draft_model_computed_of_it_too(folder: Path) -> None:
    backend = guessing(folder, folder)
    first = ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS))
    fed: list[int] = []
    draft = backend._draft
    assert draft is not None
    forward = draft.runner.forward

    def counted(chunks: Any, *others: Any) -> torch.Tensor:
        fed.append(sum(len(chunk.token_ids) for chunk in chunks))
        return forward(chunks, *others)

    draft.runner.forward = counted  # type: ignore[method-assign]
    again = {name: [*prompt, *first[name][:100]] for name, prompt in PROMPTS.items()}
    found = ids(answers(backend, again, everyone(GREEDY), TOKENS - 100))  # type: ignore[arg-type]
    assert {name: first[name][:100] + found[name] for name in PROMPTS} == first
    assert fed and max(fed) <= 3 * 8


def test_what_the_draft_model_did_not_see_it_catches_up_with(folder: Path, bad: Path) -> None:
    """A long prompt, in several passes of at most a step's tokens, while the answer goes on."""
    backend = guessing(folder, folder)
    prompt = {"long": [3 + (5 * at) % 97 for at in range(300)]}
    found = answers(backend, prompt, {"long": GREEDY}, 40)
    expected = answers(load(folder), prompt, {"long": GREEDY}, 40)
    assert ids(found) == ids(expected)
    stats = backend.stats()
    assert stats.draft_accepted == stats.draft_tokens > 20


def test_requests_of_all_kinds_in_one_batch_are_answered_as_alone(folder: Path) -> None:
    params = {
        "a": GREEDY,
        "b": SamplingParams(temperature=1.0, seed=3, min_tokens=9, logit_bias={5: 4.0}),
        "c": SamplingParams(temperature=0, repetition_penalty=1.3),
    }
    backend = guessing(folder, folder)
    assert ids(answers(backend, PROMPTS, params, TOKENS)) == plainly(folder, params)
    assert backend.stats().draft_accepted > 0


def test_the_text_is_looked_up_first_and_the_draft_model_guesses_where_it_tells_nothing(folder: Path) -> None:
    backend = eager(load(folder, draft_model=folder, ngram_draft=True), lookup=True)
    few = SamplingParams(temperature=0, logit_bias=dict.fromkeys((5, 6, 7), 60.0))
    assert ids(answers(backend, PROMPTS, everyone(few), TOKENS)) == plainly(folder, everyone(few))
    assert backend.stats().steps < TOKENS / 2
    both = eager(load(folder, draft_model=folder, ngram_draft=True), lookup=True)
    assert ids(answers(both, PROMPTS, everyone(SEEDED), TOKENS)) == plainly(folder, everyone(SEEDED))
    assert both.stats().draft_accepted > 0


def test_a_draft_model_of_a_shorter_context_guesses_as_far_as_it_goes(folder: Path, tmp_path: Path) -> None:
    short = make_tiny_model(tmp_path, with_tokenizer=False, max_position_embeddings=64)
    backend = guessing(folder, short)
    assert ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS)) == plainly(folder, everyone(GREEDY))
    assert 0 < backend.stats().draft_tokens < 3 * 64


def test_a_draft_model_with_fewer_rows_in_its_embedding_is_given_none_that_it_lacks(
    folder: Path, tmp_path: Path
) -> None:
    smaller = make_tiny_model(tmp_path, with_tokenizer=False, vocab_size=200)
    backend = guessing(folder, smaller)
    assert ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS)) == plainly(folder, everyone(GREEDY))


def test_guesses_beyond_the_vocabulary_are_not_computed_with(folder: Path, tmp_path: Path) -> None:
    larger = make_tiny_model(tmp_path, with_tokenizer=False, vocab_size=900)
    backend = guessing(folder, larger)
    assert ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS)) == plainly(folder, everyone(GREEDY))


def test_the_end_of_the_context_ends_an_answer_in_the_middle_of_its_guesses(folder: Path) -> None:
    for length in (60, 61, 62, 63):
        backend = guessing(folder, folder, max_model_len=length)
        for events in answers(backend, PROMPTS, everyone(GREEDY), TOKENS).values():
            assert [event.finish for event in events] == [None] * (length - 25) + ["length"]


def test_a_draft_model_that_fails_costs_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = guessing(folder, folder)

    def fail(*arguments: Any) -> dict[str, list[int]]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DraftModel, "draft", fail)
    assert ids(answers(backend, PROMPTS, everyone(GREEDY), TOKENS)) == plainly(folder, everyone(GREEDY))
    assert backend.stats().draft_tokens == 0


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    main, other = make_tiny_model(tmp_path / "main"), make_tiny_model(tmp_path / "other", vocab_size=280)
    with pytest.raises(UnsupportedModel, match="other and main have different vocabularies"):
        load(main, draft_model=other)
    with pytest.raises(ModelLoadFailed):
        load(main, draft_model=tmp_path)


def test_bytes_are_those_of_both_models_and_are_given_back(folder: Path, bad: Path) -> None:
    alone, other = (load(each).stats() for each in (folder, bad))
    backend = guessing(folder, bad)
    stats = backend.stats()
    assert backend._draft is not None
    draft = backend._draft.runner
    assert draft.kv_bytes == stats.pages_total * 8 * draft.kv_bytes_per_token()  # nothing is kept beside its pages
    assert stats.weights_bytes == alone.weights_bytes + other.weights_bytes
    assert stats.kv_bytes == alone.kv_bytes + draft.kv_bytes
    backend.unload()
    assert (backend.stats().weights_bytes, backend.stats().kv_bytes, backend._draft) == (0, 0, None)
    backend.check()


def test_a_request_of_one_token_is_not_guessed_behind(folder: Path) -> None:
    backend = guessing(folder, folder)
    backend.submit(BackendRequest(id="a", prompt_ids=PROMPTS["a"], params=SamplingParams(max_tokens=0)))
    while backend.has_work():
        backend.step()
    assert backend.stats().draft_tokens == 0
