"""When an app has nothing left to do, told by its event loop."""

from __future__ import annotations

import asyncio

SOON_S = 0.02
"""A timer that is due within this time belongs to what was begun: screens are drawn 60 times a second."""
QUIET = 3
"""Rounds of the loop without anything ready: one more than threads and sockets need to be heard."""
TICKS = 50
"""An app that still has a timer due soon after so many has one that never ends."""
PATIENCE_S = 60.0


async def wait_for_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Return once no callback is ready and no timer is due soon: after min_sleep seconds, max_sleep if one never ends.

    Textual's own waits until the process has used no processor for a while: twice a key, 20 ms at least, and a second
    where the test shares a busy machine.
    """
    loop = asyncio.get_running_loop()
    begun, quiet, ticks = loop.time(), 0, 0
    while (passed := loop.time() - begun) < (max_sleep if ticks >= TICKS else PATIENCE_S):
        await asyncio.sleep(0)
        quiet = 0 if loop._ready else quiet + 1  # type: ignore[attr-defined]
        if quiet < QUIET:
            continue
        if (due := _next_due(loop)) is not None:
            ticks += 1
            await asyncio.sleep(max(0.0, due - loop.time()))
        elif passed >= min_sleep:
            return
        else:
            await asyncio.sleep(min_sleep - passed)


def _next_due(loop: asyncio.AbstractEventLoop) -> float | None:
    """When the next timer is due, in the loop's time, if that is soon."""
    soon = loop.time() + SOON_S
    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return min((timer.when() for timer in timers if not timer.cancelled() and timer.when() < soon), default=None)
