"""Planning a step behind one that nobody has read: who takes part, what waits, and that nothing of it stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.backends.scheduler.async_scheduling import async_obstacle, plan_next_step
from engine.backends.scheduler.batch import pending_token_id
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.backends.torch.cuda.step_transfer import fill_pending_ids
from tests.fakes.scheduling import still_clock


def scheduler(*, pages: int = 64, max_prompts: int = 8, step_tokens: int = 16, max_model_len: int = 200) -> Scheduler:
    pool = PagePool(pages, 4)
    return Scheduler(
        pool, max_prompts=max_prompts, step_tokens=step_tokens, max_model_len=max_model_len, clock=still_clock
    )


def submit(target: Scheduler, name: str, prompt: int, *, most: int | None = None, tell: int = 0) -> Sequence:
    ids = [1000 + int.from_bytes(name.encode()), *range(1, prompt)]
    new = Sequence(name, ids, prompt, limit=None if most is None else prompt + most, states_wanted=tell)
    target.submit(new)
    return new


def fed(plan: BatchPlan) -> dict[str, list[int]]:
    return {seq.id: list(chunk.token_ids) for seq, chunk in zip(plan.sequences, plan.chunks, strict=True)}


def commit(target: Scheduler, plan: BatchPlan) -> None:
    target.commit(plan, [[7] for _ in plan.sampled_sequences])
    target.check()


def test_the_next_step_feeds_the_rows_that_this_one_draws() -> None:
    s = scheduler()
    a, b = submit(s, "a", 3), submit(s, "b", 3)
    running = s.plan()
    assert async_obstacle(running, s, speculates=False) == ""
    plan = plan_next_step(running, s)
    assert fed(plan) == {"a": [pending_token_id(0)], "b": [pending_token_id(1)]}
    assert [(chunk.start, chunk.sample) for chunk in plan.chunks] == [(3, True), (3, True)]
    assert [(each.computed, each.num_tokens) for each in (a, b)] == [(0, 3), (0, 3)]  # as if nothing had been planned


def test_a_prompt_goes_on_and_others_join_behind_a_step_that_is_not_read() -> None:
    s = scheduler(step_tokens=16)
    long = submit(s, "long", 40)
    running = s.plan()
    assert fed(running) == {"long": long.token_ids[:16]}
    commit(s, running)
    running = s.plan()
    submit(s, "new", 5)
    plan = plan_next_step(running, s)
    assert fed(plan) == {"long": long.token_ids[32:40], "new": [1000 + int.from_bytes(b"new"), 1, 2, 3, 4]}


def test_rows_are_counted_over_those_that_are_drawn_for_alone() -> None:
    s = scheduler(step_tokens=8)
    submit(s, "a", 3)
    commit(s, s.plan())
    submit(s, "long", 30)
    submit(s, "b", 3)
    running = s.plan()
    assert fed(running).keys() == {"a", "long"}
    assert fed(plan_next_step(running, s))["a"] == [pending_token_id(0)]


@pytest.mark.parametrize("end", ["max_tokens", "context"])
def test_a_sequence_with_room_for_one_more_token_alone_takes_no_part(end: str) -> None:
    s = scheduler(max_model_len=4 if end == "context" else 200)
    submit(s, "ends", 3, most=1 if end == "max_tokens" else None)
    submit(s, "goes on", 2, most=9)
    running = s.plan()
    assert fed(plan_next_step(running, s)) == {"goes on": [pending_token_id(1)]}
    commit(s, running)


def test_one_without_an_answer_takes_no_part() -> None:
    s = scheduler()
    s.submit(Sequence("scored", [1, 2, 3], 3, generates=False))
    assert not plan_next_step(s.plan(), s).chunks


def _told(s: Scheduler) -> None:
    submit(s, "told", 5, tell=4)


def _outgrown(s: Scheduler) -> None:
    s.submit(Sequence("outgrown", list(range(200)), 100))


def _no_pages(s: Scheduler) -> None:
    pages = s.pool.allocate(s.pool.free_pages)
    assert pages is not None


@pytest.mark.parametrize(
    ("happens", "speculates", "why"),
    [
        (lambda s: None, True, "draft tokens"),
        (_told, False, "hidden states"),
        (_outgrown, False, "ends without"),
        (_no_pages, False, "preempted"),
        (lambda s: submit(s, "b", 9), False, ""),
    ],
    ids=["guesses", "a prompt is told of", "outgrown", "no page", "nothing"],
)
def test_what_the_next_step_waits_for(happens: Callable[[Scheduler], object], speculates: bool, why: str) -> None:
    s = scheduler()
    submit(s, "a", 4)  # its next token takes a new page
    running = s.plan()
    happens(s)
    found = async_obstacle(running, s, speculates=speculates)
    assert why in found and bool(why) == bool(found)


def test_pages_that_a_launched_step_writes_to_are_nobodys_until_it_is_done() -> None:
    s = scheduler(pages=4)
    a = submit(s, "a", 6)
    running = s.plan()
    plan = plan_next_step(running, s)
    held = s.pin_written(plan)
    assert held == list(a.pages[1:2])
    commit(s, running)
    s.remove(a)
    s.check()
    assert s.pool.free_pages == 3
    s.unpin_written(held)
    s.check()
    assert s.pool.free_pages == 4


def answers(seed: int, *, ahead: bool) -> tuple[dict[str, list[int]], int]:
    """The texts of requests over few pages, and how often one was preempted. A token is a function of its request and
    position; half of the requests end where nobody could foresee it."""
    r = random.Random(seed)
    s = scheduler(pages=14, max_prompts=4, step_tokens=8, max_model_len=40)
    lives = {name: submit(s, name, r.randrange(1, 20), most=r.randrange(1, 18)) for name in "123456789"}
    ends = {
        name: each.prompt_tokens + r.randrange(1, 18) if int(name) % 2 else each.limit for name, each in lives.items()
    }
    texts = dict(lives)
    launched: tuple[BatchPlan, list[int]] | None = None
    while lives:
        running, written = launched or (s.plan(), None)
        for sequence in running.exhausted:
            del lives[sequence.id]
        alive = [each for each in zip(running.sequences, running.chunks, strict=True) if each[0].pages]
        running, launched = BatchPlan([each for each, _ in alive], [chunk for _, chunk in alive]), None
        if ahead and not async_obstacle(running, s, speculates=False):
            plan = plan_next_step(running, s)
            launched = (plan, s.pin_written(plan)) if plan.chunks else None
        ended = s.commit(running, [[100 * each.num_tokens + int(each.id)] for each in running.sampled_sequences])
        for each in running.sampled_sequences:
            if each in ended or each.num_tokens in (ends[each.id], each.limit):
                s.remove(lives.pop(each.id))
        if written is not None:
            s.unpin_written(written)
        s.check()
    return {name: each.token_ids for name, each in texts.items()}, s.counters.preemptions


def test_answers_come_out_as_they_do_without_planning_ahead() -> None:
    preemptions = 0
    for seed in range(12):
        (found, preempted), (expected, _) = answers(seed, ahead=True), answers(seed, ahead=False)
        assert found == expected
        preemptions += preempted
    assert preemptions > 0


def test_ids_that_are_unread_are_filled_in_where_they_stand() -> None:
    ids = torch.tensor([5, pending_token_id(2), 6, pending_token_id(0), pending_token_id(1)])
    fill_pending_ids(ids, torch.tensor([70, -1, 72]))
    assert ids.tolist() == [5, 72, 6, 70, 0]  # nothing was drawn in row 1; token 0 is as good as any
    fill_pending_ids(ids, torch.tensor([], dtype=torch.int64))
    assert ids.tolist() == [5, 72, 6, 70, 0]
