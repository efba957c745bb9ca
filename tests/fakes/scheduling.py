"""The scheduler with integers for tokens: sequences, steps, and what each was fed."""

from __future__ import annotations

from collections.abc import Callable

from engine.backends.common.kv_tiers import KvTiers
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence


def still_clock() -> float:
    """A clock on which steps take no time, so that no step is limited by how long others took."""
    return 0.0


def scheduler(
    *,
    pages: int = 64,
    page_tokens: int = 4,
    max_prompts: int = 8,
    step_tokens: int = 16,
    max_model_len: int = 200,
    salt: bytes = b"",
    tiers: KvTiers | None = None,
    clock: Callable[[], float] = still_clock,
) -> Scheduler:
    """One over pages of its own."""
    return Scheduler(
        PagePool(pages, page_tokens, salt),
        max_prompts=max_prompts,
        step_tokens=step_tokens,
        max_model_len=max_model_len,
        tiers=tiers,
        clock=clock,
    )


def sequence(name: str, prompt: int, *, first: int = 0, client: int = 0) -> Sequence:
    """A request of `prompt` tokens that share no page with one whose `first` differs."""
    return Sequence(name, [first, *range(1, prompt)], prompt, client=client)


def submit(target: Scheduler, name: str, prompt: int, *, first: int | None = None, client: int = 0) -> Sequence:
    """A request of `prompt` tokens, which nobody else shares unless `first` says so."""
    first = 1000 + int.from_bytes(name.encode()) if first is None else first
    new = sequence(name, prompt, first=first, client=client)
    target.submit(new)
    return new


def step(target: Scheduler, token: Callable[[Sequence], int] = lambda seq: 7) -> BatchPlan:
    """Plan and commit one step, and see that the accounts add up."""
    plan = target.plan()
    target.commit(plan, [[token(seq)] for seq in plan.sampled_sequences])
    target.check()
    return plan


def fed(plan: BatchPlan) -> dict[str, int]:
    """How many tokens each got."""
    return {seq.id: len(chunk.token_ids) for seq, chunk in zip(plan.sequences, plan.chunks, strict=True)}
