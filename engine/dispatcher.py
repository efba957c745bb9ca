"""Dispatcher: the one queue, and which worker takes what. It decides; it has no clock and sends nothing.

Order: priority (higher first), then arrival. A request that lost its worker keeps its arrival number and so goes to the
head; one that lost several is a suspect and gets a worker to itself, so that it can harm no other.

Worker: among those about as loaded as the least loaded one, the one that holds most of the prompt's prefix in its KV
pages, as far as the dispatcher remembers what it sent there.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from engine.request import Request

PREFIX_CHUNK_TOKENS = 32
_MAX_PREFIX_CHUNKS = 128
_REMEMBERED_CHUNKS = 8192
_LOAD_SLACK = 4


class Slot(msgspec.Struct, kw_only=True):
    """A worker that takes requests: how many it works on and how many it may."""

    worker: str
    active: int
    max_prompts: int

    @property
    def free(self) -> int:
        """Requests it can take now; 0 if it has more than it may."""
        return max(0, self.max_prompts - self.active)


def prefix_hashes(prompt_ids: Sequence[int]) -> list[int]:
    """A hash for each whole chunk of the prompt, each standing for all tokens up to its end."""
    chunks = min(len(prompt_ids) // PREFIX_CHUNK_TOKENS, _MAX_PREFIX_CHUNKS)
    hashes: list[int] = []
    parent = 0
    for start in range(0, chunks * PREFIX_CHUNK_TOKENS, PREFIX_CHUNK_TOKENS):
        parent = hash((parent, *prompt_ids[start : start + PREFIX_CHUNK_TOKENS]))
        hashes.append(parent)
    return hashes


class PrefixMemory:
    """Which prompt prefixes went to one worker lately; the least recently used are forgotten."""

    def __init__(self, capacity: int = _REMEMBERED_CHUNKS) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def remember(self, hashes: Iterable[int]) -> None:
        """These chunks are (or will soon be) in the worker's pages."""
        for chunk in hashes:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)

    def match(self, hashes: Iterable[int]) -> int:
        """How many leading chunks it holds."""
        length = 0
        for chunk in hashes:
            if chunk not in self._chunks:
                break
            length += 1
        return length


def choose(slots: Sequence[Slot], matches: Sequence[int]) -> Slot | None:
    """The slot that should take a request of which slot i holds `matches[i]` prefix chunks; None if all are full.

    A worker more than a quarter of max_prompts busier than the least busy one is left out, however much it holds:
    computing a prefix twice is cheaper than leaving a worker idle.
    """
    open_slots = [(slot, match) for slot, match in zip(slots, matches, strict=True) if slot.free > 0]
    if not open_slots:
        return None
    least = min(slot.active for slot, _ in open_slots)
    near = [(slot, match) for slot, match in open_slots if slot.active - least <= slot.max_prompts // _LOAD_SLACK]
    return min(near, key=lambda pair: (-pair[1], pair[0].active))[0]


class Dispatcher:
    """The queue with its decisions. `len()` is how many wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[int] = set()
        self._memories: dict[str, PrefixMemory] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request at its place: by priority, then by arrival."""
        heapq.heappush(self._heap, (-request.priority, request.order, request))
        self._waiting.add(request.order)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue, if it is in it."""
        self._waiting.discard(request.order)

    def assign(self, slots: Sequence[Slot]) -> list[tuple[Request, str]]:
        """Take the first requests out of the queue, each with the worker that is to have it, until all slots are
        full or none waits. Counts them into `slots`."""
        assigned: list[tuple[Request, str]] = []
        while self._waiting and any(slot.free for slot in slots):
            request = self._heap[0][2]
            if request.order not in self._waiting:
                heapq.heappop(self._heap)
                continue
            hashes = prefix_hashes(request.prompt_ids)
            fit = [slot for slot in slots if slot.active == 0] if request.suspect else slots
            slot = choose(fit, [self._memory(slot.worker).match(hashes) for slot in fit])
            if slot is None:
                break
            heapq.heappop(self._heap)
            self._waiting.remove(request.order)
            slot.active = slot.max_prompts if request.suspect else slot.active + 1
            self._memory(slot.worker).remember(hashes)
            assigned.append((request, slot.worker))
        if not self._waiting:
            self._heap.clear()
        return assigned

    def forget_worker(self, worker: str) -> None:
        """The worker's pages are gone."""
        self._memories.pop(worker, None)

    def _memory(self, worker: str) -> PrefixMemory:
        return self._memories.setdefault(worker, PrefixMemory())
