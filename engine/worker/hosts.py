"""Where a worker's loop runs: a child process (the default), or a thread of this one (tests, debugging)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.backends.base import Backend
from engine.config import ModelSpec
from engine.worker.protocol import Command, Event

BackendFactory = Callable[[ModelSpec], Backend]


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker ended: its exit code, or the name of the signal that ended it; log_tail: its last native output."""

    code: int | None = None
    signal: str | None = None
    log_tail: str = ""


class WorkerHost(Protocol):
    """Runs one worker. Used on the engine's loop alone; both callbacks are called there."""

    pid: int | None

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start it; its first event is Hello. Raises WorkerFailed where it cannot be started at all."""

    def send(self, command: Command) -> None:
        """Queue a command; never blocks, and is ignored once the worker has ended."""

    async def stop(self, timeout_s: float) -> None:
        """Shutdown and wait, then terminate, then kill; on_exit has been called when this returns. Idempotent."""

    def kill(self) -> None:
        """End it at once: SIGKILL for a process; a thread is abandoned. on_exit follows."""
