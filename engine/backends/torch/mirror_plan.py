"""How the room of a mirror is cut into rows, and which of its rows attend in one call. Integers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.backends.torch.step_memory import SLACK_PAIRS

LEAST_ROW_TOKENS = 256

_WORTH = 1.25
"""Cutting the room anew has all rows filled anew: so much more must fit than does."""

_POOL_PART = 4
_FREE_PART = 8


def mirror_tokens(*, pool_tokens: int, most_sequences: int, free_bytes: int, bytes_per_token: int) -> int:
    """Tokens that a mirror has room for: a quarter of what the pages hold, as far as an eighth of the memory that they
    left free goes; 0 where that is no row, or no sequence is to be mirrored."""
    tokens = min(pool_tokens // _POOL_PART, free_bytes // _FREE_PART // bytes_per_token)
    return tokens if most_sequences and tokens >= LEAST_ROW_TOKENS else 0


def row_tokens(ends: Sequence[int], room: int, current: int) -> int:
    """Tokens of a row, where sequences that end at `ends` are to share `room` tokens.

    What lets most tokens fit; `current` as long as nothing is much better.
    """
    found = {size: _fitting(ends, room, size) for size in _sizes(room)}
    best = max(found, key=lambda size: (found[size], -size))
    return best if found[best] > _WORTH * found.get(current, 0) else current


def runs(ends: Sequence[int]) -> list[range]:
    """Adjacent rows of these lengths that attend in one call each, so that padding costs less than more calls would."""
    found: list[range] = []
    real = longest = 0
    for row, end in enumerate(ends):
        padded = (len(found[-1]) + 1) * max(longest, end) if found else 0
        if found and padded <= 1.5 * (real + end) + SLACK_PAIRS:
            found[-1] = range(found[-1].start, row + 1)
            real, longest = real + end, max(longest, end)
        else:
            found.append(range(row, row + 1))
            real, longest = end, end
    return found


def _fitting(ends: Sequence[int], room: int, size: int) -> int:
    return sum(itertools.islice((end for end in ends if end <= size), room // size))


def _sizes(room: int) -> Iterator[int]:
    """256, 384, 512, 768, 1024 and on, as far as a row has room."""
    size = LEAST_ROW_TOKENS
    while size <= room:
        yield size
        if 3 * size // 2 <= room:
            yield 3 * size // 2
        size *= 2
