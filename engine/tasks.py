"""Tasks that outlive those who asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def detached(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """A task whose failure is no news to asyncio if its caller has gone away."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


async def uninterrupted(work: Coroutine[object, object, None]) -> None:
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
