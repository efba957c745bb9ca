"""Input of one step of a model: a chunk of tokens per sequence. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Tokens of one sequence to compute in one step, and the pages of its keys and values.

    token_ids: tokens at positions start, start + 1, ...; `pending_token_id` in place of one that is not read back yet.
    start: position of the first of them, which is the number of tokens whose KV is already in the pages.
    pages: page ids in order; position p lies in pages[p // page_tokens]. They cover at least
        start + len(token_ids) tokens. Valid for this step only, and read-only.
    sample: True if the logits of the last token are needed.
    adapter: key of the LoRA adapter to compute with; "" for none.
    num_drafts: how many of the last tokens are draft tokens. Logits are needed of each, and of the token before them.
    residency: a number that no other sequence has while this one keeps its pages; 0 where nothing of it may be cached
        from step to step.
    prompt_states: indices in token_ids whose final hidden states are needed for the output about the prompt.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool
    adapter: str = ""
    num_drafts: int = 0
    prompt_states: range = range(0)
    residency: int = 0

    @property
    def end(self) -> int:
        """Position after the last token: the number of tokens with KV in the pages after the step."""
        return self.start + len(self.token_ids)

    @property
    def prefills(self) -> bool:
        """True for several tokens without drafts: part of a prompt, or of an answer that is recomputed."""
        return len(self.token_ids) > 1 and not self.num_drafts

    @property
    def num_sampled(self) -> int:
        """Number of last tokens whose logits are needed."""
        return 1 + self.num_drafts if self.sample else 0


def pending_token_id(row: int) -> int:
    """Return the placeholder of the token that the previous step samples in row `row`, while only the device has it."""
    return -1 - row


def prefilled_rows(chunks: Sequence[ChunkInput]) -> list[range]:
    """Return the rows of each prefilling chunk, where rows are in the order of `chunks`."""
    rows: list[range] = []
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if chunk.prefills:
            rows.append(range(start, end))
    return rows
