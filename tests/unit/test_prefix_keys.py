"""Names of pages: the same wherever the salt is the same, and only for the same prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.backends.prefix import SHORT_BYTES, PageHash, page_keys, short
from engine.backends.torch.pages import PagePool

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
    parent, keys = pool.root(""), []
    for start in range(0, len(token_ids) - size + 1, size):
        parent = pool.key(parent, token_ids[start : start + size])
        keys.append(short(parent))
    assert keys == page_keys(SALT, token_ids, size)


def test_keys_depend_on_the_salt() -> None:
    assert page_keys(b"a", [1, 2], 2) != page_keys(b"b", [1, 2], 2)


def test_pages_computed_with_an_adapter_have_other_keys() -> None:
    keys = {tuple(page_keys(SALT, [1, 2, 3, 4], 2, adapter)) for adapter in ("", "a", "b")}
    assert len(keys) == 3
    assert len({key for chain in keys for key in chain}) == 6


def test_an_adapters_name_that_reads_like_a_page_is_not_taken_for_one() -> None:
    page = [0]
    name = bytes(8).decode()
    assert PageHash(SALT).root(name) != PageHash(SALT).key(b"", page)


def test_reported_keys_are_short() -> None:
    assert {len(key) for key in page_keys(SALT, list(range(8)), 2)} == {SHORT_BYTES}
