"""How the exllamav2 backend is doing, in numbers."""

from __future__ import annotations

from typing import Any

from engine.backends.base import BackendStats
from engine.backends.exllama.accounts import PageGauges, page_gauges
from engine.backends.exllama.line import Counters, Line
from engine.backends.exllama.parts import LoadedParts


def gauges(line: Line, counters: Counters, generator: Any, parts: LoadedParts | None) -> BackendStats:
    """Counters and gauges now. generator: None where there is none.  parts: None where nothing is loaded."""
    running = line.running.values()
    decoding = sum(live.job.started and live.job.decoding for live in running)
    started = sum(live.job.started for live in running)
    pages = page_gauges(generator) if generator is not None else PageGauges()
    return BackendStats(
        waiting=len(line.waiting) + len(running) - started,
        prefilling=started - decoding,
        decoding=decoding,
        pages_total=parts.pages if parts is not None else 0,
        pages_free=pages.free,
        pages_cached=pages.cached,
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        steps=counters.steps,
        weights_bytes=parts.info.weights_bytes if parts is not None else 0,
        kv_bytes=parts.info.kv_bytes if parts is not None else 0,
        draft_tokens=counters.draft_tokens,
        draft_accepted=counters.draft_accepted,
        drafts=counters.drafts,
        sequences=tuple(line.sequences()),
    )
