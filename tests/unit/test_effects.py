"""What a knob did is told in numbers only where the load was the same, and in words everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.tuning.effects import (
    BAND,
    ENOUGH_S,
    SETTLE_S,
    WINDOW_S,
    Change,
    Effect,
    Effects,
    ObservedSettings,
    changes,
    effect_of,
    load_of,
    observed_settings,
)
from engine.snapshot import Mark, Second, Snapshot

START = 1000.0
Value = Callable[[float], float]


def _history(
    seconds: int, load: Value = lambda at: 8, tokens: Value = lambda at: 400, latency: Value = lambda at: 0.1
) -> tuple[Second, ...]:
    """Each a function of the seconds since START."""
    return tuple(
        Second(
            at=START + at,
            running=int(load(at)),
            output_tokens=int(tokens(at)),
            ttft_p95=latency(at) * 3,
            itl_p95=latency(at),
        )
        for at in range(1, seconds + 1)
    )


def _mark(
    at: float, before: float = 1, after: float = 2, *, knob: str = "num_workers", settled: float | None = 3
) -> Mark:
    """settled: seconds until the workers were there."""
    settled_at = None if settled is None else START + at + settled
    said = f"{knob} {before:g} -> {after:g}"
    return Mark(at=START + at, text=said, knob=knob, before=before, after=after, model="demo", settled_at=settled_at)


def _effect(history: Sequence[Second], *marks: Mark, which: int = 0) -> Effect:
    return effect_of(changes(marks)[which], marks, history)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_more_tokens_and_longer_latency_under_the_same_load_are_told_with_their_numbers() -> None:
    history = _history(120, tokens=lambda at: 400 if at <= 60 else 600, latency=lambda at: 0.1 if at <= 60 else 0.2)
    effect = _effect(history, _mark(60))
    tokens, ttft, itl = effect.tokens_per_s, effect.ttft_s, effect.itl_s
    assert effect.outcome == "measured" and effect.load == 8
    assert tokens is not None and ttft is not None and itl is not None
    assert (tokens.before, tokens.after, tokens.verdict) == (400, 600, "better")
    assert tokens.relative == pytest.approx(0.5)
    assert (itl.before, itl.after, itl.verdict) == (pytest.approx(0.1), pytest.approx(0.2), "worse")
    assert (ttft.before, ttft.after, ttft.verdict) == (pytest.approx(0.3), pytest.approx(0.6), "worse")


def test_shorter_latency_is_better() -> None:
    effect = _effect(_history(120, latency=lambda at: 0.2 if at <= 60 else 0.1), _mark(60))
    assert effect.itl_s is not None and effect.itl_s.verdict == "better"


def test_a_difference_within_the_noise_is_none() -> None:
    noisy = _effect(_history(120, tokens=lambda at: 400 + 300 * (at % 2) + (40 if at > 60 else 0)), _mark(60))
    small = _effect(_history(120, tokens=lambda at: 400 if at <= 60 else 412), _mark(60))
    assert noisy.tokens_per_s is not None and noisy.tokens_per_s.verdict == "same"
    assert small.tokens_per_s is not None and small.tokens_per_s.verdict == "same"


def test_the_seconds_until_the_workers_are_there_do_not_count() -> None:
    history = _history(120, tokens=lambda at: 400 if at <= 60 else 0 if at <= 80 else 600)
    effect = _effect(history, _mark(60, settled=20 - SETTLE_S))
    assert effect.tokens_per_s is not None and effect.tokens_per_s.after == 600


def test_only_seconds_with_about_as_many_requests_are_compared() -> None:
    def load(at: float) -> float:
        return 8 if at <= 60 else (30 if at <= 90 else 9)

    effect = _effect(_history(120, load=load, tokens=lambda at: 900 if 60 < at <= 90 else 400), _mark(60))
    assert effect.outcome == "measured" and effect.tokens_per_s is not None
    assert (effect.tokens_per_s.after, effect.seconds) == (400, (60, 30))


def test_a_latency_that_was_hardly_ever_measured_is_not_told() -> None:
    history = tuple(
        Second(at=second.at, running=8, output_tokens=400, itl_p95=0.1, ttft_p95=0.3 if second.at < START + 3 else None)
        for second in _history(120)
    )
    effect = _effect(history, _mark(60))
    assert effect.outcome == "measured" and effect.ttft_s is None and effect.itl_s is not None


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "marks", "outcome", "said"),
    [
        (_history(62), [_mark(60, settled=None)], "waiting", "until the workers are there"),
        (_history(70), [_mark(60)], "measuring", "5 s more"),
        (_history(90, load=lambda at: 8 if at <= 60 else 0), [_mark(60)], "waiting", "for load"),
        (
            _history(90, load=lambda at: 3 if at <= 60 else 20),
            [_mark(60)],
            "incomparable",
            "the load changed from 3 to 20 requests",
        ),
        (_history(90, load=lambda at: 0), [_mark(60)], "unmeasured", "no load before it, nothing to compare with"),
        (
            _history(90, load=lambda at: 8 if at > 56 else 0),
            [_mark(60)],
            "unmeasured",
            "only 4 s of load before it, nothing to compare with",
        ),
        (
            _history(90),
            [_mark(60), _mark(70, 8, 16, knob="max_prompts", settled=0)],
            "unmeasured",
            "only 5 s of load before the next change",
        ),
        (
            _history(90),
            [_mark(60, settled=9), _mark(65, 8, 16, knob="max_prompts", settled=4)],
            "unmeasured",
            "another change came before it took effect",
        ),
        (_history(60)[40:], [_mark(10)], "unmeasured", "too long ago to be measured"),
        ((), [_mark(10)], "unmeasured", "too long ago to be measured"),
    ],
)
def test_what_cannot_be_told_in_numbers_is_told_in_words(
    history: Sequence[Second], marks: list[Mark], outcome: str, said: str
) -> None:
    effect = _effect(history, *marks)
    assert (effect.outcome, effect.text, effect.tokens_per_s) == (outcome, said, None)


def test_a_load_that_never_stays_is_not_compared() -> None:
    effect = _effect(_history(180, load=lambda at: 10 if at <= 60 else 10 + 11 * (at % 8)), _mark(60))
    assert effect.outcome == "incomparable" and effect.final


@given(st.lists(st.integers(0, 40), min_size=20, max_size=140), st.integers(5, 100), st.floats(0, 30))
def test_numbers_are_only_ever_told_of_enough_seconds_of_one_load(loads: list[int], turn: int, settled: float) -> None:
    history = _history(len(loads), load=lambda at: loads[int(at) - 1])
    effect = _effect(history, _mark(turn, settled=settled))
    if effect.outcome != "measured":
        assert effect.text
        return
    assert min(effect.seconds) >= ENOUGH_S and max(effect.seconds) <= WINDOW_S
    after = [each for each in history if each.at > START + turn + settled + SETTLE_S]
    assert effect.load is not None
    near = max(1.0, BAND * effect.load) * 2 + 1
    assert sum(abs(load_of(each) - effect.load) <= near for each in after) >= ENOUGH_S


# -- changes ----------------------------------------------------------------------------------------------------------


def test_steps_of_one_turn_are_one_change() -> None:
    marks = [_mark(10, 1, 2, settled=30), _mark(11, 2, 3, settled=29), _mark(12, 3, 4, settled=28)]
    assert changes(marks) == [Change("num_workers", 1, 4, START + 10, START + 12, START + 40, "demo")]


def test_a_turn_that_was_taken_back_at_once_is_no_change() -> None:
    assert changes([_mark(10, 1, 2, settled=30), _mark(11, 2, 1, settled=0)]) == []


def test_a_later_turn_of_the_same_knob_is_another_change() -> None:
    assert len(changes([_mark(10, 1, 2), _mark(40, 2, 3)])) == 2


def test_marks_of_other_things_are_no_changes_but_end_what_came_before() -> None:
    other = Mark(at=START + 70, text="loaded demo")
    assert changes([other]) == []
    effect = effect_of(changes([_mark(60)])[0], [_mark(60), other], _history(120))
    assert effect.text == "only 5 s of load before the next change"


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_was_measured_is_kept_when_the_history_no_longer_reaches_it() -> None:
    effects, history = Effects(), _history(900, tokens=lambda at: 400 if at <= 60 else 600)
    for end in (70, 120, 600, 900):
        effects.look(Snapshot(at=START + end, history=history[max(0, end - 600) : end], marks=(_mark(60),)))
    (effect,) = effects.found
    assert effect.outcome == "measured" and effect.tokens_per_s is not None
    assert (effect.tokens_per_s.before, effect.tokens_per_s.after) == (400, 600)


def test_the_newest_change_comes_first() -> None:
    effects = Effects()
    marks = (_mark(20), _mark(60, 8, 16, knob="max_prompts"))
    effects.look(Snapshot(at=START + 120, history=_history(120), marks=marks))
    assert [effect.change.knob for effect in effects.found] == ["max_prompts", "num_workers"]


# -- settings that were in use ----------------------------------------------------------------------------------------


def test_each_pair_of_knob_values_has_what_it_gave_the_present_one_last() -> None:
    history = _history(180, tokens=lambda at: 100 if at <= 60 else 200 if at <= 120 else 300)
    marks = [_mark(60, 1, 2), _mark(120, 8, 16, knob="max_prompts")]
    found = observed_settings(history, marks, "demo", 2, 16)
    assert [(each.workers, each.max_prompts, each.tokens_per_s) for each in found[:2]] == [(2, 8, 200), (1, 8, 100)]
    assert (found[2].workers, found[2].max_prompts, found[2].tokens_per_s, found[2].now) == (2, 16, 300, True)


def test_a_setting_that_never_had_load_is_left_out() -> None:
    found = observed_settings(_history(120, load=lambda at: 8 if at > 60 else 0), [_mark(60)], "demo", 2, 8)
    assert [(each.workers, each.now) for each in found] == [(2, True)]


def test_what_was_in_use_is_worked_out_once_for_each_second() -> None:
    seen, history = ObservedSettings(), _history(120)
    first = Snapshot(at=START, history=history[:119], target_workers=1, max_prompts=8)
    assert seen.of(first, "demo") is seen.of(first, "demo")
    later = Snapshot(at=START, history=history, target_workers=1, max_prompts=8)
    assert seen.of(later, "demo")[0].seconds == 120


def test_knobs_of_another_model_are_not_this_one_s() -> None:
    other = replace_model(_mark(60, 1, 5), "other")
    found = observed_settings(_history(120), [other], "demo", 2, 8)
    assert [each.workers for each in found] == [2]


def replace_model(mark: Mark, model: str) -> Mark:
    """The same mark on another model."""
    return Mark(at=mark.at, text=mark.text, knob=mark.knob, before=mark.before, after=mark.after, model=model)
