"""Clients share a worker's steps: whose prompts get the tokens, and who is admitted while another one waits."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.backends.scheduler.scheduler import PromptShares
from tests.fakes.scheduling import fed, scheduler, step, submit

LONG, SHORT, THIRD = 1, 2, 3


def test_a_short_prompt_is_computed_in_the_next_step_whatever_another_client_has() -> None:
    s = scheduler(step_tokens=16, pages=200, max_model_len=400)
    for number in range(3):
        submit(s, f"long {number}", 200, client=LONG)
    step(s)
    submit(s, "short", 8, client=SHORT)
    assert fed(step(s)) == {"long 0": 8, "short": 8}
    assert fed(step(s)) == {"long 0": 15, "short": 1}


def test_several_short_prompts_of_a_client_share_its_half_of_a_step() -> None:
    s = scheduler(step_tokens=16, pages=200)
    submit(s, "long", 150, client=LONG)
    step(s)
    for name in "abcd":
        submit(s, name, 3, client=SHORT)
    assert fed(step(s)) == {"long": 7, "a": 3, "b": 3, "c": 3}


def test_clients_with_long_prompts_take_turns_and_none_gets_more_than_a_step_ahead() -> None:
    s = scheduler(step_tokens=16, pages=300)
    for name, client in (("a", LONG), ("b", SHORT), ("c", THIRD)):
        submit(s, name, 160, client=client)
    computed: Counter[str] = Counter()
    for _ in range(24):
        plan = step(s)
        assert len(plan.sequences) == 1
        computed.update(fed(plan))
        work = [computed[name] for name in "abc"]
        assert max(work) - min(work) <= 16


def test_more_clients_than_a_step_has_tokens_take_turns_too() -> None:
    s = scheduler(step_tokens=4, pages=300, max_prompts=20)
    for client in range(10):
        submit(s, f"long {client}", 60, client=client)
    step(s)
    submit(s, "short", 4, client=SHORT + 10)
    assert "short" in [name for _ in range(11) for name in fed(step(s))]


def test_a_clients_own_prompts_are_computed_in_the_order_of_their_arrival() -> None:
    s = scheduler(step_tokens=16)
    submit(s, "long", 40, client=LONG)
    submit(s, "after", 4, client=LONG)
    assert [fed(step(s)) for _ in range(3)] == [{"long": 16}, {"long": 16}, {"long": 8, "after": 4}]


def test_a_client_alone_gets_the_whole_step() -> None:
    s = scheduler(step_tokens=16)
    submit(s, "other", 4, client=SHORT)
    step(s)
    submit(s, "long", 60, client=LONG)
    assert fed(step(s)) == {"other": 1, "long": 15}


def test_a_prompt_that_waits_for_pages_is_passed_by_a_short_one_of_another_client() -> None:
    s = scheduler(pages=40, page_tokens=4, step_tokens=128, max_model_len=160)
    submit(s, "first", 100, client=LONG)
    submit(s, "second", 100, client=LONG)
    step(s)
    submit(s, "short", 8, client=SHORT)
    plan = step(s)
    assert fed(plan) == {"first": 1, "short": 8}
    assert plan.limit == "kv_pages"
    assert [seq.id for seq in s.waiting] == ["second"]


def test_a_prompt_that_waits_for_pages_has_its_turn_however_many_short_ones_there_are() -> None:
    """Those that pass it leave it enough, unless their answers get long: then it waits for them and no others."""
    s = scheduler(pages=40, page_tokens=4, step_tokens=64, max_prompts=30, max_model_len=160)
    first = submit(s, "first", 60, client=LONG)
    submit(s, "second", 120, client=LONG)
    step(s)
    for number in range(20):
        submit(s, f"short {number}", 8, client=SHORT)
    for _ in range(4):
        step(s)
    passed = [seq for seq in s.running if seq.client == SHORT]
    assert 0 < len(passed) < 6
    s.remove(first)
    step(s)
    for sequence in passed:
        s.remove(sequence)
        step(s)
    assert "second" in [seq.id for seq in s.running]


def test_a_client_does_not_pass_its_own_prompt_that_waits_for_pages() -> None:
    s = scheduler(pages=40, page_tokens=4, step_tokens=16, max_model_len=160)
    for name, prompt in (("first", 100), ("second", 100), ("third", 4)):
        submit(s, name, prompt, client=LONG)
    for _ in range(10):
        step(s)
    assert [seq.id for seq in s.waiting] == ["second", "third"]


def test_the_prompt_behind_which_a_client_waited_is_named() -> None:
    s = scheduler(step_tokens=16, pages=200)
    for name, client in (("a", LONG), ("b", SHORT)):
        submit(s, name, 100, client=client)
    for _ in range(16):
        step(s)
    assert s.times.lost("a").behind == "b"
    assert s.times.lost("b").behind == "a"
    assert set(s.times.lost("b").seconds) <= {"step_tokens", "prefill_prompts"}


needs = st.dictionaries(st.integers(0, 9), st.integers(1, 200), min_size=2, max_size=6)


@given(needs, st.integers(1, 100))
def test_a_step_is_used_up_and_no_client_gets_more_than_it_needs(needed: dict[int, int], budget: int) -> None:
    shares = PromptShares()
    for _ in range(5):
        if sum(needed.values()) <= budget:
            return
        split = shares.split(needed, budget)
        assert sum(split.values()) == budget
        assert all(0 < tokens <= needed[client] for client, tokens in split.items())


@given(needs, st.integers(1, 100))
def test_a_client_that_needs_no_more_than_an_equal_share_gets_all_of_it(needed: dict[int, int], budget: int) -> None:
    if sum(needed.values()) > budget:
        split = PromptShares().split(needed, budget)
        for client, tokens in needed.items():
            assert tokens > budget // len(needed) or split[client] == tokens


@given(st.integers(2, 6), st.integers(1, 64), st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_a_client_with_a_long_prompt_has_a_turn_however_many_newcomers_there_are(
    clients: int, budget: int, newcomers: list[int]
) -> None:
    """Newcomers come in every step, each with a long prompt, and leave after their first tokens."""
    shares = PromptShares()
    staying = dict.fromkeys(range(clients), 10_000)
    passing: dict[int, int] = {}
    waited: Counter[int] = Counter()
    before: dict[int, int] = {}
    for number, new in enumerate(newcomers):
        passing |= {1000 + 10 * number + each: 10_000 for each in range(new)}
        split = shares.split(staying | passing, budget)
        for client in [*staying, *passing]:
            waited[client] = 0 if client in split else waited[client] + 1
            if waited[client] == 1:
                before[client] = len(staying) + len(passing)
            assert waited[client] <= before.get(client, 0)  # a turn for each that was there when it began to wait
        passing = {client: need for client, need in passing.items() if client not in split}
