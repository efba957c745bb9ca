"""What the scheduler hands to the model runner: one chunk of tokens per sequence. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """The tokens of one sequence to feed in one step, and where its keys and values lie.

    token_ids: tokens to feed now, at positions start, start + 1, ...; `unread` in place of one that is not known yet.
    start: position of the first of them, which is the number of tokens whose KV is already in the pages.
    pages: page ids in order; position p lies in pages[p // page_tokens]. They cover at least
        start + len(token_ids) tokens. Lent for the step: neither to be kept nor to be changed.
    sample: whether the logits of the last token are wanted.
    adapter: key of the LoRA adapter to compute with; "" for none.
    guessed: how many of the last tokens are guesses. The logits of each are wanted, and of the token before them.
    stay: a number that this sequence alone has for as long as it holds its pages; 0 where nothing is to be kept of it
        from step to step.
    told: which of the tokens' final states are wanted for what is told of the prompt; the first of them is token 0.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool
    adapter: str = ""
    guessed: int = 0
    told: range = range(0)
    stay: int = 0

    @property
    def end(self) -> int:
        """Position after the last fed token: tokens whose KV the pages hold after the step."""
        return self.start + len(self.token_ids)

    @property
    def prefills(self) -> bool:
        """Several tokens, all of them known: some of a prompt, or of an answer that is computed again."""
        return len(self.token_ids) > 1 and not self.guessed

    @property
    def sampled(self) -> int:
        """How many of the last tokens' logits are wanted."""
        return 1 + self.guessed if self.sample else 0


def pending_token_id(row: int) -> int:
    """What stands for the token that the step before draws in row `row`, as long as only the device knows it."""
    return -1 - row
