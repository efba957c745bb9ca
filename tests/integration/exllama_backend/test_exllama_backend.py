"""What the ExLlamaV2 backend does beyond the contract: guesses, samplers, guidance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.config import SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest
from tests.contract.driving import TOKENS, Drive, ask, params, prompt
from tests.fakes.exllama import FakeExllama
from tests.fakes.exllama_generator import foretell, hash_logits
from tests.fakes.exllama_job import HOLDING
from tests.fakes.model import VOCAB_SIZE
from tests.integration.exllama_backend.loaded import Make, answer, flat, load


def test_greedy_answers_are_the_models(make: Make) -> None:
    requests = [ask(str(salt), prompt(salt, 3 + 90 * salt)) for salt in range(8)]
    for draft_tokens in (0, 4):
        together = Drive(load(make(draft_tokens=draft_tokens)), *requests).to_end()
        assert together == {each.id: foretell(each.prompt_ids, TOKENS, VOCAB_SIZE) for each in requests}


def test_guesses_come_several_a_step_and_are_counted(make: Make) -> None:
    backend = load(make(draft_tokens=4))
    drive = Drive(backend, ask("a", prompt(0)))
    drive.to_end()
    stats = backend.stats()
    assert stats.steps < TOKENS
    assert 0 < stats.draft_accepted < stats.draft_tokens
    assert drive.finish == {"a": "length"}


def test_guesses_are_counted_by_how_far_ahead_they_were(make: Make) -> None:
    backend = load(make(draft_tokens=4))
    Drive(backend, ask("a", prompt(0)), ask("b", prompt(1))).to_end()
    stats = backend.stats()
    drafted, accepted = ([getattr(each, name) for each in stats.drafts] for name in ("drafted", "accepted"))
    assert len(stats.drafts) == 4
    assert (sum(drafted), sum(accepted)) == (stats.draft_tokens, stats.draft_accepted)
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > accepted[-1]
    assert all(each.accepted <= each.drafted for each in stats.drafts)


def test_a_stray_byte_holds_no_token_back(make: Make) -> None:
    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = hash_logits(ids, vocab_size)
        row[HOLDING] = 99.0 if len(ids) == 20 else -99.0
        return row

    drive = Drive(load(make(logits=logits)), ask("a", prompt(0)))
    while drive.backend.has_work():
        assert len(drive.step()) == 1
    assert drive.tokens["a"][0] == HOLDING


def test_a_request_without_finite_probabilities_fails_alone(make: Make) -> None:
    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        return hash_logits(ids, vocab_size) * (math.nan if ids[0] == 250 and len(ids) == 23 else 1)

    drive = Drive(load(make(logits=logits)), ask("a", [250, *prompt(0)]), ask("b", prompt(1)))
    assert drive.to_end()["b"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert drive.finish["a"] == "error"
    assert "finite" in drive.events["a"][-1].message
    assert len(drive.tokens["a"]) == 2


def test_a_temperature_that_underflows_takes_the_most_likely_token(make: Make) -> None:
    knobs = SamplingParams(temperature=0.01, temperature_last=True, max_tokens=TOKENS, seed=1)
    assert answer(make(logits=flat((5, 0.2), (6, 0.3), (7, 0.25))), ask("a", prompt(0), knobs)) == [6] * TOKENS


def test_a_resumed_request_keeps_its_draws_with_guesses_too(make: Make) -> None:
    knobs = SamplingParams(temperature=1.3, seed=7, max_tokens=TOKENS)
    whole = answer(make(), ask("a", prompt(0), knobs))
    assert answer(make(draft_tokens=3), ask("a", prompt(0), knobs)) == whole
    assert answer(make(draft_tokens=3), ask("a", prompt(0), knobs, generated=whole[:5])) == whole


def shares(fakes: FakeExllama, knobs: SamplingParams) -> dict[int, float]:
    """How often each token comes, of 600."""
    drive = Drive(load(fakes), ask("a", [1, 2, 3], knobs))
    counts = Counter(drive.to_end()["a"])
    return {token_id: count / 600 for token_id, count in counts.items()}


def test_xtc_leaves_all_likely_choices_out_but_the_least() -> None:
    fakes = FakeExllama(max_model_len=4096, logits=flat((5, 0.5), (6, 0.3), (7, 0.15), (8, 0.05)))
    always = shares(fakes, SamplingParams(xtc_probability=1.0, max_tokens=600, seed=3))
    assert always.keys() == {7, 8}
    assert always[7] == pytest.approx(0.75, abs=0.06)
    half = shares(fakes, SamplingParams(xtc_probability=0.5, max_tokens=600, seed=3))
    assert half[5] == pytest.approx(0.25, abs=0.06)
    assert half[7] == pytest.approx((0.15 + 0.75) / 2, abs=0.06)


def test_xtc_leaves_mirostats_state_as_one_draw_does() -> None:
    fakes = FakeExllama(logits=flat((5, 0.5), (6, 0.3), (7, 0.2)))
    knobs = SamplingParams(xtc_probability=1.0, mirostat=2, max_tokens=10, seed=3)
    drive = Drive(load(fakes), ask("a", prompt(0), knobs))
    drive.until(lambda stats: bool(fakes.generators[-1].active_jobs))
    settings = fakes.generators[-1].active_jobs[0].gen_settings
    drive.to_end()
    assert settings.mirostat_mu == [10.0]


def test_frequency_and_presence_penalties_leave_the_prompt_alone(make: Make) -> None:
    model = flat((5, 0.6), (6, 0.4))
    knobs = params(presence_penalty=2.0, max_tokens=2)
    assert answer(make(logits=model), ask("a", [5, 5, 5], knobs)) == [5, 6]


def test_dry_stops_a_repeat(make: Make) -> None:
    def loops(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = torch.zeros(vocab_size)
        row[10 + (ids[-1] - 9) % 3] = 5.0
        return row

    plain = answer(make(logits=loops), ask("a", [10, 11, 12]))
    assert plain == [10, 11, 12] * 8
    assert answer(make(logits=loops), ask("a", [10, 11, 12], params(dry_multiplier=10.0)))[:3] != plain[:3]


def test_guidance_runs_two_sequences_and_answers_with_both(make: Make) -> None:
    negative = tuple(prompt(5, 300))
    knobs = params(cfg_scale=1.5, negative_prompt_ids=negative)
    fakes = make()
    drive = Drive(load(fakes), ask("a", prompt(0), knobs))
    drive.until(lambda stats: stats.decoding == 1)
    assert fakes.generators[-1].num_remaining_jobs() == 1
    assert drive.backend.stats().pages_free == 16 - 1 - 2
    known: list[int] = []
    for _ in range(TOKENS):
        positive = hash_logits([*prompt(0), *known], VOCAB_SIZE).log_softmax(-1)
        against = hash_logits([*negative, *known], VOCAB_SIZE).log_softmax(-1)
        known.append(int((1.5 * positive - 0.5 * against).argmax()))
    assert drive.to_end()["a"] == known


def test_guidance_takes_two_places(make: Make) -> None:
    knobs = params(cfg_scale=1.5, negative_prompt_ids=(1, 2, 3))
    drive = Drive(load(make(places=3)), *(ask(str(salt), prompt(salt), knobs) for salt in range(3)))
    drive.step()
    assert (drive.backend.stats().decoding, drive.backend.stats().waiting) == (1, 2)
    drive.to_end()


@pytest.mark.parametrize(
    ("fakes", "knobs", "param"),
    [
        ({}, {"cfg_scale": 1.5}, "negative_prompt"),
        ({"draft_tokens": 2}, {"cfg_scale": 1.5, "negative_prompt_ids": (1,)}, "cfg_scale"),
        ({"places": 1}, {"cfg_scale": 1.5, "negative_prompt_ids": (1,)}, "cfg_scale"),
        ({}, {"cfg_scale": 1.5, "negative_prompt_ids": (9999,)}, "negative_prompt"),
        ({"draft_tokens": 2, "ngram": True}, {}, "prompt"),
    ],
)
def test_what_would_break_the_generator_for_everybody_is_refused_by_name(
    make: Make, fakes: dict[str, object], knobs: dict[str, object], param: str
) -> None:
    backend = load(make(**fakes))
    with pytest.raises(InvalidRequest) as refused:
        backend.submit(ask("a", [1, 2], params(**knobs)))
    assert refused.value.details["param"] == param
    assert not backend.has_work()


def test_a_negative_prompt_counts_against_the_pages(make: Make) -> None:
    knobs = params(cfg_scale=2.0, negative_prompt_ids=tuple(prompt(1, 600)))
    with pytest.raises(ContextLengthExceeded, match="600 tokens"):
        load(make(pages=4)).submit(ask("a", prompt(0, 300), knobs))
