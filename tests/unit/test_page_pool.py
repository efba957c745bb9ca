"""What the page pool promises: no page lost, none handed out twice, prefixes found while they last."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.backends.base import PrefixChanges
from engine.backends.common.page_keys import short_key
from engine.backends.scheduler.page_pool import PagePool


def chain(pool: PagePool, *pages_of_tokens: list[int]) -> list[bytes]:
    keys = [pool.page_hash.root_key("")]
    for tokens in pages_of_tokens:
        keys.append(pool.page_hash.page_key(keys[-1], tokens))
    return keys[1:]


def filled(pool: PagePool, *pages_of_tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Held pages that the pool remembers by these tokens, with their keys."""
    keys = chain(pool, *pages_of_tokens)
    pages = pool.allocate(len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    return pages, keys


def test_pages_run_out_without_taking_any() -> None:
    pool = PagePool(3, 4)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.free_pages == 1
    pool.check([held])


def test_pages_for_rounds_up() -> None:
    pool = PagePool(8, 4)
    assert [pool.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_freed_pages_are_found_by_their_prefix() -> None:
    pool = PagePool(4, 2)
    pages, keys = filled(pool, [1, 2], [3, 4])
    pool.release(pages)
    assert pool.free_pages == 4
    assert pool.cached_pages == 2
    found = pool.find(keys)
    assert found == pages
    pool.acquire(found)
    assert pool.free_pages == 2
    pool.check([found])


def test_a_prefix_is_found_only_from_its_start() -> None:
    pool = PagePool(4, 2)
    pages, _ = filled(pool, [1, 2], [3, 4])
    assert pool.find(chain(pool, [1, 2], [9, 9])) == pages[:1]
    assert pool.find(chain(pool, [3, 4])) == []


def test_the_same_tokens_after_another_prefix_have_another_key() -> None:
    pool = PagePool(1, 2)
    assert chain(pool, [1, 2], [5, 6])[1] != chain(pool, [3, 4], [5, 6])[1]


def test_keys_differ_between_pools_so_that_no_one_can_forge_them() -> None:
    assert chain(PagePool(1, 2), [1, 2]) != chain(PagePool(1, 2), [1, 2])


def test_pools_with_the_same_salt_name_pages_alike() -> None:
    assert chain(PagePool(1, 2, b"salt"), [1, 2]) == chain(PagePool(9, 2, b"salt"), [1, 2])


def test_shared_pages_stay_held_until_the_last_holder_leaves() -> None:
    pool = PagePool(2, 2)
    pages, _ = filled(pool, [1, 2])
    pool.acquire(pages)
    pool.release(pages)
    assert pool.free_pages == 1
    pool.check([pages])
    pool.release(pages)
    assert pool.free_pages == 2
    pool.check([])


def test_blank_pages_are_used_before_remembered_ones() -> None:
    pool = PagePool(3, 2)
    pages, keys = filled(pool, [1, 2])
    pool.release(pages)
    assert pool.allocate(2) is not None
    assert pool.find(keys) == pages


def test_the_tail_of_a_freed_prefix_is_reused_before_its_head() -> None:
    pool = PagePool(3, 2)
    pages, keys = filled(pool, [1, 2], [3, 4], [5, 6])
    pool.release(pages)
    pool.allocate(1)
    assert pool.find(keys) == pages[:2]


def test_the_prefix_freed_longest_ago_is_forgotten_first() -> None:
    pool = PagePool(2, 2)
    old, old_keys = filled(pool, [1, 2])
    new, new_keys = filled(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert pool.find(old_keys) == []
    assert pool.find(new_keys) == new


def test_a_second_page_with_the_same_tokens_does_not_replace_the_first() -> None:
    pool = PagePool(2, 2)
    first, keys = filled(pool, [1, 2])
    second, _ = filled(pool, [1, 2])
    assert pool.find(keys) == first
    pool.check([first, second])
    pool.release(second)
    pool.check([first])


def test_pages_that_became_findable_are_told_once() -> None:
    pool = PagePool(3, 2)
    _, keys = filled(pool, [1, 2], [3, 4])
    changes = pool.take_changes()
    assert (changes.added, changes.dropped) == (tuple(map(short_key, keys)), ())
    assert pool.take_changes() == PrefixChanges()


def test_a_page_that_is_reused_is_told_as_dropped() -> None:
    pool = PagePool(1, 2)
    pages, keys = filled(pool, [1, 2])
    pool.take_changes()
    pool.release(pages)
    pool.allocate(1)
    assert pool.take_changes() == PrefixChanges(dropped=(short_key(keys[0]),))


def test_a_page_that_came_and_went_between_two_reports_is_in_neither() -> None:
    pool = PagePool(1, 2)
    for prompt in range(100):
        pages, _ = filled(pool, [prompt, prompt])
        pool.release(pages)
    assert pool.take_changes().dropped == ()
    pool.allocate(1)
    assert len(pool.take_changes().dropped) == 1


def test_check_names_a_leaked_page() -> None:
    pool = PagePool(2, 2)
    pages = pool.allocate(1)
    assert pages is not None
    with pytest.raises(AssertionError, match=f"page {pages[0]} counts 1 holders, has 0"):
        pool.check([])


class PoolWalk(RuleBasedStateMachine):
    """Random holders against a model: the tokens a page was remembered for are the tokens it is found by."""

    tables: Bundle[int] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 1)
        self.held: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.next_table = 0
        self.told: set[bytes] = set()

    @rule()
    def report(self) -> None:
        changes = self.pool.take_changes()
        assert self.told.isdisjoint(changes.added)
        assert self.told.issuperset(changes.dropped)
        self.told = (self.told | set(changes.added)) - set(changes.dropped)
        assert self.told == {short_key(key) for key in self.pool._by_key}

    @rule(target=tables, prefix=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def start(self, prefix: list[int]) -> object:
        keys = chain(self.pool, *([token] for token in prefix))
        found = self.pool.find(keys)
        for depth, page in enumerate(found):
            assert self.content[page] == tuple(prefix[: depth + 1])
        self.pool.acquire(found)
        fresh = self.pool.allocate(len(keys) - len(found))
        if fresh is None:
            self.pool.release(found)
            return multiple()
        for depth in range(len(found), len(keys)):
            page = fresh[depth - len(found)]
            self.content[page] = tuple(prefix[: depth + 1])
            self.pool.register(page, keys[depth])
        self.next_table += 1
        self.held[self.next_table] = found + fresh
        return self.next_table

    @rule(target=tables, count=st.integers(1, 3))
    def start_unknown(self, count: int) -> object:
        pages = self.pool.allocate(count)
        if pages is None:
            return multiple()
        for page in pages:
            self.content[page] = ()
        self.next_table += 1
        self.held[self.next_table] = pages
        return self.next_table

    @rule(table=consumes(tables))
    def finish(self, table: int) -> None:
        self.pool.release(self.held.pop(table))

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check(self.held.values())
        distinct = {page for pages in self.held.values() for page in pages}
        assert self.pool.free_pages == self.pool.num_pages - len(distinct)


TestPoolWalk = PoolWalk.TestCase
TestPoolWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
