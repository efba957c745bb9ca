"""Replica: one worker as the engine sees it. Its host, its state, the requests it works on, and its restarts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from engine.backends.base import BackendStats, LoadedModel, LoadProgress
from engine.errors import EngineError, ErrorInfo, WorkerFailed
from engine.metrics import Rate
from engine.request import Request
from engine.snapshot import WorkerReading, WorkerState
from engine.worker import protocol
from engine.worker.hosts import WorkerExit, WorkerHost

STOP_PATIENCE_S = 5.0
_log = logging.getLogger("engine")


class Backoff(msgspec.Struct, frozen=True):
    """Waits between restarts: doubling from first_s up to last_s."""

    first_s: float
    last_s: float

    def delay_s(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`th death in a row (from 1)."""
        return min(self.last_s, self.first_s * 2.0 ** min(deaths - 1, 32))


class ReplicaOwner(Protocol):
    """Who is told what happens to a replica; called on the loop, from no deeper than an event."""

    def replica_changed(self, replica: Replica) -> None:
        """Its state or progress is another one now."""

    def replica_stepped(self, replica: Replica, batch: protocol.StepBatch, before: BackendStats) -> None:
        """It did a step; `before` are the stats before it."""

    def replica_lost(self, replica: Replica, requests: list[Request], error: ErrorInfo) -> None:
        """It died, and these requests have no worker now."""


