"""The requests of one worker: those that wait in line, and those that the library's generator has as jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.backends.base import BackendRequest, DraftPosition, FinishReason, SequenceStats, TokenEvent
from engine.backends.exllama.jobs import Job


@dataclass(slots=True)
class Counters:
    """What has happened since the load; only ever grows. guessed, held: guesses by how far ahead they were."""

    steps: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    guessed: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def drafted(self, guessed: int, held: int) -> None:
        """One step guessed so many tokens ahead for a request, of which the first `held` did."""
        self.draft_tokens += guessed
        self.draft_accepted += held
        for counts, number in ((self.guessed, guessed), (self.held, held)):
            counts += [0] * (guessed - len(counts))
            counts[:number] = [count + 1 for count in counts[:number]]

    @property
    def drafts(self) -> tuple[DraftPosition, ...]:
        """Guesses by position."""
        return tuple(DraftPosition(guessed=each, held=held) for each, held in zip(self.guessed, self.held, strict=True))


@dataclass(slots=True, eq=False)
class Live:
    """A request with its job. begun: its first token was sent; told: all that were, by this job. The others are what
    the counters have of the job."""

    job: Job
    request: BackendRequest
    begun: bool
    told: list[int] = field(default_factory=list)
    prompt_computed: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0

    def count(self, counters: Counters) -> None:
        """Add to the counters what they do not have yet; to be called after every step."""
        job = self.job
        computed = max(self.prompt_computed, min(job.computed_tokens, job.known_tokens) - job.cached_tokens)
        counters.prompt_tokens_computed += computed - self.prompt_computed
        counters.drafted(job.draft_tokens - self.draft_tokens, job.draft_accepted - self.draft_accepted)
        self.prompt_computed, self.draft_tokens, self.draft_accepted = computed, job.draft_tokens, job.draft_accepted

    def events(self, counters: Counters, *, ended: bool) -> list[TokenEvent]:
        """Events of the tokens since the last call; the last one ends the answer where it `ended`: whole, or at its
        length."""
        chosen = self.job.take()
        finish: FinishReason = "stop" if self.job.whole else "length"
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
            self.told.append(token.token_id)
        return events

    def rest(self) -> BackendRequest:
        """The request as it stands after all its tokens so far."""
        answer = self.job.tokens()[len(self.request.prompt_ids) :]
        if len(answer) == len(self.request.generated):
            return self.request
        return msgspec.structs.replace(self.request, generated=answer, banned_next=())

    def as_told(self) -> BackendRequest:
        """The request as it stands for whoever asked: what a failed step made of its job is forgotten."""
        if not self.told:
            return self.request
        return msgspec.structs.replace(self.request, generated=[*self.request.generated, *self.told], banned_next=())


@dataclass(slots=True)
class Line:
    """waiting: in order.  running: given to the generator.  begun: those that wait and had their first token."""

    waiting: dict[str, BackendRequest] = field(default_factory=dict)
    running: dict[str, Live] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def places(self) -> int:
        """Sequences of all that run."""
        return sum(live.job.places for live in self.running.values())

    def take(self) -> BackendRequest:
        """Take the first that waits out of the line; `run` or nothing follows."""
        return self.waiting.pop(next(iter(self.waiting)))

    def run(self, request: BackendRequest, job: Job) -> None:
        """It is the generator's now."""
        self.running[request.id] = Live(job, request, begun=request.id in self.begun)
        self.begun.discard(request.id)

    def drop(self, request_id: str) -> Live | None:
        """Forget a request; what it ran as, if it did."""
        self.waiting.pop(request_id, None)
        self.begun.discard(request_id)
        return self.running.pop(request_id, None)

    def give_back(self, lives: Sequence[Live], rest: Callable[[Live], BackendRequest] = Live.rest) -> None:
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
            )
        for request in self.waiting.values():
            known = len(request.prompt_ids) + len(request.generated)
            yield SequenceStats(request_id=request.id, computed_tokens=0, known_tokens=known)
