"""Tasks that outlive those who asked for them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import TypeVar

# What a program that draws, serves or computes steps does about pauses that Python itself makes.

GC_THRESHOLDS = (50_000, 20, 50)


def reduce_gc_pauses() -> None:
    """Look for cycles in memory less often, and never again among what exists by now: with the defaults, one look in
    the middle of a frame takes 0.2 s where much is on the screen, and requests keep servers and workers looking."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


T = TypeVar("T")


def run_detached(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """A task whose failure is no news to asyncio if its caller has gone away."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


async def run_uninterrupted(work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation then goes on."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
