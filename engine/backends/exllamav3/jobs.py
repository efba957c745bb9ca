"""One request as a job of the library's: token ids in, token ids out, sampled by our sampler."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenMask
from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.exllama.requests import UNLIMITED_SKIPS, Job
from engine.backends.exllamav3.library import Library
from engine.backends.sampling.sampler import SampledToken, SamplerOutput, SampleRow, draw

Sampled = tuple[Tensor, None, None, None]
"""What the library's `receive_logits` returns: the token [1, 1], and no top tokens nor probabilities."""

_HASH_BYTES = 16


class CacheScope:
    """Keeps a job to its scope of the prefix cache, from before the library gets it to its end: whose pages it may
    find, and who may find its own. It stands in for four of the job's methods, which do as they did.

    The library knows a full page by a hash of its tokens and of the page before it, and where no full page fits, it
    copies what begins alike from any page that has the same one before it. No page comes before the first, and there
    the library has nothing, for everybody. Here a first page is hashed as if it came after the `root` of its scope, and
    with it all pages after it; and first pages carry their root, so that nothing is copied from those of another.

    root: equal ones are one scope; b"" is what the library hashes by itself.
    """

    def __init__(self, job: Any, page_hash: Callable[[Tensor, bytes | None], bytes], root: bytes) -> None:
        self._job = job
        self._hash = page_hash
        self._root = root
        self._prepare: Callable[..., None] = job.prepare_for_queue
        self._allocate: Callable[[], None] = job.allocate_pages
        self._prefill: Callable[..., None] = job.prefill
        self._complete: Callable[[Any, int], None] = job.hash_completed_page
        job.prepare_for_queue = self._prepared
        job.allocate_pages = self._allocated
        job.prefill = self._prefilled
        job.hash_completed_page = self._completed

    def _prepared(self, generator: Any, serial_number: int) -> None:
        """Look for pages of the scope."""
        self._prepare(generator, serial_number)
        if not self._root:
            return
        [sequence] = self._job.sequences
        page_hash = self._root
        for index in range(len(sequence.page_hashes)):
            ids = sequence.sequence_ids.torch_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            page_hash = sequence.page_hashes[index] = self._hash(ids, page_hash)
        self._job.all_unique_hashes = list(sequence.page_hashes)

    def _allocated(self) -> None:
        """Put the first page into the scope before it holds a token, and never back to what it held before."""
        self._allocate()
        [sequence] = self._job.sequences
        first = sequence.allocated_pages[0]
        first.scope_root, first.can_revert = self._root, False

    def _prefilled(self, results: list[object], chunk_size: int | None = None) -> None:
        """Copy from no first page but those of the scope."""
        [sequence], table = self._job.sequences, self._job.pagetable
        if self._job.is_prefill_done() or sequence.kv_position >= PAGE_TOKENS:
            self._prefill(results, chunk_size)
            return
        pages = table.all_pages
        table.all_pages = [page for page in pages if page.prev_hash is not None or self._may_copy(page)]
        try:
            self._prefill(results, chunk_size)
        finally:
            table.all_pages = pages

    def _may_copy(self, page: Any) -> bool:
        return getattr(page, "scope_root", None) == self._root

    def _completed(self, sequence: Any, index: int) -> None:
        """Give a full page its hash: a first page that of its scope."""
        if index or not self._root:
            self._complete(sequence, index)
            return
        generator, table, page = self._job.generator, self._job.pagetable, sequence.allocated_pages[0]
        page_hash = self._hash(sequence.sequence_ids.torch_slice(0, PAGE_TOKENS), self._root)
        if page_hash in table.referenced_pages:
            page_hash = os.urandom(_HASH_BYTES)  # another request of the scope has the same page, which is found
        elif page_hash in table.unreferenced_pages:
            table.unreferenced_pages[page_hash].clear()
        if generator.recurrent_cache is not None:
            generator.recurrent_cache.rekey(page.phash, page_hash)
        page.update_hash(page_hash)
        for after in sequence.allocated_pages[1:2]:
            after.prev_hash, after.can_revert = page_hash, False


class TokenSampler:
    """The choice of the tokens of one job, by our sampler in place of the library's; stored until `take`.

    The library calls `receive_logits` for each job of a batch before it reads any token, and `receive_sample` with
    each token then. Its own check of the logits would end the whole batch where one request has none to choose from.

    failed: True if there is nothing to choose from.  whole: True if the mask allows nothing more. Tokens after either
    are dropped.
    reqs_past_ids: read by the library: where it is true, it draws for the positions of a draft one after the other, as
    each needs the token before; and it brings the ids of the sequence to the GPU, which nothing here needs.
    """

    def __init__(self, row: SampleRow, vocab_size: int, *, drafts: bool = False) -> None:
        self._row = row
        self._vocab_size = vocab_size
        self._drawn: SamplerOutput | None = None
        self._chosen: list[SampledToken] = []
        self._receive: Callable[..., tuple[bool, Tensor, bool]] | None = None
        self.reqs_past_ids = drafts
        self.failed = self.whole = False

    def sample_for(self, job: Any) -> None:
        """Take the places of the job's methods."""
        self._receive = job.receive_sample
        job.receive_logits, job.receive_sample = self.receive_logits, self.receive_sample
        job.prepare_sampling_past_ids = lambda: None

    @property
    def why_failed(self) -> str:
        """The reason why there is nothing to choose from."""
        return self._row.no_token_reason

    def take(self) -> Sequence[SampledToken]:
        """Return the tokens since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen

    def receive_logits(self, logits: Tensor) -> Sampled:
        """Draw from logits [1, 1, vocab or more]; the token stays on their device, 0 where nothing could be drawn."""
        self._drawn = draw(logits[0, :, : self._vocab_size].float(), [self._row])
        return self._drawn.ids.clamp(min=0).view(1, 1), None, None, None

    def receive_sample(self, *sampled: Any) -> tuple[bool, Tensor, bool]:
        """Store the token that was drawn last, and let the library go on with it: the arguments, and what returns,
        are those of its own method."""
        assert self._drawn is not None
        assert self._receive is not None
        if not (self.failed or self.whole):
            [token] = self._drawn.tokens()
            if token is None:
                self.failed = True
            else:
                self._row.push(token.token_id)
                self.whole = self._row.mask is not None and self._row.mask.is_complete
                self._chosen.append(token)
        return self._receive(*sampled)


def make_job(
    library: Library,
    request: BackendRequest,
    *,
    new_tokens: int,
    vocab_size: int,
    root: bytes = b"",
    drafts: bool = False,
    mask: TokenMask | None = None,
) -> Job:
    """Make a job of a request. root: as in CacheScope.  drafts: whether the generator drafts tokens."""
    if mask is not None:
        mask.restart(request.generated)
    row = SampleRow(
        request.params,
        prompt_ids=request.prompt_ids,
        generated=request.generated,
        end_token_ids=[token_id for token_id in request.end_token_ids if token_id < vocab_size],
        banned_next=[token_id for token_id in request.banned_next if token_id < vocab_size],
        mask=mask,
    )
    sampler = TokenSampler(row, vocab_size, drafts=drafts)
    handle: Any = library.job(
        input_ids=torch.tensor([[*request.prompt_ids, *request.generated]]),
        max_new_tokens=new_tokens,
        max_skips=UNLIMITED_SKIPS,
        sampler=sampler,
        identifier=request.id,
    )
    sampler.sample_for(handle)
    CacheScope(handle, library.page_hash, root)
    return Job(handle, sampler, places=1, known_tokens=len(request.prompt_ids) + len(request.generated))
