"""Tokens guessed ahead: where they come from, which are worth their time, and how many stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.torch.speculation.ngram import (
    NgramDrafter,
    PromptLookup,
    SequenceDrafter,
    accepted,
    allot_drafts,
)
from engine.backends.torch.speculation.step_time import StepTime


def lookup(*token_ids: int) -> PromptLookup:
    made = PromptLookup()
    made.extend(token_ids)
    return made


def test_what_followed_the_last_time_is_guessed() -> None:
    assert lookup(1, 2, 3, 4, 5, 9, 1, 2).draft(3) == [3, 4, 5]
    assert lookup(1, 2, 3, 1, 2, 4, 1, 2).draft(1) == [4]


def test_the_longer_likeness_counts() -> None:
    assert lookup(1, 2, 3, 4, 77, 3, 4, 88, 1, 2, 3, 4).draft(1) == [77]


def test_what_never_stood_before_is_not_guessed() -> None:
    for token_ids in ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 1)):
        assert lookup(*token_ids).draft(4) == []


def test_a_loop_is_guessed_round_and_round() -> None:
    assert lookup(*[1, 2, 3] * 4).draft(7) == [1, 2, 3, 1, 2, 3, 1]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 7))
def test_a_guess_follows_a_likeness_of_the_end_of_the_text(token_ids: list[int], most: int) -> None:
    draft = lookup(*token_ids).draft(most)
    if draft:
        places = [at for at in range(2, len(token_ids)) if token_ids[at - 2 : at] == token_ids[-2:]]
        assert len(draft) == most
        assert any((token_ids[at:] * most)[:most] == draft for at in places)
    else:
        assert token_ids[-2:] not in [token_ids[at - 2 : at] for at in range(2, len(token_ids))]


def test_guesses_that_come_to_nothing_are_made_less_and_less() -> None:
    drafter = SequenceDrafter(lookup(*[1, 2] * 9))
    tried = []
    for step in range(60):
        if drafter.draft(2):
            tried.append(step)
            drafter.record(2, 0)
    assert tried == [0, 1, 3, 7, 15, 31]
    assert drafter.acceptance_rate < 0.2


def test_one_that_holds_has_it_guess_at_every_step_again() -> None:
    drafter = SequenceDrafter(lookup(*[1, 2] * 9))
    for guessed, right in ((2, 0), (2, 0), (2, 0), (2, 2)):
        drafter.record(guessed, right)
    drafter._skip = 0
    assert all(drafter.draft(2) for _ in range(5))


def learned(fixed_s: float, row_s: float) -> StepTime:
    time = StepTime()
    for rows in (1, 3, 5, 2, 8, 4, 6, 1) * 4:
        time.observe(rows, fixed_s + rows * row_s)
    return time


def test_rows_that_cost_next_to_nothing_are_worth_it_and_those_that_cost_all_are_not() -> None:
    assert learned(0.010, 0.0001).break_even_probability(1, 1.0) == pytest.approx(0.0001 / 0.0101, rel=0.5)
    assert learned(0.0, 0.010).break_even_probability(4, 4.0) == pytest.approx(1.0, rel=0.05)


def test_steps_of_one_size_alone_do_not_make_a_row_look_dear_or_free() -> None:
    time = StepTime()
    for _ in range(500):
        time.observe(1, 0.01)
    assert 0.05 < time.break_even_probability(1, 1.0) < 0.5


def test_the_likeliest_guesses_go_first_into_the_room_there_is() -> None:
    time = learned(0.010, 0.0001)
    assert allot_drafts([([1, 2, 3], 0.9), ([1, 2, 3], 0.5)], decodes=2, spare=4, time=time) == [3, 1]
    assert allot_drafts([([1, 2, 3], 0.9), ([1, 2, 3], 0.5)], decodes=2, spare=0, time=time) == [0, 0]


def test_where_every_row_costs_a_step_nothing_is_guessed() -> None:
    assert allot_drafts([([1, 2, 3], 0.95)], decodes=1, spare=9, time=learned(0.0, 0.01)) == [0]


@pytest.mark.parametrize(
    ("guesses", "drawn", "stay"),
    [
        ([], [5], 1),
        ([5, 6], [5, 6, 7], 3),
        ([5, 6], [5, 9, 7], 2),
        ([5, 6], [9, 6, 7], 1),
        ([5, 6], [None, 6, 7], 0),
        ([5, 6], [5, None, 7], 1),
    ],
)
def test_tokens_stay_up_to_the_one_drawn_behind_the_last_guess_that_held(
    guesses: list[int], drawn: list[int | None], stay: int
) -> None:
    assert accepted(guesses, drawn) == stay


def test_who_asks_for_no_guesses_gets_none() -> None:
    guesses = NgramDrafter(0, StepTime())
    guesses.begin("a", [1, 2] * 4)
    assert guesses.plan(["a"], 9) == {}
