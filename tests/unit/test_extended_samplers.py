"""The knobs beyond the usual ones: by hand where that can be done, against plain Python, and what must never happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.sampling.sampler import sample
from engine.backends.sampling.sampling_tensors import FIRST_LOOK, uniform
from engine.config import SamplingParams
from tests.fakes.sampling import assert_distributed, expected, histogram, one, row

HALVES = np.log([0.5, 0.25, 0.125, 0.0625, 0.0625]).tolist()
"""Logits whose probabilities are known at sight."""

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.integers(0, 9),
        "top_p": st.sampled_from([0.03, 0.6, 1.0]),
        "top_a": st.sampled_from([0.0, 0.2, 1.0]),
        "min_p": st.sampled_from([0.0, 0.21, 1.0]),
        "tfs": st.sampled_from([0.02, 0.61, 0.97, 1.0]),
        "smoothing_factor": st.sampled_from([0.0, 0.3, 4.0]),
        "temperature_last": st.booleans(),
        "max_temp": st.sampled_from([0.0, 1.0, 3.0]),
        "temp_exponent": st.sampled_from([0.5, 1.0]),
    },
)
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


def support(logits: list[float], **knobs: Any) -> set[int]:
    """The tokens that come out of 300 draws."""
    return {token_id for token_id, count in enumerate(histogram(logits, draws=300, **knobs)) if count}


# --- by hand --------------------------------------------------------------------------------------------------------


def test_top_a_drops_what_is_less_likely_than_its_share_of_the_best_ones_square() -> None:
    assert support(HALVES, top_a=0.6) == {0, 1}  # from 0.15
    assert support(HALVES, top_a=0.48) == {0, 1, 2}  # from 0.12
    assert support(HALVES, top_p=0.75, top_a=0.72) == {0, 1}  # 2/3 and 1/3; from 0.32


def test_tail_free_sampling_cuts_where_the_curve_bends_no_more() -> None:
    # differences 1/4 1/8 1/16 0; bends 1/8 1/16 1/16, which are 0.5, 0.25 and 0.25 of their sum
    assert support(HALVES, tfs=0.4) == {0}
    assert support(HALVES, tfs=0.6) == {0, 1}
    assert support(HALVES, tfs=0.8) == {0, 1, 2}


def test_tail_free_sampling_keeps_equal_tokens_and_pairs() -> None:
    assert support([1.0] * 6, tfs=0.1) == set(range(6))
    assert support([1.0, 0.5], tfs=0.1) == {0, 1}


def test_xtc_leaves_out_all_top_choices_but_the_least_likely() -> None:
    assert support(HALVES, xtc_probability=1.0, xtc_threshold=0.1) == {2, 3, 4}
    assert support(HALVES, xtc_probability=1.0, xtc_threshold=0.2) == {1, 2, 3, 4}


def test_xtc_spares_a_single_top_choice() -> None:
    assert support(HALVES, xtc_probability=1.0, xtc_threshold=0.3) == {0, 1, 2, 3, 4}


def test_xtc_lets_answers_end() -> None:
    assert support(HALVES, xtc_probability=1.0, xtc_threshold=0.1, ends=(0,)) == {0, 2, 3, 4}
    assert_distributed(
        histogram(HALVES, xtc_probability=0.5, xtc_threshold=0.1, ends=(1,)),
        expected(HALVES, xtc_probability=0.5, xtc_threshold=0.1, ends=(1,)),
    )


def test_xtc_does_nothing_at_temperature_0() -> None:
    assert one(HALVES, SamplingParams(temperature=0, xtc_probability=1.0)).token_id == 0


def test_dynamic_temperature_takes_the_greatest_for_equal_tokens_and_the_least_for_a_sure_one() -> None:
    sure = [30.0, 0.0, -30.0]
    assert support(sure, min_temp=0.0, max_temp=9.0) == {0}
    assert support([1.0, 1.0, 1.0], min_temp=0.1, max_temp=5.0) == {0, 1, 2}


def test_a_dynamic_range_of_one_temperature_is_none() -> None:
    assert histogram(HALVES, 200, min_temp=1.5, max_temp=1.5) == histogram(HALVES, 200)


def test_temperature_last_filters_the_models_own_distribution() -> None:
    flat = {"temperature": 50.0, "top_p": 0.7}
    assert support(HALVES, **flat) == {0, 1, 2, 3}
    assert support(HALVES, **flat, temperature_last=True) == {0, 1}


# --- properties -----------------------------------------------------------------------------------------------------

NEUTRAL = SamplingParams()


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, knobs=FILTERS, seed=st.integers(0, 2**32))
def test_neutral_values_change_nothing(logits: list[float], knobs: dict[str, Any], seed: int) -> None:
    named = {name: getattr(NEUTRAL, name) for name in SamplingParams.__struct_fields__}
    assert one(logits, SamplingParams(**{**named, **knobs, "seed": seed})) == one(
        logits, SamplingParams(**knobs, seed=seed)
    )


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, knobs=FILTERS)
def test_what_can_come_out_is_what_the_definitions_keep(logits: list[float], knobs: dict[str, Any]) -> None:
    probs = expected(logits, **knobs)
    counts = histogram(logits, draws=200, **knobs)
    assert {i for i, count in enumerate(counts) if count} <= set(np.nonzero(probs)[0])
    assert all(counts[i] for i in range(len(logits)) if probs[i] > 0.15)


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, knobs=FILTERS)
def test_the_filters_never_remove_the_best_token(logits: list[float], knobs: dict[str, Any]) -> None:
    best = max(range(len(logits)), key=lambda i: (logits[i], -i))
    probs = expected(logits, **knobs)
    assert probs[best] == probs.max()
    assert histogram(logits, draws=300, **knobs)[best]


@pytest.mark.parametrize(
    "knobs",
    [
        {"top_a": 0.001},
        {"top_p": 0.97, "top_a": 0.8},
        {"min_p": 0.01, "tfs": 0.9},
        {"top_p": 0.99, "smoothing_factor": 0.1},
        {"top_p": 0.9, "min_temp": 0.5, "max_temp": 2.0},
        {"top_k": FIRST_LOOK * 3, "top_p": 0.9},
        {"min_p": 0.05, "xtc_probability": 1.0, "xtc_threshold": 0.001},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_a_large_vocabulary_is_cut_where_the_whole_sorted_one_would_be(spread: float, knobs: dict[str, Any]) -> None:
    logits = torch.randn(FIRST_LOOK * 12, generator=torch.Generator().manual_seed(3)) * spread
    probs = expected(logits.tolist(), **knobs)
    best_first = sorted(range(len(probs)), key=lambda i: (-float(logits[i]), i))
    mass = np.cumsum(probs[best_first])
    rows = [row(SamplingParams(seed=seed, **knobs)) for seed in range(20)]
    for each, token in zip(rows, sample(logits.repeat(20, 1), rows), strict=True):
        assert token is not None
        assert token.token_id == best_first[np.searchsorted(mass, each.draw().noise(), side="right")]


def test_the_same_seed_position_and_history_draw_the_same_in_any_batch() -> None:
    logits = torch.randn(10, 2000, generator=torch.Generator().manual_seed(1)) * 2
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_a=0.5),
        SamplingParams(seed=3, tfs=0.9, xtc_probability=0.5),
        SamplingParams(seed=4, min_temp=0.5, max_temp=2.0, top_k=50),
        SamplingParams(seed=5, smoothing_factor=0.5),
        SamplingParams(seed=6, top_p=0.9, temperature=2.0, temperature_last=True),
        SamplingParams(seed=7, dry_multiplier=2.0, dry_allowed_length=1),
        SamplingParams(seed=8, repetition_penalty=1.5, repetition_range=3, repetition_decay=2),
        SamplingParams(temperature=0, dry_multiplier=1.0),
        SamplingParams(seed=9, typical_p=0.7, xtc_probability=1.0),
    ]
    rows = [row(p, prompt=[1, 2, 3, 1, 2], generated=(7, 7, 8, 1, 2)) for p in params]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(10)]
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_xtc_tosses_its_coin_independently_of_the_draw() -> None:
    pairs = np.array([(uniform(seed, 1), uniform(seed, 1, 1)) for seed in range(5000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.05
    assert abs(pairs[:, 1].mean() - 0.5) < 0.02


# --- what the next token must not be --------------------------------------------------------------------------------


def test_banned_tokens_bind_the_next_token_alone() -> None:
    params = SamplingParams(temperature=0)
    each = row(params, generated=(3,), banned=(1, 2))
    logits = torch.tensor([[1.0, 9.0, 8.0, 2.0]])
    first = sample(logits, [each])[0]
    assert first is not None
    assert first.token_id == 3
    each.push(3)
    second = sample(logits, [each])[0]
    assert second is not None
    assert second.token_id == 1


def test_a_ban_of_every_token_leaves_none() -> None:
    assert sample(torch.zeros(1, 2), [row(SamplingParams(seed=1), banned=(0, 1))]) == [None]
