"""Naps: models that nobody has asked for long give their memory back, and come again when they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.deployment import Deployment
from engine.tasks import detached


class Naps:
    """Puts deployments to sleep and wakes them, one task each. wake: brings an idle deployment up again."""

    def __init__(self, wake: Callable[[Deployment], Awaitable[None]]) -> None:
        self._wake = wake
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def tick(self, deployment: Deployment, now: float) -> None:
        """Let it sleep where it has not been asked for its `idle_unload_s`."""
        limit_s = deployment.config.idle_unload_s
        if limit_s and deployment.state == "ready" and deployment.idle_s(now) >= limit_s:
            self._tasks[deployment.key] = detached(deployment.take_down("idle"))

    def awaited(self, deployment: Deployment) -> asyncio.Task[None] | None:
        """What must end before it can answer: its falling asleep, or its waking up, which begins here. None where it
        neither sleeps nor is on its way."""
        task = self._tasks.get(deployment.key)
        if task is not None and not task.done():
            return task
        if deployment.state != "idle":
            return None
        task = self._tasks[deployment.key] = detached(self._woken(deployment))
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """End everything; the tasks to wait for."""
        under_way = [task for task in self._tasks.values() if not task.done()]
        for task in under_way:
            task.cancel()
        return under_way

    async def _woken(self, deployment: Deployment) -> None:
        """It sleeps on where it could not be woken."""
        try:
            await self._wake(deployment)
        finally:
            if deployment.state in ("failed", "unloaded"):
                deployment.set("idle")