class Replica:
    """One worker: starting -> loading -> ready, restarted with back-off when it dies after it was ready.

    A worker that never got ready is "failed" and stays so. `draining` ones finish what they have and take nothing new.
    """

    def __init__(
        self,
        worker_id: str,
        load: protocol.Load,
        *,
        device: str,
        new_host: Callable[[str], WorkerHost],
        owner: ReplicaOwner,
        backoff: Backoff,
    ) -> None:
        self.id = worker_id
        self.device = device
        self.state: WorkerState = "starting"
        self.model: LoadedModel | None = None
        self.progress: LoadProgress | None = None
        self.stats = BackendStats()
        self.active: dict[str, Request] = {}
        self.restarts = 0
        self.last_error: ErrorInfo | None = None
        self.load_s: float | None = None
        self._load = load
        self._new_host = new_host
        self._owner = owner
        self._backoff = backoff
        self._loop = asyncio.get_running_loop()
        self._host: WorkerHost | None = None
        self._starting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._disposals: set[asyncio.Task[None]] = set()
        self._told: ErrorInfo | None = None
        self._deaths_in_a_row = 0
        self._ready_at: float | None = None
        self._step_at: float | None = None
        self._rss_bytes = 0
        self._step_s = 0.0
        self.rate = Rate()

    # -- what the engine asks for -------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process it runs in, None for a thread of this one."""
        return self._host.pid if self._host is not None else None

    @property
    def guarded(self) -> bool:
        """Whether it works on a request that may kill it, and so must not get others."""
        return any(request.suspect for request in self.active.values())

    @property
    def was_ready(self) -> bool:
        """Whether it has ever held the model."""
        return self._ready_at is not None

    def start(self) -> None:
        """Start the worker in the background."""
        self._retry = None
        self._host = self._new_host(self.id)
        self._set_state("starting")
        self._starting = self._loop.create_task(self._start(self._host))

    def submit(self, request: Request) -> None:
        """Give it a request; only while ready."""
        request.worker = self.id
        self.active[request.wire_id] = request
        self._send(protocol.Submit(request=request.for_backend()))

    def forget(self, request: Request) -> None:
        """Stop working on a request."""
        if self.active.pop(request.wire_id, None) is not None:
            self._send(protocol.Cancel(request_id=request.wire_id))

    def set_max_prompts(self, max_prompts: int) -> None:
        """Work on at most this many at once, from now on and after restarts."""
        self._load = msgspec.structs.replace(self._load, max_prompts=max_prompts)
        self._send(protocol.SetMaxPrompts(max_prompts=max_prompts))

    def set_threads(self, threads: int) -> None:
        """Compute with this many CPU threads, from now on and after restarts."""
        if threads != self._load.threads:
            self._load = msgspec.structs.replace(self._load, threads=threads)
            self._send(protocol.SetThreads(threads=threads))

    def drain(self) -> None:
        """Take nothing new; `undrain` takes it back."""
        self._set_state("draining")

    def undrain(self) -> None:
        """Take requests again."""
        self._set_state("ready")

    def stop(self, timeout_s: float = STOP_PATIENCE_S) -> asyncio.Task[None]:
        """End the worker for good; the task is done when nothing of it is left. Idempotent."""
        if self._stopping is None:
            self.state = "stopping"
            self._stopping = self._loop.create_task(self._stop(timeout_s))
            self._owner.replica_changed(self)
        return self._stopping

    def reading(self, now: float, max_prompts: int) -> WorkerReading:
        """How it is doing at `now` (the loop's clock)."""
        return WorkerReading(
            id=self.id,
            state=self.state,
            devices=self.model.devices if self.model else (self.device,),
            pid=self.pid,
            active=len(self.active),
            max_prompts=max_prompts,
            tokens_per_s=self.rate.per_second(now),
            progress=self.progress,
            stats=self.stats,
            kv_tokens=self.model.kv_tokens if self.model else 0,
            step_s=self._step_s,
            rss_bytes=self._rss_bytes,
            load_s=self.load_s,
            restarts=self.restarts,
            last_error=self.last_error,
            last_step_age_s=None if self._step_at is None else now - self._step_at,
        )

    # -- what happens -------------------------------------------------------------------------------------------

    def _set_state(self, state: WorkerState) -> None:
        if self.state != "stopping":
            self.state = state
            self._owner.replica_changed(self)

    def _send(self, command: protocol.Command) -> None:
        if self._host is not None:
            self._host.send(command)

    async def _start(self, host: WorkerHost) -> None:
        if self._disposals:  # the one before may still hold the memory
            await asyncio.wait(self._disposals)
        try:
            await host.start(partial(self._on_event, host), partial(self._on_exit, host))
        except EngineError as error:
            self._died(host, error.info)

    def _on_event(self, host: WorkerHost, event: protocol.Event) -> None:
        if host is not self._host:
            return
        match event:
            case protocol.Hello():
                self._set_state("loading")
                self._send(self._load)
            case protocol.Progress(progress=progress):
                self.progress = progress
                self._owner.replica_changed(self)
            case protocol.Loaded(model=model, load_s=load_s):
                self._loaded(model, load_s)
            case protocol.LoadFailed(error=error):
                self._died(host, error)
                self._dispose(host)
            case protocol.StepBatch():
                before, self.stats = self.stats, event.stats
                self._step_at, self._step_s, self._rss_bytes = self._loop.time(), event.step_s, event.rss_bytes
                self._owner.replica_stepped(self, event, before)
                if event.stats.degraded and self.state in ("ready", "draining"):
                    self._degraded(host, event.stats.degraded)
            case protocol.WorkerError(error=error):
                self._told = error
            case protocol.LogLine(level=level, message=message):
                if host.pid is not None:  # a thread's records are in this process's log already
                    _log.log(level, "%s", message, extra={"source": self.id})

    def _loaded(self, model: LoadedModel, load_s: float) -> None:
        self.model, self.load_s, self.progress = model, load_s, None
        self._ready_at = self._loop.time()
        self._set_state("ready")

    def _degraded(self, host: WorkerHost, reason: str) -> None:
        """Its backend takes no more requests: others do, and a new worker takes its place once it has left."""
        self._died(host, WorkerFailed(f"worker {self.id} is degraded: {reason}", worker=self.id).info)
        self._dispose(host)

    def _on_exit(self, host: WorkerHost, exit_: WorkerExit) -> None:
        told, self._told = self._told, None
        self._died(host, told or WorkerFailed(describe_exit(self.id, exit_), worker=self.id).info)

    def _died(self, host: WorkerHost, error: ErrorInfo) -> None:
        """The worker is no use any more: give its requests back, and start another one if it ever worked."""
        if host is not self._host:
            return
        self._host, self.progress, self.stats = None, None, BackendStats()
        if self.state == "stopping":
            return
        self.last_error = error
        lost = list(self.active.values())
        self.active.clear()
        if self.state == "draining":
            self._owner.replica_changed(self)
        elif self.was_ready:
            self._restart_later()
        else:
            self._set_state("failed")
        self._owner.replica_lost(self, lost, error)

    def _restart_later(self) -> None:
        assert self._ready_at is not None
        long_ready = self._loop.time() - self._ready_at > self._backoff.last_s and self.state == "ready"
        self._deaths_in_a_row = 1 if long_ready else self._deaths_in_a_row + 1
        self.restarts += 1
        self._retry = self._loop.call_later(self._backoff.delay_s(self._deaths_in_a_row), self.start)
        self._set_state("restarting")

    async def _stop(self, timeout_s: float) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if self._host is not None:
            self._host.send(protocol.CancelLoad())
            await self._host.stop(timeout_s)
            self._host = None
        if self._disposals:
            await asyncio.wait(self._disposals)

    def _dispose(self, host: WorkerHost) -> None:
        """Stop a host that is no use any more; `stop` and the next start wait for it."""
        task = self._loop.create_task(host.stop(STOP_PATIENCE_S))
        self._disposals.add(task)
        task.add_done_callback(self._disposals.discard)


def describe_exit(worker: str, exit_: WorkerExit) -> str:
    """Why a worker ended, in one sentence with the line of its output that says most: a crash's first, or the last."""
    how = f"was ended by {exit_.signal}" if exit_.signal else f"exited with code {exit_.code}"
    if exit_.signal == signal.SIGKILL.name and os.name == "posix":
        how += " (out of memory, perhaps)"
    lines = exit_.log_tail.strip().splitlines()
    crash = next((line for line in lines if line.startswith("Fatal Python error")), None)
    said = crash or (lines[-1].strip() if lines else "")
    return f"worker {worker} {how}" + (f": {said}" if said else "")
