"""Which tokens of which sequences the next step computes. Integers only; nothing here imports torch.

There is no prefill phase and no decode phase: every sequence has tokens known and tokens computed, and each step
spends one token budget letting the second catch up with the first (the idea of vLLM v1's scheduler). A long
prompt, a decode, a prefix hit and a preempted sequence that starts over are all that one rule.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
from collections import deque
from dataclasses import replace

from engine.backends.base import BackendRequest
from engine.backends.common.page_keys import PageKey
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import Counters, Plan, Sequence
from engine.errors import ContextLengthExceeded, InvalidRequest

# How much of a worker's requests one step takes on: as asked for, and less where there was not the memory for it.


class StepLimits:
    """max_prompts: sequences that may run at once.  step_tokens: what a step computes at most, prompts and decodes
    together.  prompts_limit: how many sequences memory has been found to allow; 0 where nothing is known.

    What memory did not allow holds until `set_max_prompts`, step_tokens also until `set_step_tokens`.
    """

    def __init__(self, max_prompts: int, step_tokens: int, page_tokens: int) -> None:
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens = step_tokens
        self._page_tokens = page_tokens

    @property
    def places(self) -> int:
        """Sequences that may run at once."""
        return min(self.max_prompts, self.prompts_limit or self.max_prompts)

    def prompt_tokens(self, decodes: int) -> int:
        """What a step with so many decodes has left for prompts."""
        return max(self.step_tokens - decodes, self._least_tokens)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Admit up to this many from the next step on, and try again what memory did not allow before."""
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens

    def set_step_tokens(self, step_tokens: int) -> None:
        """The budget from the next step on; where there is not the memory for it, it is made smaller again."""
        self.step_tokens = self._full_step_tokens = step_tokens

    def halve_tokens(self) -> bool:
        """Give up half of the budget; False where none is left to give up."""
        if self.step_tokens <= self._least_tokens:
            return False
        self.step_tokens = max(self.step_tokens // 2, self._least_tokens)
        return True

    def allow(self, prompts: int) -> None:
        """No more than so many at once from now on, with the whole budget again, as it was not to blame."""
        self.prompts_limit = prompts
        self.step_tokens = self._full_step_tokens

    @property
    def _least_tokens(self) -> int:
        """Prompt tokens that a step takes on even where decodes alone use up step_tokens: prompts never starve."""
        return min(self._full_step_tokens, self._page_tokens)


# Requests that the torch backend does not take.


def refuse_unknown_tokens(request: BackendRequest, vocab: int) -> None:
    """Raise InvalidRequest where a token id lies outside the vocabulary, as it would fail the step of everybody."""
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
        raise InvalidRequest("the prompt is empty; it takes one token at least", param="prompt")


def refuse_hopeless(prompt_tokens: int, *, max_model_len: int, max_input_len: int, pool_tokens: int) -> None:
    """Raise ContextLengthExceeded where a prompt of so many tokens can never be computed."""
    limit, why = min(
        (max_model_len - 1, f"the context is {max_model_len} tokens, the answer's first included"),
        (max_input_len, f"max_input_len is {max_input_len}"),
        (pool_tokens, f"the KV pages hold {pool_tokens} tokens"),
    )
    if prompt_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, more than the {limit} that can be taken: {why}",
            prompt_tokens=prompt_tokens,
            limit=limit,
            max_model_len=max_model_len,
            pool_tokens=pool_tokens,
        )


