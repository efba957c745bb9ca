"""The work that every engine does: the same prompts, as token ids, in the same rounds."""

from __future__ import annotations

import random

from tools.benchmarks.protocol import Work

PROMPT_TOKENS, PROMPT_SPREAD, OUTPUT_TOKENS = 128, 16, 128
MAX_TOKENS = PROMPT_TOKENS + PROMPT_SPREAD + OUTPUT_TOKENS + 16  # the rest: engines that want a little room
FIRST_ID, VOCABULARY = 3, 32000
"""Ids that every shape has and that are no special tokens: FIRST_ID up to below VOCABULARY."""


def work_of(clients: int, round_: int, *, requests: int | None = None, output_tokens: int = OUTPUT_TOKENS) -> Work:
    """The work of a round: as many requests as clients by default, no prompt like that of another round."""
    drawn = random.Random(f"{clients} {round_}")
    return Work(clients, output_tokens, tuple(_prompt(drawn) for _ in range(requests or clients)))


def _prompt(drawn: random.Random) -> tuple[int, ...]:
    length = drawn.randint(PROMPT_TOKENS - PROMPT_SPREAD, PROMPT_TOKENS + PROMPT_SPREAD)
    return tuple(drawn.randrange(FIRST_ID, VOCABULARY) for _ in range(length))
