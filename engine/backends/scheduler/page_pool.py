"""Pool of KV page ids: reference counts, free pages, and the prefix cache. The model runner owns the tensors.

Nothing here imports torch. The prefix cache consists of free pages: a full page gets a key, keeps it when it is freed,
and is found by that key until it is reused (after PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.backends.base import PrefixChanges
from engine.backends.common.page_keys import PageHash, PageIndex, PageKey, short_key


class PagePool:
    """A fixed number of reference-counted KV pages of `page_tokens` tokens each. Every operation is O(1) per page.

    A page is blank (free, without a key), cached (free, found by its key) or used (by one sequence, or by several that
    share a prefix). Blank pages are allocated first, then the least recently freed cached ones.
    drafted: pages whose tokens a draft model has computed too, until they are allocated again.
    page_hash: makes the keys; equal keys mean equal prefixes.
    salt: of the keys; pools with the same salt give equal pages equal keys. b"" for a random one.
    index: keeps the keys where the next worker finds them, with the pages that an earlier one left.
    """

    def __init__(self, num_pages: int, page_tokens: int, salt: bytes = b"", index: PageIndex | None = None) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.drafted: set[int] = set()
        self._references = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._by_key: dict[PageKey, int] = {}
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.page_hash = PageHash(salt or os.urandom(32))
        self._changes: dict[bytes, bool] = {}
        self._index = index
        for page, key in index.entries() if index is not None else ():
            self._by_key[key] = page
            self._keys[page] = key
            self._cached[page] = None
            self._record_change(key, findable=True)
        self._blank = [page for page in self._blank if page not in self._cached]

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def cached_pages(self) -> int:
        """Free pages of the prefix cache."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages with one reference each; None, and nothing allocated, where fewer are free."""
        if count > self.free_pages:
            return None
        pages = [self._reuse_page() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            self.drafted.discard(page)
        return pages

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """Return the cached pages of the longest prefix of `keys`. Acquire them before anything is allocated."""
        pages: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these pages, which are used or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
                if self._index is not None:
                    self._index.mark(page, used=True)
            self._references[page] += 1

    def count_leading_drafted(self, pages: Sequence[int]) -> int:
        """Return how many of these pages, from the first on, a draft model has computed too."""
        return next((index for index, page in enumerate(pages) if page not in self.drafted), len(pages))

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each. Pages are freed from the last to the first, so that the tail of a prefix, which
        fewer requests share, is reused before its head."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._keys[page] is None:
                    self._blank.append(page)
                else:
                    self._cached[page] = None
                    if self._index is not None:
                        self._index.mark(page, used=False)

    def register(self, page: int, key: PageKey, *, is_lasting: bool = True) -> None:
        """Make a used page, full of computed tokens, findable by its key. Where another page has the key, that one
        stays findable: page tables are never rewritten. is_lasting: the key means the same to the next worker."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._keys[page] = key
            self._record_change(key, findable=True)
            if self._index is not None and is_lasting:
                self._index.add(page, key)

    def take_changes(self) -> PrefixChanges:
        """Return the pages that became findable or ceased to be, on balance, since the last call."""
        if not self._changes:
            return PrefixChanges()
        changes, self._changes = self._changes, {}
        return PrefixChanges(
            added=tuple(key for key, findable in changes.items() if findable),
            dropped=tuple(key for key, findable in changes.items() if not findable),
        )

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify the accounts against the page tables of all holders. Raises AssertionError with the numbers."""
        counted = Counter(page for pages in holders for page in pages)
        for page, references in enumerate(self._references):
            _require(references == counted[page], f"page {page} counts {references} holders, has {counted[page]}")
        blank, cached, used = set(self._blank), set(self._cached), set(counted)
        sizes = f"{len(blank)} blank + {len(cached)} cached + {len(used)} used of {self.num_pages} pages"
        _require(len(blank) == len(self._blank), "a page is in the blank list twice")
        _require(len(blank) + len(cached) + len(used) == self.num_pages, sizes)
        _require(blank | cached | used == set(range(self.num_pages)), sizes)
        named = {page: key for page, key in enumerate(self._keys) if key is not None}
        _require(self._by_key == {key: page for page, key in named.items()}, "keys and pages disagree")
        _require(cached == named.keys() - used, "a cached page has no key, or a blank one has")

    def _reuse_page(self) -> int:
        if self._blank:
            return self._blank.pop()
        page, _ = self._cached.popitem(last=False)
        key = self._keys[page]
        assert key is not None
        del self._by_key[key]
        self._keys[page] = None
        if self._index is not None:
            self._index.remove(page)
        self._record_change(key, findable=False)
        return page

    def _record_change(self, key: PageKey, *, findable: bool) -> None:
        """Record a change; opposite changes cancel out, so there are never more than twice as many as pages."""
        name = short_key(key)
        if self._changes.get(name, findable) != findable:
            del self._changes[name]
        else:
            self._changes[name] = findable


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise AssertionError(f"page accounting error: {message}")
