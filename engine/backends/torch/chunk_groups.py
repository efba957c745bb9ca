"""Which chunks of a step attend together. Integers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.step_memory import SLACK_PAIRS

MAX_BATCHED_WIDTH = 32
"""Chunks longer than this attend by themselves; shorter ones are padded together."""


def by_length(numbers: Iterable[int], chunks: Sequence[ChunkInput]) -> list[int]:
    """The numbers of chunks in order of the chunks' length, and of where they end."""
    return sorted(numbers, key=lambda index: (len(chunks[index].token_ids), chunks[index].end))


def equally_long(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split the numbers of chunks, in order of their length, by that length."""
    return [list(run) for _, run in itertools.groupby(order, key=lambda index: len(chunks[index].token_ids))]


def grouped(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split the numbers of chunks, in order of their length, so that padding costs less than further calls would."""
    groups: list[list[int]] = []
    real_pairs = longest = 0
    for index in order:
        chunk = chunks[index]
        width = len(chunk.token_ids)
        pairs = width * chunk.end
        joined_longest = max(longest, chunk.end)
        if groups and width <= MAX_BATCHED_WIDTH:
            padded_pairs = (len(groups[-1]) + 1) * width * joined_longest
            if padded_pairs <= 1.5 * (real_pairs + pairs) + SLACK_PAIRS:
                groups[-1].append(index)
                real_pairs, longest = real_pairs + pairs, joined_longest
                continue
        groups.append([index])
        real_pairs, longest = pairs, chunk.end
    return groups
