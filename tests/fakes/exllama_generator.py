"""The library's dynamic generator as documented, over a model that is a hash function.

Reproduced: pages of 256 tokens reserved at the start, hashed in a chain and found again; FIFO with four skips; chunked
prefill; results stage by stage; guesses that hold or not; its assertions; and its defects: a job ends its guesses
early, text with a stray \ufffd holds tokens back, penalties and masks write into the logits, guidance or a prompt of
two tokens breaks a guessing generator. Errors can be injected into every method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from tests.fakes.exllama_job import PAGE, FakeJob, FakePage, FakeSequence, page_hash

PADDED_TO = 32

Logits = Callable[[Sequence[int], int], Tensor]


def hash_logits(ids: Sequence[int], vocab_size: int) -> Tensor:
    """The model: float32 [vocab] that depends on every token; lower-case letters are the likely ones."""
    generator = torch.Generator().manual_seed(crc32(torch.tensor(list(ids)).numpy().tobytes()))
    logits = torch.randn(vocab_size, generator=generator)
    logits[ord("a") : ord("z") + 1] += 4.0
    return logits


def foretell(ids: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The greedy answer."""
    known = list(ids)
    for _ in range(count):
        known.append(int(hash_logits(known, vocab_size).argmax()))
    return known[len(ids) :]


