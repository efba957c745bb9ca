"""Leaps: many steps at once are those steps; and the worker's outbox tells as often as a leap says."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence
from engine.simulation.step_costs import StepCosts, StepShape
from engine.simulation.worker import Pace, advance_uneventful, message_steps, uneventful_steps
from engine.worker_process.outbox import Outbox
from tests.fakes.scheduling import still_clock

COSTS = StepCosts(fixed_s=1e-3, decode_s=1e-4, context_token_s=1e-6, prompt_token_s=1e-4)


def scheduler(prompts: list[int], pages: int) -> Scheduler:
    """One whose prompts are computed, as far as its pages allow."""
    made = Scheduler(PagePool(pages, 4, b"salt"), max_prompts=8, step_tokens=64, max_model_len=200, clock=still_clock)
    for number, tokens in enumerate(prompts):
        made.submit(Sequence(str(number), [number] * tokens, tokens))
    for _ in range(20):
        if made.running and all(each.num_uncomputed == 1 for each in made.running):
            break
        step(made)
    return made


def step(made: Scheduler) -> float:
    plan = made.plan()
    made.commit(plan, ([0] for _ in plan.sampled_sequences))
    made.check()
    return COSTS.seconds(StepShape.of_plan(plan))


def state(made: Scheduler) -> list[tuple[str, int, int, int]]:
    return [(each.id, each.computed, each.num_tokens, len(each.pages)) for each in made.running]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(20, 120),
    st.integers(2, 60),
)
@example([1, 1, 1], 20, 24)
def test_a_leap_leaves_what_as_many_steps_leave(prompts: list[int], pages: int, left: int) -> None:
    leapt, stepped = scheduler(prompts, pages), scheduler(prompts, pages)
    steps = uneventful_steps(leapt, [left])
    assert steps < left
    seconds = Pace(leapt, COSTS).seconds(steps)
    advance_uneventful(leapt, steps)
    took_s = sum(step(stepped) for _ in range(steps))
    assert state(leapt) == state(stepped)
    assert leapt.counters.preemptions == stepped.counters.preemptions
    assert seconds == pytest.approx(took_s)
    for _ in range(3):  # and they go on alike, findable pages too
        step(leapt)
        step(stepped)
    assert state(leapt) == state(stepped)
    changed, other = leapt.pool.take_changes(), stepped.pool.take_changes()
    assert set(changed.added) == set(other.added) and set(changed.dropped) == set(other.dropped)


def test_no_leap_goes_over_a_prompt_or_an_arrival_that_could_come_in() -> None:
    made = scheduler([8, 8], 50)
    assert uneventful_steps(made, [10, 10]) == 9
    made.submit(Sequence("new", [7] * 9, 9))
    assert uneventful_steps(made, [10, 10]) == 0
    made.plan()
    assert uneventful_steps(made, [10, 10, 10]) == 0


@given(st.floats(1e-4, 1e-1), st.floats(0, 1e-4), st.integers(1, 5000), st.floats(0, 0.999))
def test_a_pace_counts_the_steps_within_a_time(first_s: float, more_s: float, steps: int, share: float) -> None:
    pace = Pace.__new__(Pace)
    pace.first_s, pace.more_s = first_s, more_s
    within = pace.steps_within(pace.seconds(steps) + share * (first_s + steps * more_s) * 0.99)
    assert within in (steps - 1, steps) and pace.seconds(within) <= pace.seconds(steps) * (1 + 1e-12)
    assert pace.steps_within(0.0) == 0


@pytest.mark.parametrize("answers", [1, 7, 8, 16, 32, 64])
@pytest.mark.parametrize("step_s", [0.0013, 0.004, 0.011, 0.03, 0.2])
def test_steps_are_held_as_the_outbox_holds_them(answers: int, step_s: float) -> None:
    outbox, now, sent_at = Outbox(), random.Random(1).random(), []
    for number in range(200):
        for answer in range(answers):
            outbox.output_of(str(answer)).token_ids.append(0)
        if outbox.stepped(now, now + step_s, answers):
            outbox.take()
            sent_at.append(number)
        now += step_s
    apart = {later - earlier for earlier, later in itertools.pairwise(sent_at)}
    assert apart <= {
        message_steps(answers, step_s),
        message_steps(answers, step_s) - 1,
        message_steps(answers, step_s) + 1,
    }
    assert abs(len(sent_at) - 200 / message_steps(answers, step_s)) <= 0.02 * 200 / message_steps(answers, step_s) + 1
