"""Replica: one worker as the engine sees it. Its host, its state, the requests it works on, and its restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from engine.backends.base import BackendStats, LoadedModel, LoadProgress
from engine.config import DeviceShare, ModelSpec
from engine.errors import EngineError, ErrorInfo, NodeGone, WorkerFailed
from engine.placement.load_history import with_resident
from engine.requests.request import Request
from engine.snapshot import WorkerReading, WorkerState
from engine.worker_process import protocol
from engine.worker_process.hosts import WorkerExit, WorkerHost
from engine.workers.desired_state import DesiredState
from engine.workers.health import (
    AwakeClock,
    Backoff,
    CrashCounter,
    Heartbeat,
    activity,
    describe_exit,
    describe_silence,
)

STOP_PATIENCE_S = 5.0

_log = logging.getLogger("engine")


class ReplicaOwner(Protocol):
    """The pool that a replica reports to; called on the loop, from no deeper than an event."""

    def placed(self, replica: Replica, spec: ModelSpec) -> ModelSpec:
        """It is about to start with `spec`: that, or the same placed again where its devices are not there any more."""

    def replica_changed(self, replica: Replica) -> None:
        """Its state or progress is another one now."""

    def replica_stepped(self, replica: Replica, batch: protocol.StepBatch, before: BackendStats) -> None:
        """It did a step; `before` are the stats before it."""

    def replica_lost(self, replica: Replica, requests: list[Request], error: ErrorInfo) -> None:
        """It died, and these requests have no worker now."""


class Replica:
    """One worker: starting -> loading -> ready, restarted with back-off when it dies after it was ready.

    A worker that never got ready is "failed" and stays so, as is one that died max_deaths times in a row: left dead,
    until `restart`. Starts that fail as its machine is not there do not count. `draining` ones finish what they have
    and take nothing new. At most one host has the worker at any time: the next one starts when nothing is left of the
    one before. Events of a host that was let go are dropped.
    hang_s: a worker at work that reports nothing for so long is replaced (see `engine.workers.health`); 0: never.
    """

    def __init__(
        self,
        worker_id: str,
        load: protocol.Load,
        *,
        device: str,
        new_host: Callable[[str, ModelSpec], WorkerHost],
        owner: ReplicaOwner,
        backoff: Backoff,
        max_deaths: int = 5,
        hang_s: float = 0.0,
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
        self._new_host = new_host
        self._owner = owner
        self._deaths = CrashCounter(backoff, max_deaths)
        self._hang_s = hang_s
        self._loop = asyncio.get_running_loop()
        self._awake = AwakeClock(self._loop.time())
        self._heartbeat = Heartbeat(self._awake)
        self._host: WorkerHost | None = None
        self._live_hosts: list[WorkerHost] = []
        self._starting: asyncio.Task[None] | None = None
        self._disposals: set[asyncio.Task[None]] = set()
        self.desired = DesiredState(load, self._send)
        self._retry: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._reported_error: ErrorInfo | None = None
        self._log_tail: tuple[str, ...] = ()

    # -- commands -----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process it runs in, None for a thread of this one."""
        return self._host.pid if self._host is not None else None

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that hold its memory; none for a thread of this one."""
        ranks = self.model.rank_pids if self.model is not None else ()
        return () if self.pid is None else (self.pid, *ranks)

    @property
    def planned(self) -> tuple[DeviceShare, ...]:
        """Share of each device that placement gave it."""
        return self.desired.load.spec.shares

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """Share of each device that it uses: as its load reported, or as planned before that."""
        return (self.model.shares if self.model is not None else ()) or self.planned

    @property
    def used(self) -> tuple[DeviceShare, ...]:
        """Share that it really took of each device, of a CPU with all of its process; () before its load reported
        it."""
        resident_bytes = self._heartbeat.rss_bytes if self.pid is not None else 0
        return with_resident(self.model.shares, resident_bytes) if self.model is not None else ()

    @property
    def step_ended_at(self) -> float:
        """When the steps of its last report ended, by the loop's clock, however late that arrived."""
        return self._heartbeat.step_ended_at

    @property
    def is_quarantined(self) -> bool:
        """True if it works on a request that may kill it, and so must not get others."""
        return any(request.is_quarantined for request in self.active.values())

    def places(self, max_prompts: int) -> int:
        """Requests it can work on at once: fewer than max_prompts where its memory has been found not to allow them."""
        return min(max_prompts, self.stats.prompts_limit or max_prompts)

    def start(self) -> None:
        """Start the worker in the background."""
        self._retry = None
        spec = self._owner.placed(self, self.desired.load.spec)
        self.desired.move(spec)
        self.device = spec.device
        self._host = self._new_host(self.id, spec)
        self._starting = self._loop.create_task(self._start(self._host))
        self._set_state("starting")

    def restart(self) -> None:
        """Start it again, whatever it does, and forget its deaths: one left dead is revived, one at work gives its
        requests back. One that is to leave does so."""
        if self.state in ("draining", "stopping"):
            return
        if self._retry is not None:
            self._retry.cancel()
        self._deaths.forget()
        self.restarts += 1
        lost = self._let_go(kill=True)
        self.start()
        if lost:
            by_order = WorkerFailed(f"worker {self.id} was restarted by an operator", worker=self.id)
            self._owner.replica_lost(self, lost, by_order.info)

    def check(self, now: float) -> None:
        """Replace the worker if it is hung; to be called every `health.CHECK_S`, with the loop's clock."""
        self._awake.turn(now)
        doing = activity(self.state, self.progress, len(self.active))
        silent_s = self._heartbeat.hung_s(now, doing, self._hang_s)
        if silent_s is not None and self.state != "stopping":
            reason = describe_silence(self.id, silent_s, doing, len(self.active))
            self._died(WorkerFailed(reason, worker=self.id, silent_s=round(silent_s, 1)).info, kill=True)

    def stalled_s(self, now: float) -> float | None:
        """Return the seconds that it has had requests and made no step, where they are too many; else None."""
        if not self.active or self.state not in ("ready", "draining"):
            return None
        return self._heartbeat.stalled_s(now, self._hang_s)

    def submit(self, request: Request) -> None:
        """Give it a request; only while ready."""
        if not self.active:
            self._heartbeat.begin_work(self._loop.time())
        request.worker = self.id
        request.tokens_at_start = None
        self.active[request.wire_id] = request
        self._send(protocol.Submit(request=request.for_backend()))

    def forget(self, request: Request) -> None:
        """Stop working on a request."""
        if self.active.pop(request.wire_id, None) is not None:
            self._send(protocol.Cancel(request_id=request.wire_id))

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
            self._give_back(WorkerFailed(f"worker {self.id} was stopped", worker=self.id).info)
            self._owner.replica_changed(self)
        return self._stopping

    def kill(self) -> None:
        """End at once whatever still runs of it; who stops it, or waits for that, is done sooner."""
        for host in self._live_hosts:
            host.kill()

    def reading(self, now: float) -> WorkerReading:
        """Return its state at `now` (the loop's clock); its model and rate are left for others to add."""
        return WorkerReading(
            id=self.id,
            state=self.state,
            devices=self.model.devices if self.model else (self.device,),
            pid=self.pid,
            active=len(self.active),
            progress=self.progress,
            stats=self.stats,
            kv_tokens=self.model.kv_tokens if self.model else 0,
            step_s=self._heartbeat.step_s,
            rss_bytes=self._heartbeat.rss_bytes,
            load_s=self.load_s,
            restarts=self.restarts,
            last_error=self.last_error,
            last_step_age_s=None if self._heartbeat.step_at is None else now - self._heartbeat.step_at,
            deaths_in_a_row=self._deaths.in_a_row,
            retry_in_s=max(0.0, self._retry.when() - now) if self._retry is not None else None,
            log_tail=self._log_tail,
            planned=self.planned,
            used=self.used,
            node=(self.shares[0].device if self.shares else self.device).rpartition("/")[0],
        )

    def _set_state(self, state: WorkerState) -> None:
        if self.state != "stopping":
            self.state = state
            self._owner.replica_changed(self)

    def _send(self, command: protocol.Command) -> None:
        """Send the worker a command; nothing happens without a host."""
        if self._host is not None:
            self._host.send(command)

    async def _start(self, host: WorkerHost) -> None:
        while self._disposals and host is self._host:  # the one before may still hold the memory
            await asyncio.wait(self._disposals)
        if host is not self._host:
            return
        self._live_hosts.append(host)
        try:
            await host.start(partial(self._on_event, host), partial(self._on_exit, host))
        except EngineError as error:
            self._live_hosts.remove(host)
            if host is self._host:
                self._host = None
                self._died(error.info)
        else:
            if host is self._host:
                self._heartbeat.begin(self._loop.time())

    # -- events -------------------------------------------------------------------------------------------------

    def _on_event(self, host: WorkerHost, event: protocol.Event) -> None:
        if host is not self._host:
            return
        now = self._loop.time()
        self._heartbeat.sign(event, now)
        match event:
            case protocol.Hello():
                self._set_state("loading")
                self._send(self.desired.load)
            case protocol.Progress(progress=progress):
                self._heartbeat.progressed(progress, now)
                self.progress = progress
                self._owner.replica_changed(self)
            case protocol.Loaded(model=model, load_s=load_s):
                if self.model is not None:  # one that finds KV pages has computed no step
                    model = msgspec.structs.replace(model, step_s=max(model.step_s, self.model.step_s))
                self._heartbeat.ready(now, model.step_s)
                self.model, self.load_s, self.progress = model, load_s, None
                self._set_state("ready")
            case protocol.RequestStarted(request_id=request_id):
                if request_id in self.active:
                    request = self.active[request_id]
                    request.tokens_at_start = len(request.generated)
            case protocol.LoadFailed(error=error):
                self._died(error)
            case protocol.Attached():
                self.desired.attached[event.key] = event
                self._owner.replica_changed(self)
            case protocol.StepBatch():
                before, self.stats = self.stats, event.stats
                self._owner.replica_stepped(self, event, before)
            case protocol.WorkerError(error=error):
                self._reported_error = error
            case protocol.LogLine(level=level, message=message):
                if self.pid is not None:  # a thread's records are in this process's log already
                    _log.log(level, "%s", message, extra={"source": self.id})

    def _on_exit(self, host: WorkerHost, exit_: WorkerExit) -> None:
        """The worker ended, of itself or, where it is the current host's no more, because it was let go."""
        self._live_hosts.remove(host)
        expected = host is not self._host
        if not expected:
            self._host = None
        reported, self._reported_error = self._reported_error, None
        if self.state != "stopping":
            self._log_tail = tuple(exit_.log_tail.splitlines())
        if not expected:
            how = WorkerFailed(describe_exit(self.id, exit_), worker=self.id, code=exit_.code, signal=exit_.signal)
            self._died(reported or how.info)

    def _died(self, error: ErrorInfo, *, kill: bool = False) -> None:
        """Give the requests of a dead or hung worker back, and start another one if it ever worked."""
        worked_s = self._heartbeat.worked_s
        if self.state == "stopping":
            self._let_go(kill=kill)
            return
        lost = self._let_go(kill=kill)
        self.last_error = error
        for request in lost:
            request.worker_died()
        given_up, is_away = any(request.given_up for request in lost), error.code == NodeGone.code
        retry_s = self._deaths.add(worked_s, given_up=given_up, is_away=is_away)
        if self.state != "draining":
            if self.model is None:  # it never got ready
                self.state = "failed"
            elif retry_s is None:
                self.state, self.last_error = "failed", self._deaths.left_dead(self.id, error)
            else:
                self.state, self.restarts = "restarting", self.restarts + (not is_away)
                self._retry = self._loop.call_later(retry_s, self.start)
        self._owner.replica_lost(self, lost, self.last_error)
        self._owner.replica_changed(self)

    def _let_go(self, *, kill: bool) -> list[Request]:
        """Let go of the host, which is stopped in the background, and return the requests that it had. kill: first, for
        one that would not react."""
        host, self._host = self._host, None
        if host is not None:
            if kill:
                host.kill()
            task = self._loop.create_task(self._dispose(host, self._starting))
            self._disposals.add(task)
            task.add_done_callback(self._disposals.discard)
        self.progress, self.stats, self._heartbeat = None, BackendStats(), Heartbeat(self._awake)
        self.desired.attached.clear()
        lost = list(self.active.values())
        self.active.clear()
        return lost

    def _give_back(self, reason: ErrorInfo) -> None:
        lost, self.active = list(self.active.values()), {}
        if lost:
            self._owner.replica_lost(self, lost, reason)

    async def _dispose(self, host: WorkerHost, starting: asyncio.Task[None] | None) -> None:
        """Stop a host that may still be starting."""
        await _end_start(host, starting)
        await host.stop(STOP_PATIENCE_S)

    async def _stop(self, timeout_s: float) -> None:
        """Stop the worker; returns when nothing is left of any host."""
        if self._retry is not None:
            self._retry.cancel()
        await _end_start(self._host, self._starting)
        if self._host is not None:
            self._host.send(protocol.CancelLoad())
            await self._host.stop(timeout_s)
            self._host = None
        if self._disposals:
            await asyncio.wait(self._disposals)


async def _end_start(host: WorkerHost | None, starting: asyncio.Task[None] | None) -> None:
    """Wait for the end of a start, before which a host cannot be stopped, but not for the machine that it waits for."""
    if starting is not None:
        if host is not None and not starting.done():
            host.kill()
        await asyncio.wait((starting,))
