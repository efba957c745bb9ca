"""Scheduler: decides which tokens of which sequences the next step computes. Nothing here imports torch.

There is no prefill phase and no decode phase: every sequence has tokens, some of them computed, and each step spends
one token budget on the uncomputed ones (the idea of vLLM v1's scheduler). A long prompt, a decode, a prefix hit and a
preempted sequence that starts over all follow that one rule.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
import math
from array import array
from collections import deque
from dataclasses import replace

from engine.backends.base import BackendRequest
from engine.backends.common.kv_tiers import KvTiers
from engine.backends.common.page_keys import PageKey
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import BatchPlan, Counters, Sequence
from engine.backends.scheduler.step_pacing import MIN_CHUNK, StepPacing
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
        return max(self.step_tokens - decodes, self.min_tokens)

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
        if self.step_tokens <= self.min_tokens:
            return False
        self.step_tokens = max(self.step_tokens // 2, self.min_tokens)
        return True

    def limit_running(self, prompts: int) -> None:
        """Limit the running sequences, and restore the token budget, which was not the cause."""
        self.prompts_limit = prompts
        self.step_tokens = self._full_step_tokens

    @property
    def min_tokens(self) -> int:
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


RESTORE_S = 0.01
"""Time per step in which pages are restored while other sequences wait for a token, without a target for that."""
RESTORE_ALONE_S = 0.25
"""The same while none does. From a slow disk, a long prompt may take longer than a worker may be silent."""

# Whose prompts get the tokens of a step that has too few for all.


class PromptShares:
    """The prompt tokens of a step are shared among clients: max-min fair over the steps, few chunks in each.

    A client that needs no more than an equal share of what is left gets all it needs. Those that need more take turns:
    the one that has gone longest without gets all that is left, the next one what that one leaves. So the prompts of a
    client wait for one step per client with long prompts, never for the end of such a prompt; and as newcomers join at
    the end, they lock no client out. A client's own prompts are computed in the order of their arrival.
    """

    __slots__ = ("_count", "_turns")

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._count = itertools.count()

    def split(self, needed: abc.Mapping[int, int], budget: int, *, whole: bool = False) -> dict[int, int]:
        """Return the tokens for each client's prompts: `budget` together, which is less than they need together.

        whole: leave out a client that would get less than half of what it needs, unless its turn is the first.
        """
        shares: dict[int, int] = {}
        clients = sorted(needed, key=needed.__getitem__)
        for index, client in enumerate(clients):
            if needed[client] > budget // (len(clients) - index):
                break
            shares[client] = needed[client]
            budget -= needed[client]
        turns, count = self._turns, self._count
        self._turns = {each: turns[each] if each in turns else next(count) for each in clients if each not in shares}
        for number, client in enumerate(sorted(self._turns, key=self._turns.__getitem__)):
            if budget == 0 or (whole and number and 2 * budget < needed[client]):
                break
            shares[client] = min(needed[client], budget)
            budget -= shares[client]
            self._turns[client] = next(count)
        return shares

    def clear(self) -> None:
        """Forget whose turn it is: all get what they need, or one has all."""
        if self._turns:
            self._turns = {}


class Scheduler:
    """Fair among clients, and first come, first served for one client, over one pool of pages.

    Pages: a sequence is admitted when all its tokens fit, with a spare page for every running sequence so that the next
    decodes do not preempt it at once; after that it allocates a page when it fills its last one. Where none is free,
    the youngest sequence is preempted: its pages are freed (and may be found again as a prefix), it starts over at the
    head of the queue, and no new one is admitted in that step. While a sequence waits for pages, those of other clients
    may be admitted if they leave it enough once all that came before it have ended.

    Budget: every decode gets its token in every step; clients share the rest of step_tokens for their prompts, or as
    many as `pacing` finds efficient, where that is less: so first tokens do not wait for the prompts of all others, and
    a prompt that fits into a step ends in the one in which it begins. A sequence is admitted when tokens are left in
    the step, or its client has prompts for less than an equal share. With a target for the time between tokens, steps
    that have answers get no more prompt tokens than `pacing` allows; without one, a long prompt does not get more.

    Memory: after a step that ran out of it, `shrink` lowers `limits`.

    Tiers: a sequence that is admitted gets the pages that follow those of the prefix cache from the tiers, as far as
    they have them: for RESTORE_S or RESTORE_ALONE_S per step, all sequences together, and one batch of pages in any
    step. With a target for the time between tokens, it is what that leaves besides the answers, and prompts get the
    rest; sequences are then restored from the step after their admission on. By turns, the sequence with the fewest
    pages left comes first, so that a short prompt waits for no long one, and the oldest one, so that none waits
    forever. Pages go to the tiers when they are full.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_prompts: int,
        step_tokens: int,
        max_model_len: int,
        max_input_len: int | None = None,
        clock: abc.Callable[[], float],
        tiers: KvTiers | None = None,
    ) -> None:
        self.pool = pool
        self._tiers = tiers
        self._clock = clock
        self._restore_s = 0.0
        self._restore_until_s: float | None = None
        self._restored_alone_s = 0.0  # since the last step, by plans that had nothing to compute
        self._batch_s = RESTORE_S  # of pages that are restored together; until one was
        self._restores_oldest = False
        self.limits = StepLimits(max_prompts, step_tokens, pool.page_tokens)
        self.max_model_len = max_model_len
        self.max_input_len = max_model_len - 1 if max_input_len is None else max_input_len
        self.counters = Counters()
        self.times = StepTimes(clock)
        self.pacing = StepPacing()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._residencies = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._shares = PromptShares()
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
        sequence.order = next(self._arrivals)
        if not self._running and not self._waiting:
            self._restored_alone_s = 0.0
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
        prompts: list[Sequence] = []
        preemptions = self.counters.preemptions
        if self._tiers is not None:
            self._restore_running()
            plan.restored_s = self._restored_s()
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            if sequence.stored_pages:
                continue
            uncomputed = len(sequence.token_ids) - sequence.computed
            if uncomputed != 1:
                prompts += [sequence] if uncomputed else []
                continue
            end = sequence.computed + 1
            if end > len(sequence.pages) * self.pool.page_tokens and not self._allocate_to(end, sequence, plan):
                break
            plan.add_chunk(sequence, 1)
        if prompts or self._waiting:
            self._plan_prompts(plan, prompts, admit=admit, short_of_pages=self.counters.preemptions != preemptions)
        if not plan.chunks:
            self._restored_alone_s += plan.restored_s
        return plan

    def _plan_prompts(self, plan: BatchPlan, prompts: list[Sequence], *, admit: bool, short_of_pages: bool) -> None:
        """Admit waiting sequences, and add the prompts to a plan that has the answers."""
        if plan.sequences and self.pacing.wants_answers_alone:
            plan.limit = "step_tokens"
            return
        budget = self.limits.prompt_tokens(len(plan.sequences))
        if self.pacing.target_s is not None:
            budget = self._paced(plan, () if self._waiting else prompts, budget)
            if plan.sequences:
                self._restore_until_s = -math.inf
        batch = min(budget, max(math.ceil(min(self.pacing.efficient_tokens(), budget)), self.limits.min_tokens))
        needed: dict[int, int] = {}
        for sequence in prompts:
            needed[sequence.client] = needed.get(sequence.client, 0) + sequence.num_uncomputed
        if self._waiting and admit and not short_of_pages:
            short_of_pages = self._admit(plan, prompts, needed, batch)
            if self._restore_until_s != -math.inf:
                plan.restored_s = self._restored_s()
            budget = self._paced(plan, prompts, budget)  # what of a prompt is cached is known once it is admitted
            batch = min(batch, budget)
        total = sum(needed.values())
        added = self._add_prompts(plan, prompts, needed, batch, budget)
        if self._waiting and len(self._running) >= self.limits.max_running:
            plan.limit = "max_prompts"
        elif short_of_pages or (self._waiting and total < batch):
            plan.limit = "kv_pages"
        elif self._waiting or added < total:
            plan.limit = "step_tokens"

    def _paced(self, plan: BatchPlan, prompts: abc.Iterable[Sequence], budget: int) -> int:
        """Return how many of `budget` tokens of these prompts keep the target for the time between tokens, if it is
        the prompt with the fewest computed tokens that gets them; () for one that begins."""
        start = min((each.computed for each in prompts), default=0)
        return self.pacing.prompt_tokens(plan, start, most=budget, least=min(budget, self.limits.min_tokens))

    def _add_prompts(
        self, plan: BatchPlan, prompts: abc.Sequence[Sequence], needed: dict[int, int], batch: int, budget: int
    ) -> int:
        """Add chunks of admitted prompts, which need these tokens by client; return the tokens of the chunks.

        Clients share `batch`. Where that is less than the budget, each computes as many whole prompts as come nearest
        to its share, but one at least, as far as the budget goes. With a target for the time between tokens, a
        client's prompts get the part of the time that its share is of all: the same tokens take longer where they
        attend to more.
        """
        spare = budget - batch
        if len(needed) == 1:
            shares = dict.fromkeys(needed, batch)
            self._shares.clear()
        elif sum(needed.values()) > batch:
            shares = self._shares.split(needed, batch, whole=spare > 0)
        else:
            shares = needed
            self._shares.clear()
        if not shares:
            return 0
        pacing = self.pacing
        prompt_s, shared = pacing.prompt_s(plan), sum(shares.values())
        start = min((each.computed for each in prompts), default=0)
        least = min(budget, pacing.min_tokens(min(budget, self.limits.min_tokens), prompt_s, start))
        left_s = {client: prompt_s * share / shared for client, share in shares.items() if share}
        begun: set[int] = set()
        added = 0
        for sequence in prompts:
            client, wanted = sequence.client, sequence.num_uncomputed
            left = shares.get(client, 0)
            if left <= 0 or (spare and client in begun and 2 * left < wanted):
                shares[client] = 0
                continue
            begun.add(client)
            count = fitting = min(wanted, left + spare)
            if prompt_s < math.inf:
                is_long = count < wanted or pacing.tokens_s(sequence.computed, wanted) > prompt_s
                if is_long or pacing.target_s is not None:
                    affordable = pacing.affordable_tokens(left_s[client], sequence.computed)
                    count = int(min(fitting, max(affordable, least - added, MIN_CHUNK)))
                left_s[client] = max(0.0, left_s[client] - pacing.tokens_s(sequence.computed, count))
            plan.add_chunk(sequence, count)
            shares[client] = left - count if count == fitting else 0
            spare -= max(0, count - left)
            added += count
        return added

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
            sequence.pages.extend(self.pool.allocate(needed) or ())
        return min(wanted, len(sequence.pages) * self.pool.page_tokens - sequence.num_tokens)

    def commit(
        self, plan: BatchPlan, tokens: abc.Iterable[abc.Sequence[int]], nonfinite: abc.Container[Sequence] = ()
    ) -> list[Sequence]:
        """Count the planned chunks as computed, and append the new tokens of `plan.sampled_sequences`: one each,
        and one more per accepted draft. Returns the sequences that ended, which are removed: at the context's end,
        without an answer to generate, or without a result: `nonfinite` or without a token. That may be the fault of a
        draft token: such a sequence stays, and nothing of the step counts for it."""
        seconds = self.times.stepped(plan, self._running, waiting=bool(self._waiting))
        self.pacing.observe(plan, seconds - self._restored_alone_s)
        self._restored_alone_s = 0.0
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
            assert seq.registered_pages + seq.stored_pages <= len(seq.pages), (
                f"{seq.id}: {seq.registered_pages} pages registered, {seq.stored_pages} stored, has {len(seq.pages)}"
            )
            assert seq.states_read >= min(seq.computed, seq.states_wanted), (
                f"{seq.id}: {seq.states_read} states read, {seq.computed} computed"
            )

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self, plan: BatchPlan, prompts: list[Sequence], needed: dict[int, int], budget: int) -> bool:
        """Start waiting sequences as far as limits and pages allow, and add them to the prompts; return True if one
        waits for pages. needed: tokens of the prompts by client."""
        left = budget - sum(needed.values())
        first_short: Sequence | None = None
        passed_over: set[int] = set()
        index = 0
        while index < len(self._waiting) and len(self._running) < self.limits.max_running:
            sequence = self._waiting[index]
            client = sequence.client
            mine = needed.get(client, 0)
            share = max(1, budget // (len(needed) + (client not in needed)))
            if client in passed_over or (left <= 0 and mine >= share):
                passed_over.add(client)
                index += 1
            elif self.exceeds_capacity(sequence):
                del self._waiting[index]
                plan.exhausted.append(sequence)
            elif (first_short is None or self._leaves_room(first_short, sequence)) and self._start(sequence):
                del self._waiting[index]
                self._running.append(sequence)
                is_restored = self._restore(sequence)
                self.times.admitted(sequence)
                if not is_restored:
                    continue
                prompts.append(sequence)
                needed[client] = mine + sequence.num_uncomputed
                left -= sequence.num_uncomputed
            else:
                first_short = first_short or sequence
                passed_over.add(client)
                index += 1
        return first_short is not None

    def _leaves_room(self, first: Sequence, other: Sequence) -> bool:
        """Return whether `other` may get pages before `first`, which waits for some: if `first` has enough of them when
        all that came before it have ended."""
        pool = self.pool
        later = sum(len(each.pages) for each in self._running if each.order > first.order)
        needed = later + pool.pages_for(other.num_tokens) + pool.pages_for(first.num_tokens)
        return needed + len(self._running) + 1 <= pool.num_pages

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
        sequence.pages = array("i", cached + fresh)
        sequence.residency = next(self._residencies)
        sequence.registered_pages = len(cached)
        sequence.computed = len(cached) * pool.page_tokens
        sequence.drafted = pool.count_leading_drafted(cached) * pool.page_tokens
        if self._tiers is not None and len(cached) < max_cached and _is_lasting(sequence.adapter):
            first = self._key(sequence, len(cached))
            sequence.stored_pages = max_cached - len(cached) if self._tiers.has(first) else 0
        return True

    # --- tiers ------------------------------------------------------------------------------------------------

    def _restore_running(self) -> None:
        """Fill pages of running sequences from the tiers. The time for that in this step begins with the first one."""
        self._restore_s, self._restore_until_s = RESTORE_ALONE_S, None
        answers = [each.num_tokens for each in self._running if each.num_uncomputed == 1]
        if answers:
            spare_s = self.pacing.spare_s(len(answers), sum(answers))
            self._restore_s = RESTORE_S if spare_s is None else spare_s - self._batch_s
        restoring = [each for each in self._running if each.stored_pages]
        self._restores_oldest = not self._restores_oldest
        if not self._restores_oldest:
            restoring.sort(key=lambda each: each.stored_pages)
        for sequence in restoring:
            if self._restore(sequence):
                self.times.admitted(sequence)

    def _restored_s(self) -> float:
        """Return the seconds since pages were first restored in this step; 0 where none were."""
        until_s = self._restore_until_s
        return 0.0 if until_s is None else self._clock() - (until_s - self._restore_s)

    def _restore(self, sequence: Sequence) -> bool:
        """Fill pages of a sequence that was admitted from the tiers; return whether that is done."""
        while sequence.stored_pages and self._tiers is not None:
            if self._restore_until_s is None:
                self._restore_until_s = self._clock() + self._restore_s
            elif self._clock() >= self._restore_until_s:
                return False
            first = sequence.registered_pages
            end = first + min(sequence.stored_pages, self._tiers.batch_pages)
            keys = [self._key(sequence, index) for index in range(first, end)]
            began_s = self._clock()
            restored = self._tiers.restore(keys, sequence.pages[first:end], self._restore_until_s - began_s)
            self._batch_s = self._clock() - began_s
            if restored is None:
                return False
            for page, key in zip(sequence.pages[first : first + restored], keys[:restored], strict=True):
                self.pool.register(page, key)
            sequence.registered_pages += restored
            sequence.computed = sequence.registered_pages * self.pool.page_tokens
            sequence.stored_pages = sequence.stored_pages - restored if restored == end - first else 0
            self.counters.restored_tokens += restored * self.pool.page_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if sequence.states_read >= sequence.states_wanted and not sequence.resumed:
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
        sequence.pages.extend(pages)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        self._waiting.appendleft(sequence)
        self.times.preempted(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = array("i")
        sequence.computed = sequence.registered_pages = sequence.drafted = sequence.residency = 0
        sequence.stored_pages = 0

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
        full = range(sequence.registered_pages, sequence.computed // self.pool.page_tokens)
        keys = [self._key(sequence, index) for index in full]
        pages = sequence.pages[full.start : full.stop]
        is_lasting = _is_lasting(sequence.adapter)
        for page, key in zip(pages, keys, strict=True):
            self.pool.register(page, key, is_lasting=is_lasting)
        sequence.registered_pages = full.stop
        if self._tiers is not None and is_lasting:
            self._tiers.store(keys, pages)


def _is_lasting(adapter: str) -> bool:
    """Return whether the key of an adapter names its content, so that its pages may outlive it."""
    return not adapter or "\0" in adapter
