"""What the scheduler promises, proved with integers: order, budget, pages, and two dead ends that end well."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.pages import PagePool
from engine.backends.torch.scheduler import Scheduler
from engine.backends.torch.sequences import Plan, Sequence
from engine.errors import ContextLengthExceeded


def scheduler(
    *, pages: int = 64, page_tokens: int = 4, max_prompts: int = 8, step_tokens: int = 16, max_model_len: int = 200
) -> Scheduler:
    return Scheduler(
        PagePool(pages, page_tokens), max_prompts=max_prompts, step_tokens=step_tokens, max_model_len=max_model_len
    )


def sequence(name: str, prompt: int, *, first: int = 0) -> Sequence:
    """A request of `prompt` tokens that share no page with one whose `first` differs."""
    return Sequence(name, [first, *range(1, prompt)], prompt)


def submit(target: Scheduler, name: str, prompt: int, *, first: int | None = None) -> Sequence:
    new = sequence(name, prompt, first=1000 + int.from_bytes(name.encode()) if first is None else first)
    target.submit(new)
    return new


def step(target: Scheduler, token: Callable[[Sequence], int] = lambda seq: 7) -> Plan:
    plan = target.plan()
    target.commit(plan, [[token(seq)] for seq in plan.sampled])
    target.check()
    return plan


def fed(plan: Plan) -> dict[str, int]:
    return {seq.id: len(chunk.token_ids) for seq, chunk in zip(plan.sequences, plan.chunks, strict=True)}


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes_one_by_one() -> None:
    s = scheduler()
    a = submit(s, "a", 5)
    assert fed(step(s)) == {"a": 5}
    assert (a.computed, a.known) == (5, 6)
    assert fed(step(s)) == {"a": 1}
    assert (a.computed, a.known) == (6, 7)


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
        assert a.known == b.known == 4 + produced


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
    assert g.known == 9


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
    s.max_prompts = 1
    assert fed(step(s)) == {"a": 1, "b": 1, "c": 1}
    s.remove(a)
    s.remove(b)
    assert fed(step(s)) == {"c": 1}
    s.remove(c)
    assert fed(step(s)) == {"d": 3}
    assert d.known == 4


def test_raising_max_prompts_admits_at_once() -> None:
    s = scheduler(max_prompts=1)
    submit(s, "a", 3)
    submit(s, "b", 3)
    step(s)
    s.max_prompts = 2
    assert fed(step(s)) == {"a": 1, "b": 3}


def test_a_prompt_that_can_never_fit_the_pages_is_refused_with_numbers() -> None:
    s = scheduler(pages=4, page_tokens=4)
    with pytest.raises(ContextLengthExceeded, match="17 tokens, more than the 16") as refused:
        submit(s, "a", 17)
    assert refused.value.details == {"prompt_tokens": 17, "limit": 16, "max_model_len": 200, "pool_tokens": 16}
    submit(s, "b", 16)
    assert fed(step(s)) == {"b": 16}


def test_a_prompt_that_fills_the_context_is_refused_with_numbers() -> None:
    s = scheduler(max_model_len=20)
    with pytest.raises(ContextLengthExceeded, match="20 tokens, more than the 19"):
        submit(s, "a", 20)
    submit(s, "b", 19)


def test_max_input_len_is_honoured() -> None:
    s = Scheduler(PagePool(64, 4), max_prompts=1, step_tokens=16, max_model_len=100, max_input_len=10)
    with pytest.raises(ContextLengthExceeded, match="max_input_len is 10"):
        submit(s, "a", 11)


def test_the_only_running_sequence_that_runs_out_of_pages_ends() -> None:
    s = scheduler(pages=2, page_tokens=4)
    a = submit(s, "a", 6)
    plans = [step(s) for _ in range(4)]
    assert [plan.exhausted for plan in plans] == [[], [], [], [a]]
    assert a.known == 9  # eight computed in two pages, and the one sampled from the last of them
    assert not s.running
    assert s.pool.free_pages == 2


def test_a_sequence_ends_where_the_context_ends() -> None:
    s = scheduler(max_model_len=8)
    a = submit(s, "a", 6)
    step(s)
    plan = s.plan()
    assert s.commit(plan, [[7]]) == [a]
    assert a.known == 8
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
    assert (b.computed, b.pages) == (0, [])
    had = list(b.token_ids)
    s.remove(a)
    step(s)
    assert b.token_ids[: len(had)] == had
    assert b.known == len(had) + 1


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


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    s = scheduler(page_tokens=4)
    a = submit(s, "a", 10, first=1)
    step(s)
    b = submit(s, "b", 10, first=1)
    plan = step(s)
    assert fed(plan) == {"a": 1, "b": 2}
    assert b.pages[:2] == a.pages[:2]
    assert (a.cached_tokens, b.cached_tokens) == (0, 8)
    assert (s.counters.prefix_query_tokens, s.counters.prefix_hit_tokens) == (20, 8)
    assert s.counters.prompt_tokens_computed == 12


def test_a_prefix_hit_leaves_one_token_to_compute() -> None:
    s = scheduler(page_tokens=4)
    submit(s, "a", 8, first=1)
    step(s)
    b = submit(s, "b", 8, first=1)
    assert fed(step(s)) == {"a": 1, "b": 4}
    assert b.cached_tokens == 4


def test_a_finished_answer_is_a_prefix_for_the_next_turn() -> None:
    s = scheduler(page_tokens=4)
    a = submit(s, "a", 6)
    for _ in range(7):
        step(s)
    turn = Sequence("b", [*a.token_ids, 99, 98], a.known + 2)
    s.remove(a)
    s.submit(turn)
    assert fed(step(s)) == {"b": 3}
    assert turn.cached_tokens == 12


def test_sequences_under_different_adapters_share_no_page() -> None:
    s = scheduler(page_tokens=4)
    for name, adapter in (("a", ""), ("b", "tuned"), ("c", "tuned")):
        s.submit(Sequence(name, list(range(9)), 9, adapter=adapter))
        step(s)
    assert [seq.cached_tokens for seq in s.running] == [0, 0, 8]


def test_tokens_not_computed_yet_are_no_prefix_for_others() -> None:
    s = scheduler(page_tokens=4)
    submit(s, "a", 9, first=1)
    submit(s, "b", 9, first=1)
    assert fed(step(s)) == {"a": 9, "b": 7}


def test_only_the_computed_part_of_a_long_prompt_is_a_prefix_for_others() -> None:
    s = scheduler(page_tokens=4, step_tokens=18)
    a = submit(s, "a", 40, first=1)
    step(s)
    s.remove(a)
    b = submit(s, "b", 40, first=1)
    step(s)
    assert b.cached_tokens == 16


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    s = scheduler(pages=8, page_tokens=4, max_prompts=2)
    a, b = submit(s, "a", 12), submit(s, "b", 12)
    while not s.counters.preemptions:
        step(s)
    s.remove(a)
    known = b.known
    plan = step(s)
    assert fed(plan)["b"] < known
    assert b.cached_tokens == 0  # what was cached when it first came in


def test_an_admission_leaves_spare_pages_for_running_ones() -> None:
    s = scheduler(pages=4, page_tokens=4)
    submit(s, "a", 8)
    step(s)
    submit(s, "b", 4)  # a holds three pages from its next step on
    assert fed(step(s)) == {"a": 1}
    assert s.counters.preemptions == 0


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
    assert [(s.shrink(), s.step_tokens, s.prompts_limit) for _ in range(2)] == [(True, 8, 0), (True, 4, 0)]
    assert s.shrink()
    assert (s.step_tokens, s.prompts_limit, [seq.id for seq in s.running]) == (16, 1, ["a"])
    assert [s.shrink() for _ in range(3)] == [True, True, False]
    s.check()


def test_decodes_without_memory_give_up_the_youngest_quarter_which_waits_for_its_turn() -> None:
    s = scheduler(max_prompts=8)
    for number in range(8):
        submit(s, str(number), 2)
    step(s)
    assert s.shrink()
    assert (s.prompts_limit, s.step_tokens) == (6, 16)
    assert [seq.id for seq in s.running] == list("012345")
    assert [seq.id for seq in s.waiting] == list("67")
    assert [seq.id for seq in step(s).sequences] == list("012345")
    s.remove(s.running[0])
    step(s)
    assert [seq.id for seq in s.running] == list("123456")
    s.set_max_prompts(8)
    step(s)
    assert s.prompts_limit == 0
    assert len(s.running) == 7


STREAMS = [[0, 1, 0, 0, 1] * 6, [1, 1, 0] * 10]
PROMPTS = st.builds(
    lambda stream, length, tail: (stream[:length] + tail)[:29],
    st.sampled_from(STREAMS),
    st.integers(1, 29),
    st.lists(st.integers(0, 1), max_size=3),
)
"""Prompts that often share a long prefix."""


class SchedulerWalk(RuleBasedStateMachine):
    """Random life of a small scheduler, with a fake KV cache: a page's slots hold the very tokens fed to it.

    Before each chunk, the pages must hold exactly the tokens that come before it: this proves that every token is
    fed once, in order, into the right place, and that shared prefixes and preemption never mix sequences up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.page_tokens = 3
        self.scheduler = scheduler(pages=9, page_tokens=3, max_prompts=3, step_tokens=7, max_model_len=40)
        self.slots: dict[tuple[int, int], int] = {}
        self.live: dict[str, Sequence] = {}
        self.expected: dict[str, list[int]] = {}
        self.count = 0

    @rule(prompt=PROMPTS, generated=st.lists(st.integers(0, 1), max_size=4))
    def submit(self, prompt: list[int], generated: list[int]) -> None:
        self.count += 1
        new = Sequence(str(self.count), prompt + generated, len(prompt))
        if len(prompt) > 27:
            with pytest.raises(ContextLengthExceeded):
                self.scheduler.submit(new)
            return
        self.scheduler.submit(new)
        self.live[new.id] = new
        self.expected[new.id] = prompt + generated

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.remove(self.live.pop(name))

    @rule(max_prompts=st.integers(1, 5))
    def set_max_prompts(self, max_prompts: int) -> None:
        self.scheduler.set_max_prompts(max_prompts)

    @rule()
    def run_out_of_memory(self) -> None:
        for ended in self.scheduler.plan().exhausted:
            del self.live[ended.id]
        self.scheduler.shrink()

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 6))
    def step(self, seed: int, steps: int) -> None:
        draw = random.Random(seed)
        for _ in range(steps):
            self.one_step(draw)

    def one_step(self, draw: random.Random) -> None:
        running = len(self.scheduler.running)
        decodes = {seq.id for seq in self.scheduler.running if seq.missing == 1}
        preemptions = self.scheduler.counters.preemptions
        guesses = {name: [draw.randint(0, 1) for _ in range(draw.randint(0, 5))] for name in decodes}
        plan = self.scheduler.plan()
        self.scheduler.add_guesses(plan, guesses)
        preempted = self.scheduler.counters.preemptions > preemptions
        assert len(self.scheduler.running) <= max(self.scheduler.max_prompts, running)
        assert sum(len(chunk.token_ids) - chunk.guessed for chunk in plan.chunks) <= max(7, len(decodes) + 3)
        if not preempted and not plan.exhausted:
            assert decodes <= {seq.id for seq in plan.sequences}
        for seq, chunk in zip(plan.sequences, plan.chunks, strict=True):
            self.feed(seq, chunk)
        tokens = []
        for chunk in plan.chunks:
            if chunk.sample:
                held = draw.randint(0, chunk.guessed)
                tokens.append([*chunk.token_ids[1:][:held], draw.randint(0, 1)])
        for seq, new in zip(plan.sampled, tokens, strict=True):
            self.expected[seq.id] += new[: 40 - len(self.expected[seq.id])]
        ended = plan.exhausted + self.scheduler.commit(plan, tokens)
        for seq in ended:
            assert seq.known >= min(40, 9 * 3)
            del self.live[seq.id]
        self.scheduler.check()
        assert plan.chunks or ended or preempted or not self.live, "work is left but the step did nothing"

    def feed(self, seq: Sequence, chunk: ChunkInput) -> None:
        size, start, pages = self.page_tokens, chunk.start, list(chunk.pages)
        fed = list(chunk.token_ids)
        tokens = fed[: len(fed) - chunk.guessed]
        known = self.expected[seq.id]
        assert [self.slots[pages[p // size], p % size] for p in range(start)] == known[:start]
        assert tokens
        assert tokens == known[start : start + len(tokens)]
        assert chunk.sample == (start + len(tokens) == len(known))
        for offset, token in enumerate(fed):
            position = start + offset
            self.slots[pages[position // size], position % size] = token

    @invariant()
    def accounts_add_up(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.live)
        for name, seq in self.live.items():
            assert seq.token_ids == self.expected[name]

    def teardown(self) -> None:
        for seq in self.live.values():
            self.scheduler.remove(seq)
        assert self.scheduler.pool.free_pages == 9
        self.scheduler.check()


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
