"""What the scheduler promises, proved with integers: order, budget, pages, and two dead ends that end well."""

from __future__ import annotations

import pytest

from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence
from engine.errors import ContextLengthExceeded
from tests.fakes.scheduling import fed, scheduler, step, still_clock, submit


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes_one_by_one() -> None:
    s = scheduler()
    a = submit(s, "a", 5)
    assert fed(step(s)) == {"a": 5}
    assert (a.computed, a.num_tokens) == (5, 6)
    assert fed(step(s)) == {"a": 1}
    assert (a.computed, a.num_tokens) == (6, 7)


def test_a_long_prompt_is_fed_in_chunks_and_sampled_once_at_its_end() -> None:
    s = scheduler(step_tokens=16)
    submit(s, "a", 40)
    plans = [step(s) for _ in range(3)]
    assert [fed(plan)["a"] for plan in plans] == [16, 16, 8]
    assert [plan.chunks[0].sample for plan in plans] == [False, False, True]
    assert [plan.chunks[0].start for plan in plans] == [0, 16, 32]


def test_decodes_get_their_token_in_every_step_of_a_long_prompt() -> None:
    s = scheduler(step_tokens=16)
    a, b = submit(s, "a", 4), submit(s, "b", 4)
    step(s)
    submit(s, "long", 60)
    for produced in range(2, 6):
        plan = step(s)
        assert fed(plan) == {"a": 1, "b": 1, "long": 14}
        assert a.num_tokens == b.num_tokens == 4 + produced


def test_an_older_prompt_is_finished_before_a_younger_one_gets_budget() -> None:
    s = scheduler(step_tokens=16)
    submit(s, "a", 24)
    submit(s, "b", 24)
    assert fed(step(s)) == {"a": 16}
    assert fed(step(s)) == {"a": 8, "b": 8}


def test_prompts_move_on_even_where_decodes_alone_use_up_the_budget() -> None:
    s = scheduler(step_tokens=4, max_prompts=7)
    for name in "abcdef":
        submit(s, name, 4)
    for _ in range(12):
        step(s)
    g = submit(s, "g", 8)
    plan = step(s)
    assert fed(plan) == {**dict.fromkeys("abcdef", 1), "g": 4}
    step(s)
    assert g.num_tokens == 9


def test_no_more_than_max_prompts_run_and_the_rest_wait_in_order() -> None:
    s = scheduler(max_prompts=2)
    names = ["a", "b", "c", "d"]
    sequences = [submit(s, name, 3) for name in names]
    step(s)
    assert [seq.id for seq in s.running] == ["a", "b"]
    s.remove(sequences[0])
    step(s)
    assert [seq.id for seq in s.running] == ["b", "c"]
    assert [seq.id for seq in s.waiting] == ["d"]


def test_lowering_max_prompts_lets_running_ones_finish() -> None:
    s = scheduler(max_prompts=3)
    a, b, c, d = [submit(s, name, 3) for name in "abcd"]
    step(s)
    s.limits.max_prompts = 1
    assert fed(step(s)) == {"a": 1, "b": 1, "c": 1}
    s.remove(a)
    s.remove(b)
    assert fed(step(s)) == {"c": 1}
    s.remove(c)
    assert fed(step(s)) == {"d": 3}
    assert d.num_tokens == 4


def test_raising_max_prompts_admits_at_once() -> None:
    s = scheduler(max_prompts=1)
    submit(s, "a", 3)
    submit(s, "b", 3)
    step(s)
    s.limits.max_prompts = 2
    assert fed(step(s)) == {"a": 1, "b": 3}


def test_a_prompt_that_can_never_fit_the_pages_is_refused_with_numbers() -> None:
    s = scheduler(pages=4, page_tokens=4)
    with pytest.raises(ContextLengthExceeded, match="17 tokens, more than the limit of 16") as refused:
        submit(s, "a", 17)
    assert refused.value.details == {"prompt_tokens": 17, "limit": 16, "max_model_len": 200, "pool_tokens": 16}
    submit(s, "b", 16)
    assert fed(step(s)) == {"b": 16}


def test_a_prompt_that_fills_the_context_is_refused_with_numbers() -> None:
    s = scheduler(max_model_len=20)
    with pytest.raises(ContextLengthExceeded, match="20 tokens, more than the limit of 19"):
        submit(s, "a", 20)
    submit(s, "b", 19)


def test_max_input_len_is_honoured() -> None:
    s = Scheduler(
        PagePool(64, 4), max_prompts=1, step_tokens=16, max_model_len=100, max_input_len=10, clock=still_clock
    )
    with pytest.raises(ContextLengthExceeded, match="max_input_len is 10"):
        submit(s, "a", 11)


