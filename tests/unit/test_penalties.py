"""DRY and penalties with a range: against plain Python over the whole history, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.sampling.penalties import DryPenalty, RecentTokens, TokenWindow
from engine.config import SamplingParams
from tests.fakes.sampling import one

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def dry(**knobs: Any) -> SamplingParams:
    return SamplingParams(**{"dry_multiplier": 1.0, "dry_base": 2.0, **knobs})


def penalties(params: SamplingParams, tokens: Sequence[int]) -> dict[int, float]:
    found = DryPenalty(params, tokens).penalties()
    return {} if found is None else dict(zip(found[0].tolist(), found[1].tolist(), strict=True))


def expected_penalties(params: SamplingParams, tokens: Sequence[int]) -> dict[int, float]:
    """The definition: for every earlier end of a repeat, how long it is and what came after."""
    tokens = tokens[-params.dry_range :] if params.dry_range else tokens
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while (
            length <= end
            and tokens[end - length] == tokens[len(tokens) - 1 - length]
            and tokens[end - length] not in params.dry_breaker_ids
        ):
            length += 1
        following = tokens[end + 1]
        if length >= params.dry_allowed_length and following not in params.dry_breaker_ids:
            longest[following] = max(length, longest.get(following, 0))
    return {
        token_id: -params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token_id, length in longest.items()
    }


# --- DRY ------------------------------------------------------------------------------------------------------------


def test_the_token_that_would_carry_on_a_repeat_loses_by_its_length() -> None:
    assert penalties(dry(), [5, 6, 7, 8, 5, 6, 7]) == {8: -2.0}  # three tokens repeat, two are allowed
    assert penalties(dry(dry_allowed_length=3), [5, 6, 7, 8, 5, 6, 7]) == {8: -1.0}
    assert penalties(dry(dry_allowed_length=4), [5, 6, 7, 8, 5, 6, 7]) == {}


def test_no_repeat_reaches_over_a_breaker() -> None:
    assert penalties(dry(dry_allowed_length=1, dry_breaker_ids=(6,)), [5, 6, 7, 8, 5, 6, 7]) == {8: -1.0}
    assert penalties(dry(dry_allowed_length=1, dry_breaker_ids=(7,)), [5, 6, 7, 8, 5, 6, 7]) == {}


def test_a_breaker_itself_loses_nothing() -> None:
    assert penalties(dry(dry_breaker_ids=(8,)), [5, 6, 7, 8, 5, 6, 7]) == {}


def test_a_repeat_must_lie_within_the_range() -> None:
    assert penalties(dry(dry_range=7), [5, 6, 7, 8, 5, 6, 7]) == {8: -2.0}
    assert penalties(dry(dry_range=6), [5, 6, 7, 8, 5, 6, 7]) == {8: -1.0}
    assert penalties(dry(dry_range=5), [5, 6, 7, 8, 5, 6, 7]) == {}


def test_a_long_repeat_costs_a_finite_penalty() -> None:
    assert penalties(dry(dry_base=100.0), [1] * 300)[1] == pytest.approx(-1e30)


def test_dry_keeps_greedy_from_going_in_circles() -> None:
    params = dry(temperature=0, dry_multiplier=5.0)
    assert one([0.0, 1.0, 0.5], params, prompt=[2, 0, 1, 2, 0]).token_id == 2
    assert one([0.0, 1.0, 0.5], SamplingParams(temperature=0), prompt=[2, 0, 1, 2, 0]).token_id == 1


@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS.filter(bool),
    answer=TOKENS,
    allowed=st.integers(1, 4),
    dry_range=st.sampled_from([0, 3, 9, 60]),
    breakers=st.sampled_from([(), (0,), (1, 3)]),
)
def test_dry_matches_the_definition_after_every_token(
    prompt: list[int], answer: list[int], allowed: int, dry_range: int, breakers: tuple[int, ...]
) -> None:
    params = dry(dry_allowed_length=allowed, dry_range=dry_range, dry_breaker_ids=breakers)
    subject, tokens = DryPenalty(params, prompt), list(prompt)
    for token_id in [*answer, None]:
        found = subject.penalties()
        now = {} if found is None else dict(zip(found[0].tolist(), found[1].tolist(), strict=True))
        assert now == expected_penalties(params, tokens)
        assert now == penalties(params, tokens)  # made anew from what is known, as after a lost worker
        if token_id is not None:
            subject.push(token_id)
            tokens.append(token_id)


def test_taking_in_a_long_prompt_of_one_token_is_not_quadratic() -> None:
    class Counted(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    from engine.backends.sampling.penalties import _repeats

    assert _repeats([Counted(1)] * 2000, frozenset())[0] == 1999
    assert Counted.compared < 3 * 2000


# --- penalties with a range -----------------------------------------------------------------------------------------


def expected_window(tokens: list[int], outputs: int, reach: int, decay: int) -> dict[int, tuple[float, float, float]]:
    """uses, repeated and used of each token, by the definition."""
    found: dict[int, tuple[float, float, float]] = {}
    for age, token_id in enumerate(reversed(tokens)):
        if age >= reach + decay:
            break
        weight = 1.0 if age <= reach else 1 - (age - reach) / decay
        uses, repeated, used = found.get(token_id, (0.0, 0.0, 0.0))
        mine = weight if age < outputs else 0.0
        found[token_id] = (uses + mine, max(repeated, weight), max(used, mine))
    return found


@settings(max_examples=100, deadline=None)
@given(prompt=TOKENS, answer=TOKENS, reach=st.integers(1, 12), decay=st.integers(0, 8))
def test_a_window_matches_the_definition(prompt: list[int], answer: list[int], reach: int, decay: int) -> None:
    window = TokenWindow(prompt, reach=reach, decay=decay)
    for token_id in answer:
        window.push(token_id)
    seen = window.tokens()
    found = {
        token_id: values
        for token_id, *values in zip(
            seen.ids.tolist(), seen.uses.tolist(), seen.repeated.tolist(), seen.used.tolist(), strict=True
        )
    }
    wanted = expected_window([*prompt, *answer], len(answer), reach, decay)
    assert found.keys() == wanted.keys()
    for token_id, values in wanted.items():
        assert found[token_id] == pytest.approx(values, abs=1e-5)


def test_a_penalty_ends_with_its_range() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, repetition_range=2)
    assert one([4.0, 3.0], params, prompt=[0, 1, 1]).token_id == 0
    assert one([4.0, 3.0, 0.0], params, prompt=[0, 2]).token_id == 1
    assert one([4.0, 3.0, 0.0], params, prompt=[0], generated=(2, 2)).token_id == 0


def test_a_range_that_holds_everything_is_no_range() -> None:
    history = {"prompt": [1, 2, 3], "generated": (2, 2, 4)}
    logits = torch.randn(200, 6, generator=torch.Generator().manual_seed(4))
    knobs: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 0}
    for each in logits:
        ranged = one(each, SamplingParams(**knobs, presence_penalty=0.2, repetition_range=100), **history)
        assert ranged == one(each, SamplingParams(**knobs, presence_penalty=0.2), **history)


@given(tokens=TOKENS, more=st.lists(st.integers(0, 99), max_size=150), limit=st.integers(0, 9))
def test_recent_tokens_are_the_last_ones_newest_first(tokens: list[int], more: list[int], limit: int) -> None:
    recent = RecentTokens(tokens, limit)
    for token_id in more:
        recent.push(token_id)
    whole = [*tokens, *more]
    assert recent.ids.tolist() == whole[-limit:][::-1]
    assert len(recent) == len(whole[-limit:])
