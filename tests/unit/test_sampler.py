"""What the sampler promises, against plain Python: exact argmax, each knob as defined, noise by seed and position."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.backends.sampling.draw import UNDECIDED, rank
from engine.backends.sampling.sampler import draw, sample
from engine.backends.sampling.sampling_tensors import FIRST_LOOK, uniform
from engine.config import SamplingParams
from tests.fakes.sampling import assert_distributed, expected, histogram, one, row, softmax

# --- greedy ---------------------------------------------------------------------------------------------------------


def test_temperature_0_is_the_exact_argmax() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    found = sample(logits, [row(SamplingParams(temperature=0))] * 64)
    assert [token.token_id for token in found if token] == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.full((1, 5000), -1.0)
    logits[0, [4000, 17, 23]] = 2.5
    assert one(logits[0], SamplingParams(temperature=0)).token_id == 17


def test_filters_do_not_change_greedy() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.5, typical_p=0.2, min_p=0.1)
    assert one([0.1, 3.0, 2.9], params).token_id == 1


def test_the_logits_stay_as_they_are() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    params = SamplingParams(seed=1, top_p=0.5, repetition_penalty=2.0, logit_bias={3: 5.0}, logprobs=2)
    sample(logits, [row(params), row(SamplingParams(seed=1))])
    assert torch.equal(logits, before)


# --- distributions --------------------------------------------------------------------------------------------------

LOGITS = [2.0, 1.0, 1.5, -1.0, 0.0, 1.0, -3.0, 0.5]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"typical_p": 0.5},
        {"typical_p": 0.01},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
        {"top_a": 0.4},
        {"top_a": 1.0},
        {"top_p": 0.9, "top_a": 0.5},
        {"tfs": 0.3},
        {"tfs": 0.95},
        {"tfs": 0.01},
        {"smoothing_factor": 0.3},
        {"smoothing_factor": 2.0, "temperature": 1.5},
        {"temperature": 2.0, "temperature_last": True, "top_p": 0.8},
        {"min_temp": 0.5, "max_temp": 3.0},
        {"min_temp": 0.0, "max_temp": 2.0, "temp_exponent": 0.3, "min_p": 0.2},
        {"xtc_probability": 1.0},
        {"xtc_probability": 0.4, "xtc_threshold": 0.05},
        {
            "smoothing_factor": 0.4,
            "temperature": 1.7,
            "temperature_last": True,
            "top_k": 7,
            "top_p": 0.97,
            "top_a": 0.1,
            "min_p": 0.01,
            "tfs": 0.97,
            "typical_p": 0.98,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
        },
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(knobs: dict[str, float]) -> None:
    assert_distributed(histogram(LOGITS, **knobs), expected(LOGITS, **knobs))


def test_one_request_draws_its_positions_from_the_exact_distribution() -> None:
    each = row(SamplingParams(seed=5, top_k=5))
    logits = torch.tensor([LOGITS])
    counts = [0] * len(LOGITS)
    for _ in range(2000):
        token = sample(logits, [each])[0]
        assert token is not None
        counts[token.token_id] += 1
        each.push(token.token_id)
    assert_distributed(counts, expected(LOGITS, top_k=5))


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.33, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.13, 0.57]),
)
def test_what_can_come_out_is_what_the_filters_keep(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    probs = expected(logits, **knobs)
    counts = histogram(logits, draws=300, **knobs)
    assert {i for i, count in enumerate(counts) if count} <= set(np.nonzero(probs)[0])
    assert all(counts[i] for i in range(len(logits)) if probs[i] > 0.1)


def test_equal_logits_are_filtered_by_id() -> None:
    counts = histogram([1.0] * 10, draws=500, top_k=3)
    assert all(counts[:3])
    assert not any(counts[3:])


@pytest.mark.parametrize("knobs", [{"top_p": 0.9}, {"min_p": 0.0001}, {"top_p": 0.999, "min_p": 1e-9}], ids=str)
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_a_large_vocabulary_is_cut_where_the_whole_sorted_one_would_be(spread: float, knobs: dict[str, float]) -> None:
    vocab = FIRST_LOOK * 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * spread
    probs = expected(logits.tolist(), **knobs)
    best_first = rank(logits[None], vocab)[0].numpy()
    mass = np.cumsum(probs[best_first])
    rows = [row(SamplingParams(seed=seed, **knobs)) for seed in range(20)]  # type: ignore[arg-type]
    found = sample(logits.repeat(20, 1), rows)
    for each, token in zip(rows, found, strict=True):
        assert token is not None
        assert token.token_id == best_first[np.searchsorted(mass, each.draw().noise(), side="right")]


def test_a_draw_that_does_not_wait_says_which_rows_need_more_tokens_and_those_are_the_same_afterwards() -> None:
    spreads = torch.tensor([8.0, 0.01, 8.0, 1.0])
    logits = torch.randn(4, FIRST_LOOK * 20, generator=torch.Generator().manual_seed(3)) * spreads[:, None]
    settings = [{"top_p": 0.9, "logprobs": 2}, {"min_p": 0.01, "logprobs": 2}, {"temperature": 0}, {"top_p": 0.99}]
    rows = [row(SamplingParams(seed=5, **each)) for each in settings]  # type: ignore[arg-type]
    drawn = draw(logits, rows, wait=False)
    expected_tokens = sample(logits, rows)
    logits.zero_()  # as the next step does
    assert (drawn.ids == UNDECIDED).tolist() == [False, True, False, True]
    tokens = drawn.tokens()
    again = drawn.draw_undecided(rows)
    for index, token in again.items():
        tokens[index] = token
    assert tokens == expected_tokens
    assert [each.look for each in rows] == [FIRST_LOOK, 16 * FIRST_LOOK, FIRST_LOOK, 16 * FIRST_LOOK]


def test_rank_is_best_first_and_lowest_id_first_among_equals() -> None:
    values = [0.0, -0.0, 3.5, -2.0, 3.5, -math.inf, 1e30, -1e-30]
    assert rank(torch.tensor([values]), 8).tolist() == [[6, 2, 4, 0, 1, 7, 3, 5]]


def test_a_tiny_temperature_is_nearly_greedy_and_never_nan() -> None:
    for temperature in (1e-30, 1e-5):
        assert histogram([5.0, 80.0, -40.0], draws=50, temperature=temperature) == [0, 50, 0]


# --- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_over_positions_and_over_seeds() -> None:
    for values in ([uniform(7, p) for p in range(5000)], [uniform(s, 100) for s in range(-2500, 2500)]):
        assert min(values) > 0
        assert max(values) < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-6


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated() -> None:
    grid = np.array([[uniform(seed, position) for position in range(80)] for seed in range(80)])
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.06


def test_the_same_seed_and_position_draw_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(12, 3000, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, top_k=40, top_p=0.9, frequency_penalty=1.0),
        SamplingParams(temperature=0),
        SamplingParams(seed=6, typical_p=0.9, repetition_penalty=1.3),
        SamplingParams(seed=7, min_p=0.05, logprobs=3, logit_bias={4: 3.0}),
    ] * 2
    rows = [row(p, prompt=[1, 2, 3], generated=(7, 7, 8)) for p in params]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(12)]
    backwards = sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


def test_a_row_made_anew_from_what_was_generated_goes_on_as_the_old_one() -> None:
    params = SamplingParams(seed=9, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=9)
    kept = row(params, prompt=[5, 6], ends=(1,))
    tokens: list[int] = []
    logits = torch.randn(20, 1, 60, generator=torch.Generator().manual_seed(2))
    for step in range(20):
        anew = row(params, prompt=[5, 6], generated=tuple(tokens), ends=(1,))
        found, again = sample(logits[step], [kept]), sample(logits[step], [anew])
        assert found == again
        assert found[0] is not None
        tokens.append(found[0].token_id)
        kept.push(tokens[-1])


def test_different_seeds_draw_differently() -> None:
    assert len([count for count in histogram([0.0] * 50, draws=200) if count]) > 40


# --- edits ----------------------------------------------------------------------------------------------------------


def test_logit_bias_is_added() -> None:
    params = SamplingParams(temperature=0, logit_bias={2: 10.0, 0: -100.0})
    assert one([5.0, 1.0, 0.0], params).token_id == 2
    assert one([5.0, 1.0, -20.0], params).token_id == 1


def test_end_tokens_are_masked_before_min_tokens_and_not_after() -> None:
    params = SamplingParams(temperature=0, min_tokens=2)
    logits = [1.0, 9.0, 8.0, 2.0]
    assert one(logits, params, ends=(1, 2)).token_id == 3
    assert one(logits, params, ends=(1, 2), generated=(0,)).token_id == 3
    assert one(logits, params, ends=(1, 2), generated=(0, 0)).token_id == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert one([4.0, 3.0, 1.0], params, prompt=[0]).token_id == 1
    assert one([4.0, 3.0, 2.5], params, prompt=[0], generated=(1,)).token_id == 2
    assert one([-2.0, -3.0], params, prompt=[0]).token_id == 1
    assert one([4.0, 1.9], params, prompt=[0, 0, 0]).token_id == 0  # once, however often it was seen


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    frequency = SamplingParams(temperature=0, frequency_penalty=0.5)
    assert one([2.0, 1.2], frequency, prompt=[0, 0, 0, 0]).token_id == 0
    assert one([2.0, 1.2], frequency, generated=(0,)).token_id == 0
    assert one([2.0, 1.2], frequency, generated=(0, 0)).token_id == 1
    presence = SamplingParams(temperature=0, presence_penalty=0.5)
    assert one([2.0, 1.2], presence, generated=(0, 0, 0)).token_id == 0
    assert one([1.6, 1.2], presence, generated=(0,)).token_id == 1


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    generated=st.lists(st.integers(0, 9), max_size=30),
    repetition=st.sampled_from([0.5, 1.0, 1.7]),
    frequency=st.sampled_from([-1.0, 0.0, 0.25]),
    presence=st.sampled_from([-0.5, 0.0, 1.5]),
)
def test_penalties_together_match_a_plain_reference(
    prompt: list[int], generated: list[int], repetition: float, frequency: float, presence: float
) -> None:
    logits = np.linspace(-2.0, 2.0, 10).astype(np.float32)[[3, 1, 4, 0, 5, 9, 2, 6, 8, 7]]
    edited = logits.astype(np.float64)
    for token_id in {*prompt, *generated}:
        edited[token_id] *= 1 / repetition if edited[token_id] > 0 else repetition
    for token_id, count in Counter(generated).items():
        edited[token_id] -= frequency * count + presence
    params = SamplingParams(
        temperature=0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    rows = [row(SamplingParams(temperature=0)), row(params, prompt=prompt, generated=tuple(generated))]
    plain, penalised = sample(torch.tensor(np.stack([logits, logits])), rows)
    assert plain is not None
    assert penalised is not None
    assert plain.token_id == logits.argmax()
    assert edited[penalised.token_id] == pytest.approx(edited.max(), abs=1e-5)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_before_any_knob() -> None:
    params = SamplingParams(temperature=0, logit_bias={2: 50.0}, logprobs=2, top_k=1, repetition_penalty=3.0)
    logits = [1.0, 3.0, 2.0, 0.0]
    token = one(logits, params, prompt=[1])
    own = np.log(softmax(np.array(logits)))
    assert token.token_id == 2
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(own[2], abs=1e-6)
    assert [token_id for token_id, _ in token.logprob.top] == [1, 2]
    assert [value for _, value in token.logprob.top] == pytest.approx([own[1], own[2]], abs=1e-6)


def test_logprobs_go_to_the_rows_that_asked_with_as_many_alternatives() -> None:
    params = [SamplingParams(temperature=0, logprobs=count) for count in (None, 0, 5, 20)]
    found = sample(torch.randn(4, 10), [row(p) for p in params])
    tops = [None if token is None or token.logprob is None else len(token.logprob.top) for token in found]
    assert tops == [None, 0, 5, 10]


# --- what cannot be drawn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}, {"typical_p": 0.5}], ids=str
)
def test_a_row_without_a_distribution_gives_none_and_spares_the_others(params: dict[str, float]) -> None:
    good = [0.0, 9.0, 0.0]
    logits = torch.tensor([good, [math.nan, 1.0, 2.0], good, [math.inf, 0.0, 0.0], [-math.inf] * 3])
    found = sample(logits, [row(SamplingParams(logprobs=1, **params))] * 5)  # type: ignore[arg-type]
    assert [token is not None for token in found] == [True, False, True, False, False]


def test_masking_every_token_gives_none() -> None:
    params = SamplingParams(temperature=0, min_tokens=1)
    assert sample(torch.zeros(1, 2), [row(params, ends=(0, 1))]) == [None]
