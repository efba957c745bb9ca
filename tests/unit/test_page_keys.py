"""Names of pages: the same wherever the salt is the same, and only for the same prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.common.page_keys import SHORT_BYTES, PageHash, page_keys, short_key
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence
from tests.fakes.scheduling import still_clock

pytestmark = pytest.mark.long

SALT = b"salt"
tokens = st.lists(st.integers(0, 2**31), max_size=40)


@given(tokens, tokens, st.integers(1, 9))
def test_prompts_share_as_many_keys_as_full_pages_from_their_start(a: list[int], b: list[int], size: int) -> None:
    same = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
    left, right = page_keys(SALT, a, size), page_keys(SALT, b, size)
    assert (len(left), len(right)) == (len(a) // size, len(b) // size)
    assert [x == y for x, y in zip(left, right, strict=False)] == [
        page < same // size for page in range(min(len(left), len(right)))
    ]


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(1, 9))
def test_a_pool_with_the_salt_names_pages_as_the_prompt_does(token_ids: list[int], size: int) -> None:
    pool = PagePool(1, size, SALT)
    parent, keys = pool.page_hash.root_key(""), []
    for start in range(0, len(token_ids) - size + 1, size):
        parent = pool.page_hash.page_key(parent, token_ids[start : start + size])
        keys.append(short_key(parent))
    assert keys == page_keys(SALT, token_ids, size)


def test_keys_depend_on_the_salt() -> None:
    assert page_keys(b"a", [1, 2], 2) != page_keys(b"b", [1, 2], 2)


def test_pages_computed_with_an_adapter_have_other_keys() -> None:
    keys = {tuple(page_keys(SALT, [1, 2, 3, 4], 2, adapter)) for adapter in ("", "a", "b")}
    assert len(keys) == 3
    assert len({key for chain in keys for key in chain}) == 6


scopes = st.text(min_size=1, max_size=6)
names = st.text("ab\0", max_size=3)


@given(st.tuples(names, names), st.tuples(names, names))
def test_pages_are_the_same_where_adapter_and_scope_both_are(one: tuple[str, str], other: tuple[str, str]) -> None:
    left, right = (set(page_keys(SALT, range(8), 2, adapter, scope)) for adapter, scope in (one, other))
    assert left == right if one == other else not left & right


@given(tokens, scopes, scopes, st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_scopes_share_the_pages_that_both_declare_shared_and_no_others(
    ids: list[int], one: str, other: str, first: int, second: int, size: int
) -> None:
    left, right = page_keys(SALT, ids, size, "", one, first), page_keys(SALT, ids, size, "", other, second)
    alike = one == other and first // size == second // size
    assert [x == y for x, y in zip(left, right, strict=True)] == [
        alike or page < min(first, second) // size for page in range(len(left))
    ]


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), scopes, st.integers(0, 40), st.integers(1, 9))
def test_a_scheduler_names_the_pages_of_a_scope_as_the_dispatcher_does(
    ids: list[int], scope: str, shared: int, size: int
) -> None:
    scheduler = Scheduler(PagePool(50, size, SALT), max_prompts=1, step_tokens=64, max_model_len=64, clock=still_clock)
    scheduler.submit(Sequence("a", [*ids], len(ids), adapter="tuned", cache_scope=scope, shared_tokens=shared))
    scheduler.commit(scheduler.plan(), [[1]])
    assert {*scheduler.pool.take_changes().added} == {*page_keys(SALT, ids, size, "tuned", scope, shared)}


def test_a_scope_that_reads_like_the_page_before_it_is_not_taken_for_one() -> None:
    pages = PageHash(SALT)
    root = pages.root_key("tuned")
    assert pages.scope_key(root, "a") != pages.scope_key(b"", root.decode("latin-1") + "a")
    assert pages.scope_key(b"", "a") != pages.page_key(b"", [0])


def test_an_adapters_name_that_reads_like_a_page_is_not_taken_for_one() -> None:
    page = [0]
    name = bytes(8).decode()
    assert PageHash(SALT).root_key(name) != PageHash(SALT).page_key(b"", page)


def test_reported_keys_are_short() -> None:
    assert {len(key) for key in page_keys(SALT, list(range(8)), 2)} == {SHORT_BYTES}