class Faults:
    """Errors to come: `faults.add("iterate", RuntimeError("..."))` makes the next call of that method raise it."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Exception]] = {}

    def add(self, method: str, *errors: Exception) -> None:
        """Let the next calls of the method raise these, one each."""
        self._waiting.setdefault(method, []).extend(errors)

    def strike(self, method: str) -> None:
        """Raise what waits for the method."""
        if self._waiting.get(method):
            raise self._waiting[method].pop(0)


class FakeGenerator:
    """The generator. logits: (ids, vocab_size) -> what the model says comes after them, float32 [vocab]."""

    def __init__(
        self,
        *,
        pages: int,
        max_batch_size: int,
        max_chunk_size: int,
        vocab_size: int,
        num_draft_tokens: int = 0,
        use_ngram_draft: bool = False,
        faults: Faults,
        logits: Logits,
    ) -> None:
        self.max_pages = pages
        self.max_batch_size = max_batch_size
        self.max_chunk_size = max_chunk_size
        self.vocab_size = vocab_size
        self.num_draft_tokens = num_draft_tokens
        self.use_ngram_draft = use_ngram_draft
        self.max_ngram = 4
        self.faults = faults
        self.logits = logits
        self.pending_jobs: list[FakeJob] = []
        self.active_jobs: list[FakeJob] = []
        self.reset_page_table()

    def reset_page_table(self) -> None:
        """Forget every page."""
        self.faults.strike("reset_page_table")
        self.all_pages = [FakePage(self, object(), serial) for serial in range(self.max_pages)]
        self.unreferenced_pages = {page.phash: page for page in self.all_pages}
        self.referenced_pages: dict[object, FakePage] = {}
        self.access_serial = self.max_pages

    def num_remaining_jobs(self) -> int:
        """Jobs pending and active."""
        return len(self.pending_jobs) + len(self.active_jobs)

    def enqueue(self, job: FakeJob) -> int:
        """Take a job; asserts that it could fit."""
        self.faults.strike("enqueue")
        job.prepare_for_queue(self, 0)
        needed = sum(self._pages_of(job, seq) for seq in job.sequences)
        assert needed <= self.max_pages, f"Job requires {needed} pages (only {self.max_pages} available)"
        assert len(job.sequences) <= self.max_batch_size, "Job requires a minimum batch size"
        self.pending_jobs.append(job)
        return 0

    def cancel(self, job: FakeJob) -> None:
        """Drop a job, wherever it is; no result tells of it."""
        self.faults.strike("cancel")
        if job in self.pending_jobs:
            self.pending_jobs.remove(job)
        elif job in self.active_jobs:
            self._release(job)

    def iterate(self) -> list[dict[str, Any]]:
        """Start jobs, one chunk of prefill for each that wants one, then one token and its guesses for the others."""
        self.faults.strike("iterate")
        results: list[dict[str, Any]] = []
        self._start(results)
        for job in self.active_jobs:
            job.prefill(results)
        self.faults.strike("prefilled")
        ready = [job for job in self.active_jobs if job.is_prefill_done()]
        for job in ready:
            if self.num_draft_tokens and len(job.sequences) > 1:
                raise IndexError("index is out of bounds for dimension 0")
            if self.use_ngram_draft and len(job.sequences[0].sequence_ids) < self.max_ngram - 1:
                raise IndexError("list index out of range")
            if self._decode(job, results):
                self._release(job)
        self.faults.strike("decoded")
        return results

    # --- inside ---

    def _decode(self, job: FakeJob, results: list[dict[str, Any]]) -> bool:
        """A token and up to num_draft_tokens guesses, of which every third fails."""
        for position in range(self.num_draft_tokens + 1):
            padded = -(-self.vocab_size // PADDED_TO) * PADDED_TO
            logits = torch.full((len(job.sequences), 1, padded), -30.0)
            for row, seq in enumerate(job.sequences):
                logits[row, 0, : self.vocab_size] = self.logits(seq.sequence_ids.ids, self.vocab_size)
            ended, _ = job.receive_sample(logits, *job.receive_logits(logits), results, position == 0)
            if ended:
                return True
            if position < self.num_draft_tokens:
                if job.new_tokens % 3 == 0:
                    job.rejected_draft_tokens += self.num_draft_tokens - position
                    return False
                job.accepted_draft_tokens += 1
        return False

    def _start(self, results: list[dict[str, Any]]) -> None:
        skipped: list[FakeJob] = []
        for job in list(self.pending_jobs):
            places = sum(len(each.sequences) for each in self.active_jobs)
            new_pages = sum(
                self._pages_of(job, seq) - sum(phash in self.referenced_pages for phash in seq.page_hashes)
                for seq in job.sequences
            )
            if places + len(job.sequences) > self.max_batch_size or new_pages > len(self.unreferenced_pages):
                skipped.append(job)
                continue
            if any(each.skips >= each.max_skips for each in skipped):
                return
            for each in skipped:
                each.skips += 1
            self.pending_jobs.remove(job)
            self.active_jobs.append(job)
            job.allocate_pages()
            results.append(job.result("started"))

    def allocate(self, job: FakeJob) -> None:
        """Take a job's pages, found ones first."""
        for seq in job.sequences:
            self._allocate(job, seq)

    def _pages_of(self, job: FakeJob, seq: FakeSequence) -> int:
        return -(-(len(seq.sequence_ids) + job.max_new_tokens) // PAGE)

    def _allocate(self, job: FakeJob, seq: FakeSequence) -> None:
        hashes: list[object] = [*seq.page_hashes]
        hashes += [object() for _ in range(self._pages_of(job, seq) - len(hashes))]
        seq.allocated_pages = [self._take(phash) for phash in hashes]
        for page in seq.allocated_pages:
            if page.kv_position < PAGE:
                break
            seq.kv_position += PAGE
            job.cached_pages += 1

    def _take(self, phash: object) -> FakePage:
        """The page of that hash, or the one unused for longest, emptied."""
        page = self.referenced_pages.get(phash) or self.unreferenced_pages.get(phash)
        if page is None:
            page = min(self.unreferenced_pages.values(), key=lambda each: each.access_serial)
            del self.unreferenced_pages[page.phash]
            page.phash, page.prev_hash, page.kv_position = phash, None, 0
        self.unreferenced_pages.pop(phash, None)
        self.referenced_pages[phash] = page
        self.access_serial += 1
        page.access_serial = self.access_serial
        page.ref_count += 1
        return page

    def prefill(self, job: FakeJob, results: list[dict[str, Any]]) -> None:
        """Compute a chunk of what a job knows."""
        moved = False
        for seq in job.sequences:
            assert seq.allocated_pages is not None
            end = min((seq.kv_position + self.max_chunk_size) // PAGE * PAGE, len(seq.sequence_ids) - 1)
            if job.new_tokens or end <= seq.kv_position:
                continue
            seq.kv_position = end
            for index, page in enumerate(seq.allocated_pages):
                page.kv_position = max(page.kv_position, min(max(end - index * PAGE, 0), PAGE))
            moved = True
        if moved:
            done = sum(seq.kv_position for seq in job.sequences)
            total = sum(len(seq.sequence_ids) - 1 for seq in job.sequences)
            results.append(job.result("prefill", curr_progress=done, max_progress=total))

    def page_filled(self, seq: FakeSequence) -> None:
        """Account for the token computed last; a page that is full gets the hash of what it holds."""
        assert seq.allocated_pages is not None
        index = (seq.kv_position - 1) // PAGE
        page = seq.allocated_pages[index]
        page.kv_position = seq.kv_position - index * PAGE
        before = seq.allocated_pages[index - 1].phash if index else None
        assert before is None or isinstance(before, bytes)
        phash = page_hash(seq.sequence_ids.torch_slice(index * PAGE, (index + 1) * PAGE), before)
        if page.kv_position == PAGE and phash not in self.referenced_pages:
            self.unreferenced_pages.pop(phash, None) and self._refill()
            del self.referenced_pages[page.phash]
            page.phash = phash
            self.referenced_pages[phash] = page

    def _refill(self) -> None:
        """Put the page that lost its hash to a newer one back among the free, empty."""
        known = {id(page) for page in (*self.referenced_pages.values(), *self.unreferenced_pages.values())}
        for page in self.all_pages:
            if id(page) not in known:
                page.phash, page.kv_position = object(), 0
                self.unreferenced_pages[page.phash] = page

    def _release(self, job: FakeJob) -> None:
        self.active_jobs.remove(job)
        for seq in job.sequences:
            for page in seq.allocated_pages or []:
                page.ref_count -= 1
                if page.ref_count == 0:
                    del self.referenced_pages[page.phash]
                    self.unreferenced_pages[page.phash] = page
            seq.allocated_pages = []
