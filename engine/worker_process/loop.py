"""The loop of one model replica: drain commands, one backend step, output processing, one event batch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

from engine.backends.base import Backend, BackendStats, PrefixChanges, TimeLost
from engine.config import ModelSpec
from engine.devices.cpu_and_ram import process_bytes
from engine.errors import EngineError, NoModelLoaded, WorkerFailed, first_line
from engine.worker_process import protocol
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.factory import BackendFactory
from engine.worker_process.loading import (
    Replica,
    attach_adapter,
    limit_torch_threads,
    load_replica,
    process_threads,
)
from engine.worker_process.outbox import Outbox
from engine.worker_process.requests import Requests

HEARTBEAT_S = 1.0
GAUGE_S = 1.0
MAX_FAILED_STEPS = 2

_logger = logging.getLogger(__name__)


class WorkerLoop:
    """Runs one backend on the calling thread, for the engine at the other end of `channel`.

    before_load: called with each Load before anything of it happens.
    strict: a failed backend check ends the worker instead of being logged (for tests).  clock: seconds, of any origin.
    """

    def __init__(
        self,
        channel: WorkerChannel,
        create_backend: BackendFactory,
        *,
        before_load: Callable[[protocol.Load], None] | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._create_backend = create_backend
        self._before_load = before_load
        self._strict = strict
        self._replica: Replica | None = None
        self._spec: ModelSpec | None = None
        self._requests: Requests | None = None
        self._outbox = Outbox()
        self._gauges_read_s = -math.inf
        self._rss_bytes = 0
        self._detaching: set[str] = set()
        self._failed_steps = 0
        self._check_due = False
        self._stopping = False

    def run(self) -> bool:
        """Work until Shutdown or the channel's end, then unload; False where the backend broke for good."""
        self._channel.send(protocol.Hello(pid=os.getpid()))
        healthy = True
        try:
            while not (self._stopping or self._channel.closed):
                self._iterate()
        except Exception as error:
            healthy = False
            _logger.exception("the worker failed")
            broken = (
                error if isinstance(error, WorkerFailed) else WorkerFailed(f"the worker failed: {first_line(error)}")
            )
            self._channel.send(protocol.WorkerError(error=broken.info))
            self._channel.close()  # its requests go on elsewhere, however long the rest takes
        finally:
            healthy = self._unload_finally() and healthy
            self._channel.close()
        return healthy

    def _unload_finally(self) -> bool:
        """Unload for the last time; False where that fails, as it does on a lost device."""
        try:
            self._unload()
        except Exception:
            _logger.exception("unloading the model failed")
            return False
        return True

    def _iterate(self) -> None:
        """Execute the commands received, then do one step; with nothing to do, wait up to a heartbeat and report."""
        self._detach_unused()
        busy = self._busy_backend() is not None
        if not busy:
            self._check()
        command = self._channel.take(0.0 if busy or self._outbox.has_delayed else HEARTBEAT_S)
        if command is not None and self._outbox.has_delayed:
            self._send_batch()  # it may make the next step a long one
        while command is not None:
            self._execute(command)
            if self._stopping:
                return
            command = self._channel.take()
        if self._requests is not None and self._requests.take_masks() and self._outbox.has_delayed:
            self._send_batch()  # their prompts may, too
        backend = self._busy_backend()
        if backend is not None and self._requests is not None:
            self._step(backend, self._requests)
        else:
            self._send_batch()

    def _busy_backend(self) -> Backend | None:
        backend = self._replica.backend if self._replica is not None else None
        return backend if backend is not None and backend.has_work() else None

    # --- commands -------------------------------------------------------------------------------------

    def _execute(self, command: protocol.Command) -> None:
        match command:
            case protocol.Submit(request=request):
                self._channel.send(protocol.RequestStarted(request_id=request.id))
                if self._requests is not None:
                    self._requests.submit(request)
                else:
                    lacking = NoModelLoaded("the worker has no model", state="unloaded")
                    self._outbox.output_of(request.id).fail(lacking.info)
            case protocol.Cancel(request_id=request_id):
                if self._requests is not None:
                    self._requests.forget(request_id)
                else:
                    self._outbox.drop(request_id)
            case protocol.SetMaxPrompts(max_prompts=max_prompts):
                if self._replica is not None:
                    self._replica.backend.set_max_prompts(max_prompts)
            case protocol.SetStepTokens(step_tokens=step_tokens):
                if self._replica is not None:
                    self._replica.backend.set_step_tokens(step_tokens)
            case protocol.SetItlTarget(target_s=target_s):
                if self._replica is not None:
                    self._replica.backend.set_itl_target(target_s)
            case protocol.SetThreads(threads=threads):
                limit_torch_threads(threads if self._spec is None else process_threads(threads, self._spec))
            case protocol.Attach(adapter=adapter):
                self._detaching.discard(adapter.key)
                self._channel.send(attach_adapter(self._replica, adapter))
            case protocol.Detach(key=key):
                self._detaching.add(key)
            case protocol.Load():
                self._load(command)
            case protocol.CancelLoad():
                pass  # that load is over
            case protocol.Shutdown():
                self._stopping = True

    def _load(self, load: protocol.Load) -> None:
        self._unload()
        if self._before_load is not None:
            self._before_load(load)
        started_s, self._spec = self._clock(), load.spec
        try:
            self._replica = load_replica(
                load,
                self._create_backend,
                report=lambda progress: self._channel.send(protocol.Progress(progress=progress)),
                cancelled=lambda: (
                    self._channel.closed or self._channel.has_waiting(protocol.CancelLoad, protocol.Shutdown)
                ),
            )
        except EngineError as error:
            self._channel.send(protocol.LoadFailed(error=error.info))
            return
        attached = [attach_adapter(self._replica, adapter) for adapter in load.adapters]
        self._failed_steps = 0
        self._requests = Requests(self._replica, self._outbox, self._channel.wake, self._clock)
        self._gauges_read_s = -math.inf  # what it took is read off the next report
        self._channel.send(protocol.Loaded(model=self._replica.model, load_s=self._clock() - started_s))
        for answer in attached:
            self._channel.send(answer)

    def _unload(self) -> None:
        self._requests = None
        self._outbox = Outbox()
        self._detaching.clear()
        if self._replica is not None:
            self._replica.backend.unload()
            self._replica = None

    def _detach_unused(self) -> None:
        """Detach the adapters that are to go and that no live request uses."""
        if not self._detaching:
            return
        unused = self._detaching - (self._requests.adapters if self._requests is not None else set())
        self._detaching -= unused
        if self._replica is not None:
            for key in unused:
                self._replica.backend.detach(key)

    # --- steps ----------------------------------------------------------------------------------------

    def _step(self, backend: Backend, requests: Requests) -> None:
        started_s, continued = self._clock(), 0
        self._check_due = True
        try:
            events = backend.step()
        except WorkerFailed:
            raise  # none of its requests has failed: they continue elsewhere with what they have
        except Exception as error:
            self._step_failed(error, requests)
        else:
            self._failed_steps = 0
            continued = requests.take(events)
        if self._outbox.stepped(started_s, self._clock(), continued):
            # A prompt that waits may take the place of an answer that ended, and make the next step a long one.
            self._send_batch(everything=self._outbox.has_delayed and backend.stats().waiting > 0)

    def _step_failed(self, error: Exception, requests: Requests) -> None:
        """Fail every request of the step; give up when steps go on failing."""
        _logger.exception("a step failed")
        requests.fail(f"the step failed: {first_line(error)}")
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._send_batch()
            raise WorkerFailed(f"{self._failed_steps} steps in a row failed: {first_line(error)}") from error

    def _check(self) -> None:
        """Check the backend's accounts, once after it became idle."""
        if not self._check_due or self._replica is None:
            return
        self._check_due = False
        try:
            self._replica.backend.check()
        except AssertionError as error:
            if self._strict:
                raise
            _logger.error("internal accounting error in the backend: %s", first_line(error))

    def _send_batch(self, *, everything: bool = True) -> None:
        """Send the engine the outputs since the last batch, delayed ones too if `everything`, and the gauges."""
        now_s = self._clock()
        lost: dict[str, TimeLost] = {}
        if now_s - self._gauges_read_s >= GAUGE_S:
            lost = self._requests.time_lost() if self._requests is not None else lost
            self._gauges_read_s, self._rss_bytes = now_s, process_bytes(os.getpid())
        done = self._outbox.done
        backend = self._replica.backend if self._replica is not None else None
        self._channel.send(
            protocol.StepBatch(
                outputs=self._outbox.take(everything=everything),
                stats=backend.stats() if backend is not None else BackendStats(),
                steps=done.steps,
                step_s=done.seconds / done.steps if done.steps else 0.0,
                answers=done.answers,
                sent_s=now_s,
                rss_bytes=self._rss_bytes,
                prefix=backend.prefix_changes() if backend is not None else PrefixChanges(),
                lost=lost,
            )
        )
