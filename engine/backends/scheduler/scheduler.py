"""Scheduler: decides which tokens of which sequences the next step computes. Nothing here imports torch.

There is no prefill phase and no decode phase: every sequence has tokens, some of them computed, and each step spends
one token budget on the uncomputed ones (the idea of vLLM v1's scheduler). A long prompt, a decode, a prefix hit and a
preempted sequence that starts over all follow that one rule.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
import time
from collections import deque
from dataclasses import replace

from engine.backends.base import BackendRequest
from engine.backends.common.page_keys import PageKey
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import BatchPlan, Counters, Sequence
from engine.backends.scheduler.step_times import StepTimes
from engine.errors import ContextLengthExceeded, InvalidRequest

# Limits of one step: as configured, and lower where memory did not suffice.


class StepLimits:
    """max_prompts: sequences that may run at once.  step_tokens: max tokens of a step, prompts and decodes together.
    prompts_limit: sequences that memory was found to allow; 0 for no such limit.

    Limits found by memory apply until `set_max_prompts`, that of step_tokens also until `set_step_tokens`.
    """

    def __init__(self, max_prompts: int, step_tokens: int, page_tokens: int) -> None:
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens = step_tokens
        self._page_tokens = page_tokens

    @property
    def max_running(self) -> int:
        """Sequences that may run at once, as memory allows."""
        return min(self.max_prompts, self.prompts_limit or self.max_prompts)

    def prompt_tokens(self, decodes: int) -> int:
        """Return the tokens left for prompts in a step with this many decodes."""
        return max(self.step_tokens - decodes, self._min_tokens)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Set the maximum from the next step on, and drop the limits found by memory."""
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens

    def set_step_tokens(self, step_tokens: int) -> None:
        """Set the budget from the next step on; it is lowered again where memory does not suffice."""
        self.step_tokens = self._full_step_tokens = step_tokens

    def halve_tokens(self) -> bool:
        """Halve the token budget; return False if it is at its minimum."""
        if self.step_tokens <= self._min_tokens:
            return False
        self.step_tokens = max(self.step_tokens // 2, self._min_tokens)
        return True

    def limit_running(self, prompts: int) -> None:
        """Limit the running sequences, and restore the token budget, which was not the cause."""
        self.prompts_limit = prompts
        self.step_tokens = self._full_step_tokens

    @property
    def _min_tokens(self) -> int:
        """Prompt tokens of a step even where decodes use up step_tokens, so that prompts never starve."""
        return min(self._full_step_tokens, self._page_tokens)


# Requests that the torch backend refuses.


def refuse_unknown_tokens(request: BackendRequest, vocab: int) -> None:
    """Raise InvalidRequest for a token id outside the vocabulary, which would fail the step of all requests."""
    for param, token_ids in (
        ("prompt", request.prompt_ids),
        ("generated", request.generated),
        ("logit_bias", request.params.logit_bias),
        ("banned_next", request.banned_next),
    ):
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"{param} names token {wrong}; the model has {vocab}", param=param, value=wrong)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")


def refuse_oversized_prompt(prompt_tokens: int, *, max_model_len: int, max_input_len: int, pool_tokens: int) -> None:
    """Raise ContextLengthExceeded for a prompt that can never be computed."""
    limit, why = min(
        (max_model_len - 1, f"the context is {max_model_len} tokens, the answer's first included"),
        (max_input_len, f"max_input_len is {max_input_len}"),
        (pool_tokens, f"the KV pages hold {pool_tokens} tokens"),
    )
    if prompt_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, more than the limit of {limit}: {why}",
            prompt_tokens=prompt_tokens,
            limit=limit,
            max_model_len=max_model_len,
            pool_tokens=pool_tokens,
        )


