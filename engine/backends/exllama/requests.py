"""The requests of one worker: those that wait in line, and those that a library's generator has as jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, Protocol

import msgspec

from engine.backends.base import BackendRequest, DraftPosition, FinishReason, SequenceStats, TokenEvent, TokenLogprob
from engine.backends.common.exllama_memory import PAGE_TOKENS

UNLIMITED_SKIPS = sys.maxsize
"""How often a job may be overtaken in the generator's own queue, where each that fits starts: how many come there while
one waits is decided before (`RequestQueue.claimed_pages`)."""


class ChosenToken(Protocol):
    """One token of an answer."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> TokenLogprob | None: ...


class JobSampler(Protocol):
    """The choice of the tokens of one job, which are stored until `take`.

    failed: True if there is nothing to choose from.  whole: True if the mask allows nothing more. Tokens after either
    are dropped.  why_failed: the reason.
    """

    @property
    def failed(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    @property
    def why_failed(self) -> str: ...

    def take(self) -> Sequence[ChosenToken]:
        """Return the tokens since the last call."""


class Job:
    """A job of a library's, and how far it is. Text, stop strings and end tokens are not the library's here.

    handle: the library's job.   places: sequences that it holds.   known_tokens: of its prompt.
    """

    def __init__(self, handle: Any, sampler: JobSampler, *, places: int, known_tokens: int) -> None:
        self.handle = handle
        self.sampler = sampler
        self.places = places
        self.known_tokens = known_tokens

    def tokens(self) -> list[int]:
        """All tokens of its own sequence so far."""
        token_ids: list[int] = self.handle.sequences[0].sequence_ids.torch()[0].tolist()
        return token_ids

    @property
    def started(self) -> bool:
        """True if it holds pages; before, and after its end, it does not."""
        return bool(self.handle.sequences[0].allocated_pages)

    @property
    def decoding(self) -> bool:
        """True if its prompt is computed, but for the last token, which the first step of decoding computes."""
        return bool(self.handle.is_prefill_done())

    @property
    def computed_tokens(self) -> int:
        """Tokens of its own sequence whose keys and values are in the cache."""
        return int(self.handle.sequences[0].kv_position)

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens of all its sequences that prefill has yet to compute."""
        return sum(max(0, len(each.sequence_ids) - 1 - each.kv_position) for each in self.handle.sequences)

    @property
    def length(self) -> int:
        """Tokens of its own sequence known so far."""
        return len(self.handle.sequences[0].sequence_ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens per sequence that were found in the prefix cache."""
        return int((self.handle.cached_pages * PAGE_TOKENS + self.handle.cached_tokens) // self.places)

    @property
    def draft_accepted(self) -> int:
        """Guesses that held, so far."""
        return int(self.handle.accepted_draft_tokens)

    @property
    def draft_tokens(self) -> int:
        """Guesses so far."""
        return int(self.handle.accepted_draft_tokens + self.handle.rejected_draft_tokens)


@dataclass(slots=True)
class Counters:
    """Counts since the load; they only grow. drafted, accepted: draft tokens by how far ahead they were."""

    steps: int = 0
    oom_steps: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count one step that drafted tokens for a request, of which the first `accepted` were right."""
        self.draft_tokens += drafted
        self.draft_accepted += accepted
        for counts, number in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            counts[:number] = [count + 1 for count in counts[:number]]

    @property
    def drafts(self) -> tuple[DraftPosition, ...]:
        """Draft tokens by position."""
        return tuple(DraftPosition(drafted=d, accepted=a) for d, a in zip(self.drafted, self.accepted, strict=True))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with its job. pages: that it can come to hold.  begun: its first token was sent; sent: all that were,
    by this job. The others are what the counters have of the job."""

    job: Job
    request: BackendRequest
    pages: int
    begun: bool
    sent: list[int] = field(default_factory=list)
    prompt_computed: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0

    def count(self, counters: Counters) -> None:
        """Add to the counters what they do not have yet; to be called after every step."""
        job = self.job
        computed = max(self.prompt_computed, min(job.computed_tokens, job.known_tokens) - job.cached_tokens)
        counters.prompt_tokens_computed += computed - self.prompt_computed
        counters.count_drafts(job.draft_tokens - self.draft_tokens, job.draft_accepted - self.draft_accepted)
        self.prompt_computed, self.draft_tokens, self.draft_accepted = computed, job.draft_tokens, job.draft_accepted

    def events(self, counters: Counters, *, ended: bool) -> list[TokenEvent]:
        """Events of the tokens since the last call; the last one ends the answer where it `ended`: whole, or at its
        length."""
        chosen = self.job.sampler.take()
        finish: FinishReason = "stop" if self.job.sampler.whole else "length"
        events = []
        for index, token in enumerate(chosen, start=1):
            events.append(
                TokenEvent(
                    request_id=self.request.id,
                    token_id=token.token_id,
                    logprob=token.logprob,
                    finish=finish if ended and index == len(chosen) else None,
                    cached_tokens=None if self.begun else self.job.cached_tokens,
                )
            )
            if not (self.begun or self.request.resumed):
                counters.prefix_query_tokens += self.job.known_tokens
                counters.prefix_hit_tokens += self.job.cached_tokens
            self.begun = True
            self.sent.append(token.token_id)
        return events

    def rest(self) -> BackendRequest:
        """The request as it stands after all its tokens so far."""
        answer = self.job.tokens()[len(self.request.prompt_ids) :]
        if len(answer) == len(self.request.generated):
            return self.request
        return msgspec.structs.replace(self.request, generated=answer, banned_next=())

    def as_sent(self) -> BackendRequest:
        """Return the request as its client has it: the effects of a failed step on its job are forgotten."""
        if not self.sent:
            return self.request
        return msgspec.structs.replace(self.request, generated=[*self.request.generated, *self.sent], banned_next=())


@dataclass(slots=True)
class RequestQueue:
    """waiting: in order.  running: given to the generator.  begun: those that wait and had their first token."""

    waiting: dict[str, BackendRequest] = field(default_factory=dict)
    running: dict[str, LiveRequest] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def places(self) -> int:
        """Sequences of all that run."""
        return sum(live.job.places for live in self.running.values())

    def claimed_pages(self) -> int:
        """Return the pages of the first request that waits for its pages in the generator, and of all that came there
        after it; 0 where none waits. As long as they are no more than there are, it gets its own once those that came
        before it have ended."""
        after_first = dropwhile(lambda live: live.job.started, self.running.values())
        return sum(live.pages for live in after_first)

    def run(self, request: BackendRequest, job: Job, pages: int) -> None:
        """It is the generator's now."""
        self.running[request.id] = LiveRequest(job, request, pages, begun=request.id in self.begun)
        self.begun.discard(request.id)

    def drop(self, request_id: str) -> LiveRequest | None:
        """Forget a request; what it ran as, if it did."""
        self.waiting.pop(request_id, None)
        self.begun.discard(request_id)
        return self.running.pop(request_id, None)

    def give_back(
        self, lives: Sequence[LiveRequest], rest: Callable[[LiveRequest], BackendRequest] = LiveRequest.rest
    ) -> None:
        """Let these wait again, at the head of the line, for what they still lack."""
        for live in lives:
            del self.running[live.request.id]
            if live.begun:
                self.begun.add(live.request.id)
        self.waiting = {live.request.id: rest(live) for live in lives} | self.waiting

    def sequences(self) -> Iterator[SequenceStats]:
        """How far everybody is."""
        for live in self.running.values():
            yield SequenceStats(
                request_id=live.request.id,
                computed_tokens=live.job.computed_tokens,
                known_tokens=live.job.length,
                cached_tokens=min(live.job.cached_tokens, live.job.computed_tokens),
            )
        for request in self.waiting.values():
            tokens = len(request.prompt_ids) + len(request.generated)
            yield SequenceStats(request_id=request.id, computed_tokens=0, known_tokens=tokens)
