"""Hosting: the hosts of one worker, one after the other. The next starts when nothing is left of the one before."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from engine.errors import EngineError, ErrorInfo
from engine.worker.hosts import WorkerExit, WorkerHost
from engine.worker.protocol import CancelLoad, Command, Event

STOP_PATIENCE_S = 5.0


class HostListener(Protocol):
    """Who hears of the host of the day; what an earlier one still says is dropped."""

    def host_begins(self) -> None:
        """It was started, which has its own limits: how long it may be silent counts from now on."""

    def host_said(self, event: Event) -> None:
        """An event of its worker's."""

    def host_failed(self, error: ErrorInfo) -> None:
        """It could not be started at all."""

    def host_ended(self, exit_: WorkerExit, *, expected: bool) -> None:
        """It ended; expected: nobody had a use for it any more."""


class Hosting:
    """At most one host has the worker at any time. Lives on the loop that made it."""

    def __init__(self, listener: HostListener) -> None:
        self._listener = listener
        self._host: WorkerHost | None = None
        self._starting: asyncio.Task[None] | None = None
        self._disposals: set[asyncio.Task[None]] = set()
        self._live: list[WorkerHost] = []

    @property
    def occupied(self) -> bool:
        """Whether there is a host of the day."""
        return self._host is not None

    @property
    def pid(self) -> int | None:
        """The process it runs in, None for a thread of this one."""
        return self._host.pid if self._host is not None else None

    def start(self, host: WorkerHost) -> None:
        """Start the worker in this host, in the background."""
        self._host = host
        self._starting = asyncio.get_running_loop().create_task(self._start(host))

    def send(self, command: Command) -> None:
        """Send the worker a command; nothing happens without one."""
        if self._host is not None:
            self._host.send(command)

    def kill(self) -> None:
        """End at once whatever still runs; who stops it, or waits for that, is done sooner."""
        for host in self._live:
            host.kill()

    def let_go(self, *, kill: bool = False) -> None:
        """Have done with the host: it is stopped in the background, and killed first if it would not hear of it."""
        host, self._host = self._host, None
        if host is None:
            return
        if kill:
            host.kill()
        task = asyncio.get_running_loop().create_task(self._dispose(host, self._starting))
        self._disposals.add(task)
        task.add_done_callback(self._disposals.discard)

    async def stop(self, timeout_s: float) -> None:
        """Stop the worker; returns when nothing is left of any host."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if self._host is not None:
            self._host.send(CancelLoad())
            await self._host.stop(timeout_s)
            self._host = None
        if self._disposals:
            await asyncio.wait(self._disposals)

    async def _start(self, host: WorkerHost) -> None:
        while self._disposals and host is self._host:  # the one before may still hold the memory
            await asyncio.wait(self._disposals)
        if host is not self._host:
            return
        self._live.append(host)
        try:
            await host.start(partial(self._said, host), partial(self._ended, host))
        except EngineError as error:
            self._live.remove(host)
            if host is self._host:
                self._host = None
                self._listener.host_failed(error.info)
        else:
            if host is self._host:
                self._listener.host_begins()

    async def _dispose(self, host: WorkerHost, starting: asyncio.Task[None] | None) -> None:
        """Stop a host that may still be starting: it could not be stopped before it has started."""
        if starting is not None:
            await asyncio.wait((starting,))
        await host.stop(STOP_PATIENCE_S)

    def _said(self, host: WorkerHost, event: Event) -> None:
        if host is self._host:
            self._listener.host_said(event)

    def _ended(self, host: WorkerHost, exit_: WorkerExit) -> None:
        self._live.remove(host)
        expected = host is not self._host
        if not expected:
            self._host = None
        self._listener.host_ended(exit_, expected=expected)
