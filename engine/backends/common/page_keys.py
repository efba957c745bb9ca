"""Names of KV pages, equal where the tokens in them and in all pages before them are equal, in every process that has
the salt. A worker's pool finds its pages by them, and the dispatcher knows from them which worker holds a prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PageKey = bytes
SHORT_BYTES = 8
_KEY_BYTES = 16
_TOKEN_BYTES = 8


class PageHash:
    """Keys of full pages: each a 128-bit BLAKE2b over the key of the page before it and its own tokens, keyed with
    `salt` (up to 64 bytes), so that a collision can be constructed only by someone who has it."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._hash = hashlib.blake2b(key=salt, digest_size=_KEY_BYTES)

    def root_key(self, adapter: str = "") -> PageKey:
        """Return the key before the first page: KV computed with an adapter is not the model's own."""
        if not adapter:
            return b""
        return hashlib.blake2b(adapter.encode(), key=self._salt, digest_size=_KEY_BYTES, person=b"adapter").digest()

    def scope_key(self, parent: PageKey, scope: str) -> PageKey:
        """Return the key between the page `parent`, or `root_key`, and the first page that requests of `scope` alone
        may find; `parent` where `scope` is ""."""
        if not scope:
            return parent
        parts = bytes([len(parent)]) + parent + scope.encode()
        return hashlib.blake2b(parts, key=self._salt, digest_size=_KEY_BYTES, person=b"scope").digest()

    def page_key(self, parent: PageKey, token_ids: Sequence[int]) -> PageKey:
        """Key of the page with these tokens that comes after the page `parent`, `root_key` or `scope_key`."""
        return self._chain(parent, array("q", token_ids))

    def chain(
        self, token_ids: Sequence[int], page_tokens: int, adapter: str = "", scope: str = "", shared_tokens: int = 0
    ) -> list[PageKey]:
        """Keys of all full pages of a sequence; each token is hashed once. scope, shared_tokens: as in
        BackendRequest.cache_scope and shared_tokens."""
        tokens = memoryview(array("q", token_ids)).cast("B")
        size = page_tokens * _TOKEN_BYTES
        keys: list[PageKey] = []
        parent = self.root_key(adapter)
        for end in range(size, len(tokens) + 1, size):
            if len(keys) == shared_tokens // page_tokens:
                parent = self.scope_key(parent, scope)
            parent = self._chain(parent, tokens[end - size : end])
            keys.append(parent)
        return keys

    def _chain(self, parent: PageKey, tokens: array[int] | memoryview) -> PageKey:
        digest = self._hash.copy()
        digest.update(parent)
        digest.update(tokens)
        return digest.digest()


def short_key(key: PageKey) -> bytes:
    """Return the name of a page between workers and the router: long enough for a hint, too short to be trusted."""
    return key[:SHORT_BYTES]


def page_keys(
    salt: bytes,
    token_ids: Sequence[int],
    page_tokens: int,
    adapter: str = "",
    scope: str = "",
    shared_tokens: int = 0,
) -> list[bytes]:
    """Short keys of a prompt's full pages, in order, as the workers with this salt and page size report them."""
    return [short_key(key) for key in PageHash(salt).chain(token_ids, page_tokens, adapter, scope, shared_tokens)]


class PageIndex:
    """Keys of the full pages of a pool, in memory that may outlive the process, and whether each page is used.

    The first byte of a page's entry is written last and removed first, so an entry is whole however the process ends.
    """

    ENTRY_BYTES = 1 + _KEY_BYTES
    _CACHED, _USED = 1, 2

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def add(self, page: int, key: PageKey) -> None:
        """Enter a used page that is full."""
        start = page * self.ENTRY_BYTES
        self._memory[start + 1 : start + self.ENTRY_BYTES] = key
        self._memory[start] = self._USED

    def remove(self, page: int) -> None:
        """Remove a page that is about to be written to."""
        self._memory[page * self.ENTRY_BYTES] = 0

    def mark(self, page: int, *, used: bool) -> None:
        """Note that a page is used, or not, if it is in the index."""
        if self._memory[page * self.ENTRY_BYTES]:
            self._memory[page * self.ENTRY_BYTES] = self._USED if used else self._CACHED

    def entries(self) -> list[tuple[int, PageKey]]:
        """Return pages and keys, those first that no request used."""
        size = self.ENTRY_BYTES
        states = bytes(self._memory[::size])
        pages = [page for page, state in enumerate(states) if state]
        pages.sort(key=states.__getitem__)
        return [(page, bytes(self._memory[page * size + 1 : (page + 1) * size])) for page in pages]
