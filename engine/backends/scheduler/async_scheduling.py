"""The step after one whose tokens nobody has read yet: whether it can be planned already, and how. No torch here.

Where a device runs by itself, the host plans and launches the next step while this one is computed (what vLLM calls
asynchronous scheduling and SGLang its overlap scheduler). Only a token's id is missing then: where it goes, which pages
it takes and who else takes part is known. So the plan has `batch.unread` in its place, and the device fills it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.backends.scheduler.batch import ChunkInput, pending_token_id
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Plan, Sequence


def async_obstacle(running: Plan, scheduler: Scheduler, *, guesses: bool) -> str:
    """Why the step after `running` has to wait until that one is read; "" where nothing speaks against planning it.

    guesses: whether tokens may be guessed behind the last one, which takes to know it. How tokens are drawn is no
    obstacle, whatever a request asks for: a step is drawn from after the one before it was read.
    """
    live = (*scheduler.running, *scheduler.waiting)
    if guesses:
        return "tokens are guessed behind the last one"
    if any(sequence.told < sequence.tell for sequence in live):
        return "what is told of a prompt is read while it is computed"
    if any(scheduler.outgrown(sequence) for sequence in scheduler.waiting):
        return "a request ends without being computed"
    if _pages_lacking(running, scheduler):
        return "pages are free only once a request has ended, or has to be preempted"
    return ""


def plan_next_step(running: Plan, scheduler: Scheduler) -> Plan:
    """The step after `running`, which is launched and not committed; only without an `obstacle`.

    Of the sequences that are drawn for, those take part that certainly go on. One whose answer turns out to have ended
    has a token too many in it, which is nobody's.
    """
    with _assume_committed(running, scheduler.max_model_len):
        return scheduler.plan()


def continues_after(sequence: Sequence, chunk: ChunkInput, max_model_len: int) -> bool:
    """Whether another token comes after the one that is drawn for `chunk`, unless that is an end."""
    return chunk.sample and sequence.known + 1 < min(max_model_len, sequence.limit or max_model_len)


def _pages_lacking(running: Plan, scheduler: Scheduler) -> bool:
    pool, longest = scheduler.pool, scheduler.max_model_len
    new = {
        each
        for each, chunk in zip(running.sequences, running.chunks, strict=True)
        if continues_after(each, chunk, longest)
    }
    needed = sum(max(0, pool.pages_for(each.known + (each in new)) - len(each.pages)) for each in scheduler.running)
    return needed > pool.free_pages


@contextmanager
def _assume_committed(running: Plan, max_model_len: int) -> Iterator[None]:
    """Sequences as they are once `running` is committed, but for the ids, which are the rows that they are drawn in."""
    steps = list(zip(running.sequences, running.chunks, strict=True))
    going = [continues_after(sequence, chunk, max_model_len) for sequence, chunk in steps]
    row = 0
    for (sequence, chunk), goes in zip(steps, going, strict=True):
        sequence.computed = chunk.end
        if goes:
            sequence.token_ids.append(pending_token_id(row))
        row += chunk.sampled
    try:
        yield
    finally:
        for (sequence, chunk), goes in zip(steps, going, strict=True):
            sequence.computed = chunk.start
            if goes:
                sequence.token_ids.pop()
