"""What the scheduler works on: sequences of tokens, some of them computed, and what one step does with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.backends.common.page_keys import PageKey
from engine.backends.scheduler.batch import ChunkInput

_NOTHING = range(0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way. Waiting ones hold no pages and have nothing computed.

    token_ids: every token known, the prompt first; only ever appended to.
    computed: how many of them have their KV in the pages.      pages: page table, in order.
    keys: keys of the full pages of known tokens, as far as anyone asked; they outlive a preemption.
    remembered: leading pages that the pool knows by key.
    cached_tokens: prompt tokens found in the prefix cache when first admitted; None before that.
    resumed: see BackendRequest.
    adapter: key of the LoRA adapter that it computes with, "" for none; pages are shared within one key alone.
    cache_scope, shared_tokens: as in BackendRequest.
    answers: whether tokens are wanted; else it ends with its prompt computed.
    stay: number of this stay in the pages, which no other has; 0 while it holds none, or is guessed for.
    limit: how many tokens are known when its answer is as long as it may be; None for nothing but the context.
    drafted: of how many leading tokens a draft model has its own KV in the pages too.
    tell: how many leading tokens' final states are wanted. told: of how many they were had, which outlives a
        preemption. Only tokens of those may be taken from the prefix cache: what is cached is keys and values.
    """

    id: str
    token_ids: list[int]
    prompt_tokens: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    remembered: int = 0
    cached_tokens: int | None = None
    adapter: str = ""
    cache_scope: str = ""
    shared_tokens: int = 0
    answers: bool = True
    limit: int | None = None
    tell: int = 0
    told: int = 0
    drafted: int = 0
    stay: int = 0
    resumed: bool = False

    @property
    def known(self) -> int:
        """Tokens known."""
        return len(self.token_ids)

    @property
    def missing(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while a prompt is worked on."""
        return len(self.token_ids) - self.computed


@dataclass(slots=True)
class Plan:
    """What one step does. sequences[i] is fed chunks[i]; exhausted ones have ended for want of pages."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[ChunkInput] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)

    def feed(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of a sequence."""
        start, end = sequence.computed, sequence.computed + count
        told = range(max(0, sequence.told - start), min(end, sequence.tell) - start) if sequence.tell else _NOTHING
        self.sequences.append(sequence)
        self.chunks.append(
            ChunkInput(
                sequence.token_ids[start:end],
                start,
                sequence.pages,
                sample=end == sequence.known and sequence.answers,
                adapter=sequence.adapter,
                told=told,
                stay=sequence.stay,
            )
        )

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a new token, in the order of the logits."""
        return [seq for seq, chunk in zip(self.sequences, self.chunks, strict=True) if chunk.sample]


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    preemptions: int = 0
