"""How the torch backend is doing, in numbers."""

from __future__ import annotations

from engine.backends.base import BackendStats, SequenceStats
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.scheduler import Scheduler
from engine.backends.torch.speculation import Speculation


def gauges(
    runner: ModelRunner, scheduler: Scheduler, speculation: Speculation, *, steps: int, kv_bytes: int
) -> BackendStats:
    """Counters and gauges now."""
    pool, counters, running = scheduler.pool, scheduler.counters, scheduler.running
    decoding = sum(sequence.missing == 1 for sequence in running)
    return BackendStats(
        waiting=len(scheduler.waiting),
        prefilling=len(running) - decoding,
        decoding=decoding,
        pages_total=pool.num_pages,
        pages_free=pool.free_pages,
        pages_cached=pool.cached_pages,
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        preemptions=counters.preemptions,
        steps=steps,
        weights_bytes=runner.weights_bytes,
        kv_bytes=kv_bytes,
        draft_tokens=sum(position.guessed for position in speculation.told),
        draft_accepted=sum(position.held for position in speculation.told),
        drafts=speculation.told,
        prompts_limit=scheduler.limits.prompts_limit,
        sequences=tuple(
            SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.known)
            for each in (*running, *scheduler.waiting)
        ),
    )
