"""A model that is looked for in a thread: given up where nobody waits for it, and not before the thread ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from console.runtime.loading import ModelLookup
from engine.backends.base import LoadProgress
from engine.errors import LoadCancelled, ModelNotFound

Report, Cancelled = Callable[[LoadProgress], None], Callable[[], bool]


async def test_what_is_found_is_given_and_how_far_it_is_told() -> None:
    finding, progress = ModelLookup("demo"), LoadProgress(phase="download", done=1, total=2)

    def find(report: Report, cancelled: Cancelled) -> str:
        report(progress)
        return "here"

    assert await finding.by(find) == "here"
    assert finding.progress == progress


async def test_who_is_cancelled_meanwhile_goes_on_once_the_thread_has_given_up() -> None:
    finding, begun, ended = ModelLookup("demo"), threading.Event(), threading.Event()

    def find(report: Report, cancelled: Cancelled) -> str:
        begun.set()
        finding.cancelled.wait()
        ended.set()
        raise LoadCancelled("given up")

    waiting = asyncio.create_task(finding.by(find))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_why_nothing_was_found_is_raised() -> None:
    def find(report: Report, cancelled: Cancelled) -> str:
        raise ModelNotFound("no such model")

    with pytest.raises(ModelNotFound, match="no such model"):
        await ModelLookup("demo").by(find)
