"""Sequences that the scheduler works on, and the batch that one step computes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.backends.base import StepLimit
from engine.backends.common.page_keys import PageKey
from engine.backends.scheduler.batch import ChunkInput

_NO_STATES = range(0)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one request. A waiting sequence has no pages and nothing computed.

    token_ids: prompt and answer so far; only ever appended to.
    computed: how many of them have their KV in the pages.      pages: page table, in order, of C ints.
    keys: keys of the full pages, as far as they were needed; they survive a preemption.
    registered_pages: leading pages that the pool finds by key.
    stored_pages: pages after those that a tier may have; nothing is computed until they are restored, or 0.
    cached_tokens: prompt tokens found in the prefix cache and its tiers when first admitted; None before that.
    resumed: see BackendRequest.
    client: as in BackendRequest.  order: of its arrival here.
    adapter: key of its LoRA adapter, "" for none; pages are shared only within one key.
    cache_scope, shared_tokens: as in BackendRequest.
    generates: True if it has an answer; else it ends with its prompt computed.
    residency: number of this stay in the pages, unique; 0 while it has none, or gets draft tokens.
    limit: tokens in all when its answer has its maximum length; None for no limit but the context.
    drafted: how many leading tokens have KV of the draft model in the pages too.
    states_wanted: how many leading tokens' final hidden states are needed.  states_read: of how many they were read,
        which survives a preemption. Only those tokens may come from the prefix cache, which has only keys and values.
    """

    id: str
    token_ids: list[int]
    prompt_tokens: int
    computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    keys: list[PageKey] = field(default_factory=list)
    registered_pages: int = 0
    stored_pages: int = 0
    cached_tokens: int | None = None
    adapter: str = ""
    cache_scope: str = ""
    shared_tokens: int = 0
    generates: bool = True
    limit: int | None = None
    states_wanted: int = 0
    states_read: int = 0
    drafted: int = 0
    residency: int = 0
    resumed: bool = False
    client: int = 0
    order: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens, computed or not."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that are not computed: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.computed


@dataclass(slots=True)
class BatchPlan:
    """The batch of one step: sequences[i] computes chunks[i]. exhausted: sequences that ended for want of pages.

    prompts: those that compute more than a token, which are prompts.  limit: what kept the step from doing more.
    restored_s: seconds of the step in which pages were read back from a tier; infinity where it computed meanwhile.
    dropped: chunks that it computes for sequences that were removed after it was launched.
    """

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[ChunkInput] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)
    prompts: list[tuple[Sequence, ChunkInput]] = field(default_factory=list)
    limit: StepLimit = "none"
    restored_s: float = 0.0
    dropped: list[ChunkInput] = field(default_factory=list)

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """Add the next `count` tokens of a sequence."""
        start, end = sequence.computed, sequence.computed + count
        states = _NO_STATES
        if sequence.states_wanted:
            states = range(max(0, sequence.states_read - start), min(end, sequence.states_wanted) - start)
        self.sequences.append(sequence)
        self.chunks.append(
            ChunkInput(
                sequence.token_ids[start:end],
                start,
                sequence.pages,
                sample=end == len(sequence.token_ids) and sequence.generates,
                adapter=sequence.adapter,
                prompt_states=states,
                residency=sequence.residency,
            )
        )
        if count > 1:
            self.prompts.append((sequence, self.chunks[-1]))

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """The sequences that get a new token, in the order of the logits."""
        return [seq for seq, chunk in zip(self.sequences, self.chunks, strict=True) if chunk.sample]


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    preemptions: int = 0
    oom_steps: int = 0
    restored_tokens: int = 0
