"""How the Triton kernels cut up their work: pure decisions about sizes, made on the host."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 64
"""Parts that one sequence's keys are split into at most."""

MIN_SPLIT_TOKENS = 256
"""Keys that make a part worth its own program and its place in the reduction."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that a multiprocessor works on side by side, and so how many are wanted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the sizes depend on: multiprocessors, and the compute capability."""

    processors: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: block_m query rows, block_n keys at a time; and how Triton is to compile it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(rows: int, head_dim: int, capability: tuple[int, int]) -> Tile:
    """Sizes for `rows` query rows per key head (q_len * group).

    Queries and `stages` pairs of key and value blocks lie in shared memory, two bytes an element: 96 KiB at most, which
    every card since Ampere has, and 48 KiB on Turing, whose compiler takes some more and which has 64.
    """
    wide, turing = head_dim > 128, capability < (8, 0)
    most = (64 if turing else 128) // (2 if wide else 1)
    block_m = min(most, max(16, power_of_two(rows)))
    return Tile(
        block_m=block_m,
        block_n=32 if wide else 64,
        warps=8 if block_m * (2 if wide else 1) == 128 else 4,
        stages=1 if turing else 2,
    )


def split_count(programs: int, tokens: int, gpu: Gpu) -> int:
    """Parts to split each sequence's keys into (flash-decoding, Dao et al. 2023): as many as keep the GPU busy.

    programs: those there would be without splitting.  tokens: keys that the longest sequence may look at. Shorter
    ones are split into as many parts, smaller ones.
    """
    wanted = gpu.processors * PROGRAMS_PER_PROCESSOR
    if 2 * programs > wanted:
        return 1
    return max(1, min(wanted // programs, tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()
