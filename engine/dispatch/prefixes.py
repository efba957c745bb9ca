"""Which prefixes a worker holds in its KV pages, as far as the engine knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.backends.base import PrefixChanges

_REMEMBERED_PAGES = 65_536


class PrefixMemory:
    """Pages of one worker by their short keys: those that it reported, and those of prompts that were sent there, which
    it will hold soon. Where a worker reports nothing, what was sent is all that is known.

    It is a hint: a prompt that was cancelled before it was computed, or pages that a silent worker has reused, are
    believed to be there until they are among the `capacity` used longest ago. The next request that comes for them
    makes it true.
    """

    def __init__(self, capacity: int = _REMEMBERED_PAGES) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def sent(self, keys: Sequence[bytes]) -> None:
        """A prompt with these pages is computed there. Its last page counts as the one used longest ago, so that what
        is forgotten first is what fewest prompts share."""
        self._remember(reversed(keys))

    def changed(self, changes: PrefixChanges) -> None:
        """What the worker reported."""
        for key in changes.dropped:
            self._pages.pop(key, None)
        self._remember(changes.added)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the leading pages it holds."""
        pages = self._pages
        if not keys or keys[0] not in pages:
            return 0  # of most workers, most of the time
        return next((index for index, key in enumerate(keys) if key not in pages), len(keys))

    def _remember(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)