class Scheduler:
    """First come, first served, over one pool of pages.

    Pages: a sequence is admitted when all its known tokens fit, with a spare page for every running sequence so
    that the next decodes do not undo the admission at once; after that it takes a page when it reaches its edge.
    Where none is free the youngest sequence is preempted: its pages go back (and may be found again as a prefix),
    it starts over at the head of the line, and nobody new is admitted in that step.

    Budget: every decode gets its token in every step; prompts share what is left of step_tokens, oldest first.

    Memory: a step that ran out of it is made smaller by `shrink`; what that found is kept in `limits`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_prompts: int,
        step_tokens: int,
        max_model_len: int,
        max_input_len: int | None = None,
    ) -> None:
        self.pool = pool
        self.limits = StepLimits(max_prompts, step_tokens, pool.page_tokens)
        self.max_model_len = max_model_len
        self.max_input_len = max_model_len - 1 if max_input_len is None else max_input_len
        self.counters = Counters()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stays = itertools.count(1)
        self._written: list[list[int]] = []

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """Sequences not admitted yet, next one first."""
        return self._waiting

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Sequences being worked on, oldest first."""
        return self._running

    def submit(self, sequence: Sequence) -> None:
        """Put it in the line. Raises ContextLengthExceeded where its prompt can never be computed."""
        refuse_hopeless(
            sequence.prompt_tokens,
            max_model_len=self.max_model_len,
            max_input_len=self.max_input_len,
            pool_tokens=self.pool.num_pages * self.pool.page_tokens,
        )
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget it, whatever its state, and free its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._free(sequence)

    def plan(self, *, admit: bool = True) -> Plan:
        """Decide the next step and take the pages for it. Until `commit`, nothing counts as computed, so a step
        that failed can be planned again."""
        plan = Plan()
        decodes = sum(seq.missing == 1 for seq in self._running)
        budget = self.limits.prompt_tokens(decodes)
        preemptions = self.counters.preemptions
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            decode = sequence.missing == 1
            count = 1 if decode else min(sequence.missing, budget)
            if count == 0:
                continue
            if not self._secure(sequence, sequence.computed + count, plan):
                break
            budget -= 0 if decode else count
            plan.feed(sequence, count)
        if admit and self.counters.preemptions == preemptions:
            self._admit(plan, budget)
        return plan

    def add_guesses(self, plan: Plan, guesses: abc.Mapping[str, abc.Sequence[int]]) -> None:
        """Have a planned step compute with these tokens, by sequence id, behind the last one known of sequences that
        decode, as far as `room_ahead` goes."""
        for index, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            ahead = guesses.get(sequence.id, ()) if sequence.missing == 1 else ()
            if fitting := ahead[: self.room_ahead(sequence, len(ahead))]:
                fed = [*chunk.token_ids, *fitting]
                plan.chunks[index] = replace(chunk, token_ids=fed, guessed=len(fitting), stay=0)
                sequence.stay = 0  # copied again whenever nothing is guessed, it would cost more than it brings

    def room_ahead(self, sequence: Sequence, wanted: int) -> int:
        """As many of `wanted` tokens behind its last one as pages are free for, which it takes. Nobody is preempted
        for a guess."""
        wanted = max(0, min(wanted, self.max_model_len - sequence.known - 1))
        needed = self.pool.pages_for(sequence.known + wanted) - len(sequence.pages)
        if needed > 0:
            sequence.pages += self.pool.allocate(needed) or []
        return min(wanted, len(sequence.pages) * self.pool.page_tokens - sequence.known)

    def commit(
        self, plan: Plan, tokens: abc.Iterable[abc.Sequence[int]], spoilt: abc.Container[Sequence] = ()
    ) -> list[Sequence]:
        """Note that the planned chunks are computed and that `plan.sampled` got these tokens: each one, and after
        guesses that held as many more; what is beyond the context is left out. Returns the sequences that ended, which
        are removed: those at the context's end, those that are to have no answer, and those that are `spoilt` or have
        no token, as their computation came to nothing. After a guess that may be the guess's fault: the sequence stays,
        and nothing of the step counts for it."""
        drawn = iter(tokens)
        ended: list[Sequence] = []
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            new = next(drawn)[: self.max_model_len - sequence.known] if chunk.sample else ()
            if sequence in spoilt or (chunk.sample and not new):
                ended += [] if chunk.guessed else [sequence]
                continue
            prompt = sequence.prompt_tokens
            self.counters.prompt_tokens_computed += min(chunk.end, prompt) - min(chunk.start, prompt)
            sequence.token_ids += new
            sequence.computed = sequence.known - 1 if new else chunk.end
            if chunk.told:
                sequence.told = chunk.start + chunk.told.stop
            self._remember_full_pages(sequence)
            if sequence.known >= self.max_model_len or not (sequence.answers or sequence.missing):
                ended.append(sequence)
        for sequence in ended:
            self.remove(sequence)
        return ended

    def shrink(self) -> bool:
        """Make steps need less memory, after one ran out of it. False where nothing is left to give up.

        A step that fed prompts gives up half of its budget for them. Where that cannot be it, the youngest quarter of
        the sequences is preempted, and no more than are left run at once from now on.
        """
        if any(seq.missing > 1 for seq in self._running) and self.limits.halve_tokens():
            return True
        if len(self._running) <= 1:
            return False
        for sequence in self._running[-max(1, len(self._running) // 4) :][::-1]:
            self._preempt(sequence)
        self.limits.allow(len(self._running))
        return True

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether its output so far (brought along from another worker) already fills all there is."""
        return sequence.known >= self.max_model_len or self.pool.pages_for(sequence.known) > self.pool.num_pages

    def hold_written(self, plan: Plan) -> list[int]:
        """The pages that a step writes to: nobody else gets them before `let_go`, whatever becomes of its sequences."""
        size = self.pool.page_tokens
        written = [page for each in plan.chunks for page in each.pages[each.start // size : -(-each.end // size)]]
        self.pool.hold(written)
        self._written.append(written)
        return written

    def let_go(self, written: list[int]) -> None:
        """A step whose pages were held writes no more."""
        self._written.remove(written)
        self.pool.release(written)

    def check(self) -> None:
        """Prove that pages and sequences agree; raises AssertionError with the numbers."""
        self.pool.check([*(seq.pages for seq in self._running), *self._written])
        for seq in self._waiting:
            assert not seq.pages and not seq.computed, f"{seq.id} waits but holds {len(seq.pages)} pages"
        for seq in self._running:
            room = len(seq.pages) * self.pool.page_tokens
            assert seq.computed <= min(room, seq.known), f"{seq.id}: {seq.computed} of {seq.known}, room {room}"
            assert seq.drafted <= min(room, seq.known), f"{seq.id}: {seq.drafted} of {seq.known} drafted, room {room}"
            assert seq.told >= min(seq.computed, seq.tell), f"{seq.id}: {seq.told} told, {seq.computed} computed"

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.limits.places:
            sequence = self._waiting[0]
            if self.outgrown(sequence):
                plan.exhausted.append(self._waiting.popleft())
                continue
            if not self._start(sequence):
                return
            self._running.append(self._waiting.popleft())
            count = min(sequence.missing, budget)
            budget -= count
            plan.feed(sequence, count)

    def _start(self, sequence: Sequence) -> bool:
        """Take pages for all its known tokens, cached ones first; False, and nothing taken, where they lack."""
        pool = self.pool
        whole = sequence.told >= sequence.tell
        reusable = sequence.known - 1 if whole else sequence.told  # at least one token must be left to compute
        findable = reusable // pool.page_tokens
        cached = pool.find(self._key(sequence, index) for index in range(findable))
        pool.hold(cached)
        needed = pool.pages_for(sequence.known) - len(cached)
        fresh = pool.allocate(needed) if needed + len(self._running) <= pool.free_pages else None
        if fresh is None:
            pool.release(cached)
            return False
        sequence.pages = cached + fresh
        sequence.stay = next(self._stays)
        sequence.remembered = len(cached)
        sequence.computed = len(cached) * pool.page_tokens
        sequence.drafted = pool.leading_drafted(cached) * pool.page_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if whole and not sequence.resumed:
                self.counters.prefix_query_tokens += sequence.prompt_tokens
                self.counters.prefix_hit_tokens += sequence.cached_tokens
        return True

    # --- pages ------------------------------------------------------------------------------------------------

    def _secure(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Take pages for `tokens` tokens of a running sequence, preempting younger ones for them. False where
        there is no younger one left: it is then preempted itself or, being alone, has ended."""
        needed = self.pool.pages_for(tokens) - len(sequence.pages)
        if needed <= 0:
            return True
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
        self.remove(sequence)
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.remembered = sequence.drafted = sequence.stay = 0

    def _key(self, sequence: Sequence, index: int) -> PageKey:
        """Key of its page `index`, all of whose tokens are known; computed once."""
        keys, size = sequence.keys, self.pool.page_tokens
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else self.pool.root(sequence.adapter)
            if len(keys) == sequence.shared_tokens // size:
                parent = self.pool.scoped(parent, sequence.cache_scope)
            keys.append(self.pool.key(parent, sequence.token_ids[start : start + size]))
        return keys[index]

    def _remember_full_pages(self, sequence: Sequence) -> None:
        for index in range(sequence.remembered, sequence.computed // self.pool.page_tokens):
            self.pool.remember(sequence.pages[index], self._key(sequence, index))
            sequence.remembered = index + 1
