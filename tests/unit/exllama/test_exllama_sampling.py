"""How sampling parameters become the library's settings, one bias per token, and draws."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
import torch

from engine.backends.exllamav2.sampling import (
    RandomDraws,
    TokenBias,
    count_penalty,
    dry_penalty,
    excluded,
    refuse_unsupported,
    settings_of,
)
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from tests.fakes.exllama_job import FakeSettings

WIDTH = 32


def test_every_field_of_the_librarys_settings_is_said() -> None:
    fields = {field.name for field in dataclasses.fields(FakeSettings)}
    for params in (SamplingParams(), SamplingParams(temperature=0)):
        assert settings_of(params, 100).keys() == fields


def test_neutral_parameters_give_settings_that_change_nothing() -> None:
    settings = settings_of(SamplingParams(), 100)
    assert settings["token_repetition_penalty"] == settings["temperature"] == 1.0
    assert (settings["top_k"], settings["top_p"], settings["tfs"], settings["typical"]) == (0, 1.0, 1.0, 1.0)
    for off in ("smoothing_factor", "min_temp", "max_temp", "top_a", "min_p", "skew", "dry_multiplier"):
        assert settings[off] == 0
    assert settings["xtc_probability"] == settings["token_frequency_penalty"] == settings["token_presence_penalty"] == 0
    assert (settings["mirostat"], settings["cfg_scale"], settings["token_repetition_range"]) == (False, None, -1)


def test_two_jobs_share_no_state_of_their_settings() -> None:
    first, second = settings_of(SamplingParams(), 100), settings_of(SamplingParams(), 100)
    assert first["ngram_history"] is not second["ngram_history"]
    assert first["post_sampling_hooks"] is not second["post_sampling_hooks"]


def test_greedy_is_the_argmax_whatever_else_is_asked() -> None:
    params = SamplingParams(
        temperature=0, top_p=0.1, mirostat=2, temperature_last=True, max_temp=2.0, smoothing_factor=1
    )
    settings = settings_of(params, 100)
    assert (settings["top_k"], settings["temperature"], settings["temperature_last"]) == (1, 1.0, False)
    assert (settings["mirostat"], settings["max_temp"], settings["smoothing_factor"]) == (False, 0.0, 0.0)


@pytest.mark.parametrize("field", ["top_p", "tfs", "typical_p"])
def test_a_bound_too_small_for_float32_is_not_taken_for_off(field: str) -> None:
    settings = settings_of(SamplingParams(**{field: math.ulp(0.0)}), 100)
    assert torch.tensor(settings[field.removesuffix("_p") if field == "typical_p" else field]).float().item() > 0


def test_min_p_of_one_is_not_taken_for_off() -> None:
    assert torch.tensor(settings_of(SamplingParams(min_p=1.0), 100)["min_p"]).float().item() < 1


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    assert settings_of(SamplingParams(top_k=2**31), 100)["top_k"] == 0
    assert settings_of(SamplingParams(top_k=99), 100)["top_k"] == 99


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(mirostat=1), "mirostat"),
        (SamplingParams(min_temp=1.0, max_temp=0.5), "max_temp"),
        (SamplingParams(xtc_probability=0.5, xtc_threshold=0.001), "xtc_threshold"),
    ],
)
def test_values_without_a_meaning_here_are_refused_by_name(params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        refuse_unsupported(params)
    assert refused.value.details["param"] == param


# --- the bias -------------------------------------------------------------------------------------------------------


def bias_of(params: SamplingParams, known: list[int], *, prompt: int = 0, **fields: object) -> torch.Tensor | None:
    settings = {"end_token_ids": (), "banned_next": (), "first": 0, **fields}
    return TokenBias(params, prompt_tokens=prompt, **settings).next(torch.tensor(known), WIDTH)  # type: ignore[arg-type]


def test_nothing_to_say_is_no_bias() -> None:
    assert bias_of(SamplingParams(), [1, 2]) is None
    assert bias_of(SamplingParams(frequency_penalty=1.0), [1, 2], prompt=2) is None
    assert bias_of(SamplingParams(min_tokens=2), [1, 2, 3], prompt=1, end_token_ids=(5,)) is None


def test_logit_bias_masks_and_penalties_add_up() -> None:
    params = SamplingParams(logit_bias={4: 2.0, 5: 3.0}, frequency_penalty=0.5, presence_penalty=0.25, min_tokens=3)
    bias = bias_of(params, [4, 9, 4, 4], prompt=2, end_token_ids=(5, 6), banned_next=(7,), first=2)
    assert bias is not None
    assert bias[[4, 9, 5, 6, 7]].tolist() == [2.0 - 2 * 0.5 - 0.25, 0.0, -math.inf, -math.inf, -math.inf]
    later = bias_of(params, [4, 9, 4, 4, 8], prompt=2, end_token_ids=(5, 6), banned_next=(7,), first=2)
    assert later is not None
    assert later[[5, 6, 7]].tolist() == [3.0, 0.0, 0.0]


def test_penalties_fade_beyond_their_range() -> None:
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=1.0, repetition_range=1, repetition_decay=2)
    penalty = count_penalty(torch.tensor([1, 2, 3, 4]), WIDTH, params)
    assert penalty[[1, 2, 3, 4]].tolist() == [0.0, 1.0, 2.0, 2.0]
    at_once = SamplingParams(frequency_penalty=1.0, repetition_range=2)
    assert count_penalty(torch.tensor([1, 2, 3, 2]), WIDTH, at_once)[[1, 2, 3]].tolist() == [0.0, 1.0, 1.0]


def naive_dry(known: list[int], params: SamplingParams) -> list[float]:
    window = known[-params.dry_range :] if params.dry_range else known
    penalty = [0.0] * WIDTH
    for end in range(len(window) - 1):
        length = 0
        while (
            length <= end
            and window[end - length] == window[len(window) - 1 - length]
            and window[end - length] not in params.dry_breaker_ids
        ):
            length += 1
        token = window[end + 1]
        if length >= params.dry_allowed_length and token not in params.dry_breaker_ids:
            cost = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            penalty[token] = max(penalty[token], cost)
    return penalty


@pytest.mark.parametrize("seed", range(20))
def test_dry_costs_what_the_longest_repeat_costs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    known = torch.randint(3, (40,), generator=generator)
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_allowed_length=1 + seed % 3,
        dry_range=25 if seed % 2 else 0,
        dry_breaker_ids=(2,) if seed % 5 == 0 else (),
    )
    expected = torch.tensor(naive_dry(known.tolist(), params))
    torch.testing.assert_close(dry_penalty(known, WIDTH, params), expected)


def test_dry_grows_with_the_repeat_and_spares_breakers() -> None:
    known = torch.tensor([1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3])
    params = SamplingParams(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    penalty = dry_penalty(known, WIDTH, params)
    assert {token: cost for token, cost in enumerate(penalty.tolist()) if cost} == {4: 1.0, 5: 0.5}
    spared = dry_penalty(known, WIDTH, msgspec.structs.replace(params, dry_breaker_ids=(1, 5)))
    assert {token: cost for token, cost in enumerate(spared.tolist()) if cost} == {4: 0.5}


def test_dry_of_one_token_and_of_a_breaker_at_the_end_is_nothing() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, dry_breaker_ids=(2,))
    assert not dry_penalty(torch.tensor([1]), WIDTH, params).any()
    assert not dry_penalty(torch.tensor([1, 2, 3, 1, 2]), WIDTH, params).any()


# --- draws ----------------------------------------------------------------------------------------------------------


def test_a_draw_is_a_function_of_seed_and_position_alone() -> None:
    through, jumped = RandomDraws(-3), RandomDraws(-3)
    for position in range(5):
        last = through.move_to(position), through.random()
        through.random()
    assert (jumped.move_to(4), jumped.random()) == last
    assert RandomDraws(3).move_to(4) != last[0]


def test_draws_are_spread_evenly() -> None:
    draws = RandomDraws(1)
    numbers = torch.tensor([draws.move_to(position) for position in range(4000)])
    assert numbers.histc(8, 0, 1).sub(500).abs().max() < 100


def test_xtc_leaves_out_top_choices_but_lets_answers_end() -> None:
    token, meta = torch.zeros(1, 1), torch.zeros(1, 1)
    sampled = (token, torch.tensor([[[5, 6, 7, 8]]]), torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]), meta, False)
    assert excluded(sampled, 0.2, ()) == {5, 6}
    assert excluded(sampled, 0.2, (6,)) == {5}
    assert excluded(sampled, 0.35, ()) == set()
