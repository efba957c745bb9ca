"""One request as a job of the library's: token ids in, token ids out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenMask
from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.exllama.requests import UNLIMITED_SKIPS, Job, LiveRequest
from engine.backends.exllamav2.library import Library
from engine.backends.exllamav2.sampling import RandomDraws, TokenBias, TokenSampler, settings_of, uses_xtc
from engine.backends.scheduler.scheduler import PromptShares

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
    computes: returns whether the step under way computes a chunk of the job's prompt; else it leaves it as it is.
    """

    def __init__(self, job: Any, page_hash: PageHash, root: bytes, computes: Callable[[], bool]) -> None:
        self._job = job
        self._hash = page_hash
        self._root = root
        self._computes = computes
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
        if not job.is_prefill_done() and not self._computes():
            return
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


def make_job(
    library: Library,
    request: BackendRequest,
    *,
    new_tokens: int,
    draft_tokens: int,
    vocab_size: int,
    root: bytes = b"",
    computes: Callable[[], bool] = lambda: True,
    mask: TokenMask | None = None,
) -> Job:
    """Make a job of a request. root, computes: as in CacheScope."""
    params = request.params
    prompts = [request.prompt_ids] if params.cfg_scale == 1.0 else [request.prompt_ids, params.negative_prompt_ids]
    handle: Any = library.job(
        input_ids=[torch.tensor([[*prompt, *request.generated]]) for prompt in prompts],
        # The library ends a job that many guesses early.
        max_new_tokens=new_tokens + draft_tokens,
        max_skips=UNLIMITED_SKIPS,
        gen_settings=library.settings(**settings_of(params, vocab_size)),
        return_top_tokens=min(int(1 / params.xtc_threshold), vocab_size) if uses_xtc(params) else 0,
        identifier=request.id,
    )
    CacheScope(handle, library.page_hash, root, computes)
    if mask is not None:
        mask.restart(request.generated)
    sampler = TokenSampler(
        handle,
        params,
        _bias(request, vocab_size, masked=mask is not None),
        RandomDraws(params.seed or 0),
        tokens=len(request.generated),
        vocab_size=vocab_size,
        mask=mask,
    )
    return Job(handle, sampler, places=len(prompts), known_tokens=len(request.prompt_ids) + len(request.generated))


def prompts_of_step(running: Mapping[str, LiveRequest], shares: PromptShares, chunk_tokens: int) -> set[str]:
    """Return the requests of which the next step computes a chunk of the prompt.

    The library computes one of every prompt, each of up to `chunk_tokens`. Where several clients have requests, one
    with many long prompts would make each step that long for all: they share the tokens of about one chunk.
    """
    started = [live for live in running.values() if live.job.started]
    prompts = [live for live in started if not live.job.decoding]
    needed: dict[int, int] = {}
    for live in prompts:
        client = live.request.client
        needed[client] = needed.get(client, 0) + live.job.uncomputed_tokens
    if len({live.request.client for live in started}) < 2 or sum(needed.values()) <= chunk_tokens:
        shares.clear()
        return {live.request.id for live in prompts}
    left = shares.split(needed, chunk_tokens)
    computed = set()
    for live in prompts:
        if (tokens := left.get(live.request.client, 0)) > 0:
            computed.add(live.request.id)
            left[live.request.client] = tokens - min(live.job.uncomputed_tokens, chunk_tokens * live.job.places)
    return computed


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
