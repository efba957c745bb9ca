"""Prefixes that the scheduler finds in its pages, and the pages it spares."""

from __future__ import annotations

from engine.backends.scheduler.sequences import Sequence
from tests.fakes.scheduling import fed, scheduler, step, submit


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


def test_a_preempted_sequence_is_counted_once() -> None:
    s = scheduler(pages=8, page_tokens=4)
    submit(s, "a", 10)
    submit(s, "b", 10)
    while not s.counters.preemptions or s.waiting:
        step(s)
    assert s.counters.prefix_query_tokens == 20


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
    turn = Sequence("b", [*a.token_ids, 99, 98], a.num_tokens + 2)
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


def test_sequences_of_different_scopes_share_the_pages_that_both_declare_shared() -> None:
    s = scheduler(page_tokens=4)
    for name, scope, shared in (("a", "alice", 0), ("b", "bob", 7), ("c", "carol", 6), ("d", "bob", 7), ("e", "", 0)):
        s.submit(Sequence(name, list(range(14)), 14, cache_scope=scope, shared_tokens=shared))
        step(s)
    assert [seq.cached_tokens for seq in s.running] == [0, 0, 4, 12, 4]


def test_an_answer_is_a_prefix_for_its_own_scope_alone() -> None:
    s = scheduler(page_tokens=4)
    first = Sequence("a", list(range(6)), 6, cache_scope="alice", shared_tokens=6)
    s.submit(first)
    for _ in range(7):
        step(s)
    s.remove(first)
    found = {}
    for scope in ("bob", "alice"):
        turn = Sequence(scope, [*first.token_ids, 99, 98], first.num_tokens + 2, cache_scope=scope, shared_tokens=6)
        s.submit(turn)
        step(s)
        found[scope] = turn.cached_tokens
    assert found == {"bob": 4, "alice": 12}


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
    known = b.num_tokens
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