def test_the_only_running_sequence_that_runs_out_of_pages_ends() -> None:
    s = scheduler(pages=2, page_tokens=4)
    a = submit(s, "a", 6)
    plans = [step(s) for _ in range(4)]
    assert [plan.exhausted for plan in plans] == [[], [], [], [a]]
    assert a.num_tokens == 9  # eight computed in two pages, and the one sampled from the last of them
    assert not s.running
    assert s.pool.free_pages == 2


def test_a_sequence_ends_where_the_context_ends() -> None:
    s = scheduler(max_model_len=8)
    a = submit(s, "a", 6)
    step(s)
    plan = s.plan()
    assert s.commit(plan, [[7]]) == [a]
    assert a.num_tokens == 8
    assert not s.running
    s.check()


def test_output_brought_along_that_already_fills_everything_ends_at_once() -> None:
    s = scheduler(pages=4, page_tokens=4)
    a = Sequence("a", list(range(17)), 5)
    s.submit(a)
    assert step(s).exhausted == [a]


def test_the_youngest_is_preempted_and_goes_on_later_from_all_it_had() -> None:
    s = scheduler(pages=6, page_tokens=4)
    a, b = submit(s, "a", 8), submit(s, "b", 7)
    while not s.counters.preemptions:
        plan = step(s)
    assert fed(plan) == {"a": 1}
    assert list(s.waiting) == [b]
    assert (b.computed, len(b.pages)) == (0, 0)
    had = list(b.token_ids)
    s.remove(a)
    step(s)
    assert b.token_ids[: len(had)] == had
    assert b.num_tokens == len(had) + 1


def test_a_preempted_sequence_is_ahead_of_those_that_came_later() -> None:
    s = scheduler(pages=6, page_tokens=4, max_prompts=2)
    for name in "abc":
        submit(s, name, 7)
    while not s.counters.preemptions:
        step(s)
    assert [seq.id for seq in s.waiting] == ["b", "c"]


def test_nothing_new_is_admitted_in_a_step_that_preempted() -> None:
    s = scheduler(pages=8, page_tokens=4, max_prompts=3)
    submit(s, "a", 12)
    submit(s, "b", 12)
    submit(s, "c", 1)
    while not s.counters.preemptions:
        plan = step(s)
    assert set(fed(plan)) == {"a"}
    assert [seq.id for seq in s.waiting] == ["b", "c"]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_removing_a_sequence_in_any_state_frees_its_pages(steps: int) -> None:
    s = scheduler(step_tokens=4)
    a = submit(s, "a", 10)
    for _ in range(steps):
        step(s)
    s.remove(a)
    s.remove(a)
    assert s.pool.free_pages == 64
    assert not step(s).chunks
    s.check()


def test_a_step_that_failed_can_be_planned_again() -> None:
    s = scheduler(step_tokens=16)
    a = submit(s, "a", 20)
    step(s)
    before = s.plan()
    again = s.plan(admit=False)
    assert again.chunks == before.chunks
    s.commit(again, [[3]])
    assert a.token_ids[-1] == 3
    s.check()


def test_a_step_of_prompts_without_memory_gives_up_half_of_its_budget_first() -> None:
    s = scheduler(step_tokens=16, page_tokens=4)
    submit(s, "a", 10)
    submit(s, "b", 60)
    s.plan()
    assert [(s.shrink(), s.limits.step_tokens, s.limits.prompts_limit) for _ in range(2)] == [
        (True, 8, 0),
        (True, 4, 0),
    ]
    assert s.shrink()
    assert (s.limits.step_tokens, s.limits.prompts_limit, [seq.id for seq in s.running]) == (16, 1, ["a"])
    assert [s.shrink() for _ in range(3)] == [True, True, False]
    assert s.counters.oom_steps == 6
    s.check()


def test_decodes_without_memory_give_up_the_youngest_quarter_which_waits_for_its_turn() -> None:
    s = scheduler(max_prompts=8)
    for number in range(8):
        submit(s, str(number), 2)
    step(s)
    assert s.shrink()
    assert (s.limits.prompts_limit, s.limits.step_tokens) == (6, 16)
    assert [seq.id for seq in s.running] == list("012345")
    assert [seq.id for seq in s.waiting] == list("67")
    assert [seq.id for seq in step(s).sequences] == list("012345")
    s.remove(s.running[0])
    step(s)
    assert [seq.id for seq in s.running] == list("123456")
    s.limits.set_max_prompts(8)
    step(s)
    assert s.limits.prompts_limit == 0
    assert len(s.running) == 7