class Scheduler:
    """First come, first served, over one pool of pages.

    Pages: a sequence is admitted when all its tokens fit, with a spare page for every running sequence so that the next
    decodes do not preempt it at once; after that it allocates a page when it fills its last one. Where none is free,
    the youngest sequence is preempted: its pages are freed (and may be found again as a prefix), it starts over at the
    head of the queue, and no new one is admitted in that step.

    Budget: every decode gets its token in every step; prompts share the rest of step_tokens, oldest first.

    Memory: after a step that ran out of it, `shrink` lowers `limits`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_prompts: int,
        step_tokens: int,
        max_model_len: int,
        max_input_len: int | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.limits = StepLimits(max_prompts, step_tokens, pool.page_tokens)
        self.max_model_len = max_model_len
        self.max_input_len = max_model_len - 1 if max_input_len is None else max_input_len
        self.counters = Counters()
        self.times = StepTimes(clock)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._residencies = itertools.count(1)
        self._written: list[list[int]] = []

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """Sequences that are not admitted yet, next one first."""
        return self._waiting

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Admitted sequences, oldest first."""
        return self._running

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ContextLengthExceeded where its prompt can never be computed."""
        refuse_oversized_prompt(
            sequence.prompt_tokens,
            max_model_len=self.max_model_len,
            max_input_len=self.max_input_len,
            pool_tokens=self.pool.num_pages * self.pool.page_tokens,
        )
        self._waiting.append(sequence)
        self.times.submitted(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state, and free its pages."""
        self._take_out(sequence)
        self.times.removed(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._free(sequence)

    def plan(self, *, admit: bool = True) -> BatchPlan:
        """Plan the next step and allocate its pages. Nothing counts as computed until `commit`, so a step that failed
        can be planned again."""
        plan = BatchPlan()
        decodes = len([seq for seq in self._running if len(seq.token_ids) - seq.computed == 1])
        budget = self.limits.prompt_tokens(decodes)
        preemptions = self.counters.preemptions
        index, cut = 0, False
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            uncomputed = len(sequence.token_ids) - sequence.computed
            decode = uncomputed == 1
            count = 1 if decode else min(uncomputed, budget)
            cut = cut or count < uncomputed
            if count == 0:
                continue
            end = sequence.computed + count
            if end > len(sequence.pages) * self.pool.page_tokens and not self._allocate_to(end, sequence, plan):
                break
            budget -= 0 if decode else count
            plan.add_chunk(sequence, count)
        if admit and self.counters.preemptions == preemptions:
            budget = self._admit(plan, budget)
        if self._waiting and len(self._running) >= self.limits.max_running:
            plan.limit = "max_prompts"
        elif (self._waiting and budget > 0) or self.counters.preemptions != preemptions:
            plan.limit = "kv_pages"
        elif self._waiting or cut:
            plan.limit = "step_tokens"
        return plan

    def add_drafts(self, plan: BatchPlan, drafts: abc.Mapping[str, abc.Sequence[int]]) -> None:
        """Append draft tokens, by sequence id, to the chunks of decoding sequences, as far as pages are free."""
        for index, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            tokens = drafts.get(sequence.id, ()) if sequence.num_uncomputed == 1 else ()
            if fitting := tokens[: self.reserve_drafts(sequence, len(tokens))]:
                token_ids = [*chunk.token_ids, *fitting]
                plan.chunks[index] = replace(chunk, token_ids=token_ids, num_drafts=len(fitting), residency=0)
                sequence.residency = 0  # staging it again after every step without drafts would cost more than it saves

    def reserve_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Allocate pages for up to `wanted` draft tokens; return for how many. No sequence is preempted for them."""
        wanted = max(0, min(wanted, self.max_model_len - sequence.num_tokens - 1))
        needed = self.pool.pages_for(sequence.num_tokens + wanted) - len(sequence.pages)
        if needed > 0:
            sequence.pages += self.pool.allocate(needed) or []
        return min(wanted, len(sequence.pages) * self.pool.page_tokens - sequence.num_tokens)

    def commit(
        self, plan: BatchPlan, tokens: abc.Iterable[abc.Sequence[int]], nonfinite: abc.Container[Sequence] = ()
    ) -> list[Sequence]:
        """Count the planned chunks as computed, and append the new tokens of `plan.sampled_sequences`: one each,
        and one more per accepted draft. Returns the sequences that ended, which are removed: at the context's end,
        without an answer to generate, or without a result: `nonfinite` or without a token. That may be the fault of a
        draft token: such a sequence stays, and nothing of the step counts for it."""
        self.times.stepped(plan, self._running, waiting=bool(self._waiting))
        drawn = iter(tokens)
        ended: list[Sequence] = []
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            new = next(drawn) if chunk.sample else ()
            if sequence in nonfinite or (chunk.sample and not new):
                ended += [] if chunk.num_drafts else [sequence]
                continue
            if chunk.start < sequence.prompt_tokens:
                self.counters.prompt_tokens_computed += min(chunk.end, sequence.prompt_tokens) - chunk.start
            sequence.token_ids += new
            num_tokens = len(sequence.token_ids)
            sequence.computed = num_tokens - 1 if new else chunk.end
            if chunk.prompt_states:
                sequence.states_read = chunk.start + chunk.prompt_states.stop
            if sequence.computed // self.pool.page_tokens > sequence.registered_pages:
                self._register_full_pages(sequence)
            if num_tokens >= self.max_model_len or not (sequence.generates or sequence.num_uncomputed):
                ended.append(sequence)
        for sequence in ended:
            self.remove(sequence)
        return ended

    def shrink(self) -> bool:
        """Count a step that ran out of memory, and lower the limits; return False if they are at their minimum.

        If the step computed prompts, their token budget is halved. Else, or at its minimum, the youngest quarter of the
        sequences is preempted, and only the others' number may run at once from now on.
        """
        self.counters.oom_steps += 1
        if any(seq.num_uncomputed > 1 for seq in self._running) and self.limits.halve_tokens():
            return True
        if len(self._running) <= 1:
            return False
        for sequence in self._running[-max(1, len(self._running) // 4) :][::-1]:
            self._preempt(sequence)
        self.limits.limit_running(len(self._running))
        return True

    def exceeds_capacity(self, sequence: Sequence) -> bool:
        """Return whether its tokens (with output from another worker) already fill the context or all pages."""
        return (
            sequence.num_tokens >= self.max_model_len or self.pool.pages_for(sequence.num_tokens) > self.pool.num_pages
        )

    def pin_written(self, plan: BatchPlan) -> list[int]:
        """Acquire the pages that a step writes to, so that they are not reused before `unpin_written`, even if its
        sequences end."""
        size = self.pool.page_tokens
        written = [page for each in plan.chunks for page in each.pages[each.start // size : -(-each.end // size)]]
        self.pool.acquire(written)
        self._written.append(written)
        return written

    def unpin_written(self, written: list[int]) -> None:
        """Release the pages of a step that has finished writing."""
        self._written.remove(written)
        self.pool.release(written)

    def check(self) -> None:
        """Verify that pages and sequences agree. Raises AssertionError with the numbers."""
        self.pool.check([*(seq.pages for seq in self._running), *self._written])
        for seq in self._waiting:
            assert not seq.pages and not seq.computed, f"{seq.id} waits but has {len(seq.pages)} pages"
        for seq in self._running:
            room = len(seq.pages) * self.pool.page_tokens
            assert seq.computed <= min(room, seq.num_tokens), (
                f"{seq.id}: {seq.computed} of {seq.num_tokens}, room {room}"
            )
            assert seq.drafted <= min(room, seq.num_tokens), (
                f"{seq.id}: {seq.drafted} of {seq.num_tokens} drafted, room {room}"
            )
            assert seq.states_read >= min(seq.computed, seq.states_wanted), (
                f"{seq.id}: {seq.states_read} states read, {seq.computed} computed"
            )

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self, plan: BatchPlan, budget: int) -> int:
        """Start waiting sequences as far as limits and pages allow; return the tokens left of `budget`."""
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_running:
            sequence = self._waiting[0]
            if self.exceeds_capacity(sequence):
                plan.exhausted.append(self._waiting.popleft())
                continue
            if not self._start(sequence):
                return budget
            self.times.admitted(sequence)
            self._running.append(self._waiting.popleft())
            count = min(sequence.num_uncomputed, budget)
            budget -= count
            plan.add_chunk(sequence, count)
            if count < sequence.num_uncomputed:
                plan.limit = "step_tokens"
        return budget

    def _start(self, sequence: Sequence) -> bool:
        """Allocate pages for all its tokens, cached ones first; return False, with nothing allocated, if too few are
        free."""
        pool = self.pool
        all_read = sequence.states_read >= sequence.states_wanted
        reusable = sequence.num_tokens - 1 if all_read else sequence.states_read  # at least one token must be computed
        max_cached = reusable // pool.page_tokens
        cached = pool.find(self._key(sequence, index) for index in range(max_cached))
        pool.acquire(cached)
        needed = pool.pages_for(sequence.num_tokens) - len(cached)
        fresh = pool.allocate(needed) if needed + len(self._running) <= pool.free_pages else None
        if fresh is None:
            pool.release(cached)
            return False
        sequence.pages = cached + fresh
        sequence.residency = next(self._residencies)
        sequence.registered_pages = len(cached)
        sequence.computed = len(cached) * pool.page_tokens
        sequence.drafted = pool.count_leading_drafted(cached) * pool.page_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if all_read and not sequence.resumed:
                self.counters.prefix_query_tokens += sequence.prompt_tokens
                self.counters.prefix_hit_tokens += sequence.cached_tokens
        return True

    # --- pages ------------------------------------------------------------------------------------------------

    def _allocate_to(self, tokens: int, sequence: Sequence, plan: BatchPlan) -> bool:
        """Allocate pages for `tokens` tokens of a running sequence, preempting younger ones for them. Returns False if
        no younger one is left: it is then preempted itself or, if alone, has ended."""
        needed = self.pool.pages_for(tokens) - len(sequence.pages)
        while (pages := self.pool.allocate(needed)) is None:
            youngest = self._running[-1]
            if len(self._running) == 1:
                self.remove(sequence)
                plan.exhausted.append(sequence)
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        self._waiting.appendleft(sequence)
        self.times.preempted(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.registered_pages = sequence.drafted = sequence.residency = 0

    def _key(self, sequence: Sequence, index: int) -> PageKey:
        """Return the key of its full page `index`; computed once."""
        keys, size, page_hash = sequence.keys, self.pool.page_tokens, self.pool.page_hash
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else page_hash.root_key(sequence.adapter)
            if len(keys) == sequence.shared_tokens // size:
                parent = page_hash.scope_key(parent, sequence.cache_scope)
            keys.append(page_hash.page_key(parent, sequence.token_ids[start : start + size]))
        return keys[index]

    def _register_full_pages(self, sequence: Sequence) -> None:
        for index in range(sequence.registered_pages, sequence.computed // self.pool.page_tokens):
            self.pool.register(sequence.pages[index], self._key(sequence, index))
            sequence.registered_pages = index + 1
