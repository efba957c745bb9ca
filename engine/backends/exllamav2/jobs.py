"""One request as a job of the library's: token ids in, token ids out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.backends.base import BackendRequest, DraftPosition, FinishReason, SequenceStats, TokenEvent, TokenMask
from engine.backends.common.exllamav2_memory import PAGE_TOKENS
from engine.backends.exllamav2.library import Library
from engine.backends.exllamav2.sampling import RandomDraws, TokenBias, TokenSampler, settings_of, uses_xtc

# The scope of a job in the library's prefix cache: whose pages it may find, and who may find its own.
#
# The library knows a full page by a hash of its tokens and of the page before it, and where no full page fits, it
# copies what begins alike from any page that has the same one before it. No page comes before the first, and there the
# library has None, for everybody. Here a first page comes after the `root` of its scope instead: so its hash is another
# in every scope, and with it those of all pages after it, and no page is copied from another scope.

PageHash = Callable[[Tensor, bytes | None], bytes]
"""(ids [1, PAGE_TOKENS], hash of the page before) -> hash of the page, as the library makes it."""

Received = tuple[bool, Tensor]
"""What the library's `receive_sample` returns: whether the job has ended, and the token [1, 1]."""

_HASH_BYTES = 16


class CacheScope:
    """Keeps a job to its scope, from before the library gets it to its end. It stands in for four of the job's methods,
    which do as they did.

    root: what the first pages of the scope come after; equal ones are one scope.
    """

    def __init__(self, job: Any, page_hash: PageHash, root: bytes) -> None:
        self._job = job
        self._hash = page_hash
        self._root = root
        self._prepare: Callable[..., None] = job.prepare_for_queue
        self._allocate: Callable[..., None] = job.allocate_pages
        self._prefill: Callable[..., None] = job.prefill
        self._receive: Callable[..., Received] = job.receive_sample
        job.prepare_for_queue = self._prepared
        job.allocate_pages = self._allocated
        job.prefill = self._prefilled
        job.receive_sample = self._received

    def _prepared(self, generator: Any, serial_number: int) -> None:
        """Look for pages of the scope."""
        self._prepare(generator, serial_number)
        for sequence in self._job.sequences:
            page_hash = self._root
            for index in range(len(sequence.page_hashes)):
                ids = sequence.sequence_ids.torch_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
                page_hash = sequence.page_hashes[index] = self._hash(ids, page_hash)
        self._job.all_unique_hashes = list({each for seq in self._job.sequences for each in seq.page_hashes})

    def _allocated(self) -> None:
        """Put the first page into the scope before it holds a token."""
        self._allocate()
        for sequence in self._job.sequences:
            first = sequence.allocated_pages[0]
            first.prev_hash = self._root if first.prev_hash is None else first.prev_hash

    def _prefilled(self, results: list[object]) -> None:
        """Copy from no first page but those of the scope."""
        job = self._job
        if job.is_prefill_done() or all(each.kv_position >= PAGE_TOKENS for each in job.sequences):
            self._prefill(results)
            return
        pages = job.generator.all_pages
        own = [page for page in pages if page.prev_hash == self._root]
        job.generator.all_pages = [page for page in pages if page.prev_hash is not None]
        for page in own:
            page.prev_hash = None
        try:
            self._prefill(results)
        finally:
            job.generator.all_pages = pages
            for page in own:
                page.prev_hash = self._root if page.prev_hash is None else page.prev_hash

    def _received(
        self,
        logits: Tensor | None,
        token: Tensor | None,
        top_tokens: Tensor | None,
        top_probs: Tensor | None,
        prob: Tensor | None,
        filter_eos: bool | None,
        results: list[object],
        first_of_guessed: bool = True,
    ) -> Received:
        """Give a first page that an answer has filled the scope's hash, before another job sees the library's."""
        before = [sequence.kv_position for sequence in self._job.sequences]
        received = self._receive(logits, token, top_tokens, top_probs, prob, filter_eos, results, first_of_guessed)
        for sequence, position in zip(self._job.sequences, before, strict=True):
            if position < PAGE_TOKENS <= sequence.kv_position:
                self._rename_first(sequence)
        return received

    def _rename_first(self, sequence: Any) -> None:
        generator, page = self._job.generator, sequence.allocated_pages[0]
        page_hash = self._hash(sequence.sequence_ids.torch_slice(0, PAGE_TOKENS), self._root)
        if page.phash != page_hash:
            if page_hash in generator.referenced_pages:
                page_hash = os.urandom(_HASH_BYTES)  # another request of the scope has the same page, which is found
            elif page_hash in generator.unreferenced_pages:
                generator.unreferenced_pages[page_hash].clear()
            page.update_hash(page_hash)
        sequence.allocated_pages[1].prev_hash = page_hash


class Job:
    """A job that has been made, and how far it is. Text, stop strings and end tokens are not the library's here.

    root: as in CacheScope.
    handle: the library's job.   identifier: what its results carry.   sampler: chooses its tokens.
    """

    def __init__(
        self,
        library: Library,
        request: BackendRequest,
        *,
        new_tokens: int,
        draft_tokens: int,
        vocab_size: int,
        root: bytes = b"",
        mask: TokenMask | None = None,
    ) -> None:
        params = request.params
        prompts = [request.prompt_ids] if params.cfg_scale == 1.0 else [request.prompt_ids, params.negative_prompt_ids]
        self.identifier = request.id
        self.places = len(prompts)
        self.known_tokens = len(request.prompt_ids) + len(request.generated)
        self.handle: Any = library.job(
            input_ids=[torch.tensor([[*prompt, *request.generated]]) for prompt in prompts],
            # The library ends a job that many guesses early.
            max_new_tokens=new_tokens + draft_tokens,
            gen_settings=library.settings(**settings_of(params, vocab_size)),
            return_top_tokens=min(int(1 / params.xtc_threshold), vocab_size) if uses_xtc(params) else 0,
            identifier=request.id,
        )
        CacheScope(self.handle, library.page_hash, root)
        if mask is not None:
            mask.restart(request.generated)
        self.sampler = TokenSampler(
            self.handle,
            params,
            _bias(request, vocab_size, masked=mask is not None),
            RandomDraws(params.seed or 0),
            tokens=len(request.generated),
            vocab_size=vocab_size,
            mask=mask,
        )

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


def _bias(request: BackendRequest, vocab_size: int, *, masked: bool) -> TokenBias:
    """masked: a mask decides on end tokens."""
    params = msgspec.structs.replace(request.params, min_tokens=0) if masked else request.params
    return TokenBias(
        params,
        prompt_tokens=len(request.prompt_ids),
        end_token_ids=tuple(token_id for token_id in request.end_token_ids if token_id < vocab_size),
        banned_next=tuple(token_id for token_id in request.banned_next if token_id < vocab_size),
        first=len(request.generated),
    )


# The requests of one worker: those that wait in line, and those that the library's generator has as jobs.


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
    """A request with its job. begun: its first token was sent; sent: all that were, by this job. The others are what
    the counters have of the job."""

    job: Job
    request: BackendRequest
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

    def take(self) -> BackendRequest:
        """Take the first that waits out of the line; `run` or nothing follows."""
        return self.waiting.pop(next(iter(self.waiting)))

    def run(self, request: BackendRequest, job: Job) -> None:
        """It is the generator's now."""
        self.running[request.id] = LiveRequest(job, request, begun=request.id in self.begun)
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
            )
        for request in self.waiting.values():
            tokens = len(request.prompt_ids) + len(request.generated)
            yield SequenceStats(request_id=request.id, computed_tokens=0, known_tokens=tokens)
