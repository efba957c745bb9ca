"""Asynchronous scheduling: the next step is planned while the device computes this one. No torch here.

Where the device runs by itself, the host plans and launches the next step before it has read this one's tokens (vLLM's
asynchronous scheduling, SGLang's overlap scheduler). Only the tokens' ids are missing then, not their positions, pages
or batch. So the plan has `batch.pending_token_id` in their place, and the device fills them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from engine.backends.scheduler.batch import ChunkInput, pending_token_id
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence


def async_obstacle(running: BatchPlan, scheduler: Scheduler, *, speculates: bool) -> str:
    """Return why the next step has to wait until `running` is read back; "" if it can be planned now.

    speculates: True if draft tokens may follow, which depend on the last token. Sampling parameters are no obstacle: a
    step is sampled after the previous one was read back.
    """
    live = (*scheduler.running, *scheduler.waiting)
    if speculates:
        return "draft tokens depend on the last token"
    if any(sequence.states_read < sequence.states_wanted for sequence in live):
        return "hidden states of a prompt are read while it is computed"
    if any(scheduler.exceeds_capacity(sequence) for sequence in scheduler.waiting):
        return "a request ends without being computed"
    if _pages_lacking(running, scheduler):
        return "no page is free until a request ends or is preempted"
    return ""


def plan_next_step(running: BatchPlan, scheduler: Scheduler) -> BatchPlan:
    """Plan the step after `running`, which is launched and not committed; only without an `async_obstacle`.

    Sampled sequences take part unless they end at their limit. One that turns out to have ended otherwise has a token
    too many in it, which is dropped.
    """
    with _assume_committed(running, scheduler.max_model_len):
        plan = scheduler.plan()
    if plan.restored_s:  # while `running` computes: how much longer that takes for it is not known
        running.restored_s, plan.restored_s = math.inf, 0.0
    return plan


def continues_after(sequence: Sequence, chunk: ChunkInput, max_model_len: int) -> bool:
    """Return whether another token follows the one sampled for `chunk`, unless that is an end token."""
    return chunk.sample and sequence.num_tokens + 1 < min(max_model_len, sequence.limit or max_model_len)


def _pages_lacking(running: BatchPlan, scheduler: Scheduler) -> bool:
    pool, longest = scheduler.pool, scheduler.max_model_len
    growing = {
        each
        for each, chunk in zip(running.sequences, running.chunks, strict=True)
        if continues_after(each, chunk, longest)
    }
    needed = sum(
        max(0, pool.pages_for(each.num_tokens + (each in growing)) - len(each.pages)) for each in scheduler.running
    )
    return needed > pool.free_pages


@contextmanager
def _assume_committed(running: BatchPlan, max_model_len: int) -> Iterator[None]:
    """Have sequences as if `running` were committed, with placeholders for the sampled ids."""
    steps = list(zip(running.sequences, running.chunks, strict=True))
    continuing = [continues_after(sequence, chunk, max_model_len) for sequence, chunk in steps]
    row = 0
    for (sequence, chunk), continues in zip(steps, continuing, strict=True):
        sequence.computed = chunk.end
        if continues:
            sequence.token_ids.append(pending_token_id(row))
        row += chunk.num_sampled
    try:
        yield
    finally:
        for (sequence, chunk), continues in zip(steps, continuing, strict=True):
            sequence.computed = chunk.start
            if continues:
                sequence.token_ids.pop()
