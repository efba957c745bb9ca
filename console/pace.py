"""When a snapshot is worth drawing: at once while something goes on, once a second while nothing does."""

from __future__ import annotations

from engine.snapshot import Snapshot

QUIET_S = 1.0
"""Clocks, temperatures and loads of an engine that does nothing need no more."""


def is_news(before: Snapshot | None, now: Snapshot) -> bool:
    """Whether `now` is to be drawn where `before` is on the screen."""
    if before is None or now.running or now.queued:
        return True
    return abs(now.at - before.at) >= QUIET_S or _doings(now) != _doings(before) or _stands_still(before, now)


def _doings(snapshot: Snapshot) -> tuple[object, ...]:
    """All that changes only where somebody does something."""
    return (
        snapshot.status,
        snapshot.models,
        snapshot.target_workers,
        snapshot.max_prompts,
        snapshot.totals,
        snapshot.log_total,
        snapshot.running,
        snapshot.queued,
        [(worker.id, worker.state, worker.progress, worker.restarts) for worker in snapshot.workers],
    )


def _stands_still(before: Snapshot, now: Snapshot) -> bool:
    """Whether the clock tells nothing: of a recording that is paused, say."""
    return now is not before and now.at == before.at
