"""What torch's CPU allocator really gives out while something runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` holds at once, beyond what was held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
