"""A priority queue whose items may change their key or leave at any time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[int, int])
Item = TypeVar("Item", int, str)

_SLACK = 16


class MutableHeap(Generic[Key, Item]):
    """Items by key, the smallest first, equal keys by item. Every operation is O(log n), amortised.

    An item that changes or leaves is only forgotten; its old entry stays in the heap until it comes up or entries
    outnumber items twice, when the heap is made anew.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._keys: dict[Item, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: Item, key: Key) -> None:
        """Add an item, or change its key."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, item))
            self._tidy()

    def discard(self, item: Item) -> None:
        """Take an item out, if it is in."""
        if self._keys.pop(item, None) is not None:
            self._tidy()

    def first(self) -> Item | None:
        """The item with the smallest key; None where there is none."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def leading(self, count: int) -> list[Item]:
        """Up to `count` items with the smallest keys, in order; O(count log n)."""
        found: dict[Item, Key] = {}
        while len(found) < count and self.first() is not None:
            key, item = heapq.heappop(self._heap)
            found[item] = key  # one that left and came back with the same key has two entries
        for item, key in found.items():
            heapq.heappush(self._heap, (key, item))
        return list(found)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)
