"""What the generator's page table and queues say, and whether they add up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PageGauges:
    """Pages of the cache now. free: held by no job.  cached: those of them that hold a prefix which may be found."""

    free: int = 0
    cached: int = 0


def page_gauges(generator: Any) -> PageGauges:
    """The page table's."""
    free = generator.unreferenced_pages.values()
    return PageGauges(free=len(free), cached=sum(page.kv_position > 0 for page in free))


def check_accounts(generator: Any, ours: Collection[str], pages: int) -> None:
    """Prove that the generator has the jobs in `ours` and no others, and that all pages are free or held by one of
    them; raises AssertionError with the numbers."""
    active = {job.identifier for job in generator.active_jobs}
    theirs = active | {job.identifier for job in generator.pending_jobs}
    assert set(ours) == theirs, f"{len(ours)} requests run, the generator has {len(theirs)} jobs"
    held, free = len(generator.referenced_pages), len(generator.unreferenced_pages)
    assert held + free == pages, f"{held} pages held and {free} free are not {pages}"
    assert active or not held, f"{held} pages are held by nobody"
