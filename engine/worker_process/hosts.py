"""Where a worker's loop runs: a child process (the default), or a thread of this one (tests, debugging)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from engine.config import EngineConfig, ModelSpec
from engine.errors import WorkerFailed
from engine.worker_process.channel import EngineChannel, WorkerChannel, socket_pair
from engine.worker_process.factory import BackendFactory, create_backend
from engine.worker_process.fork_server import ForkServer
from engine.worker_process.logs import NativeOutput, forwarded_logs
from engine.worker_process.loop import WorkerLoop
from engine.worker_process.process import reap, signal_name, spawn
from engine.worker_process.protocol import Command, Event, Hello, Loaded, Shutdown

KILL_PATIENCE_S = 10.0

__all__ = [
    "BackendFactory",
    "ChannelHost",
    "NewHost",
    "ProcessHost",
    "ThreadHost",
    "WorkerExit",
    "WorkerHost",
    "host_factory",
]

_logger = logging.getLogger(__name__)


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker ended: its exit code, or the name of the signal that ended it; log_tail: its last native output.

    reason: for a worker that was lost rather than ended, what it was lost with.
    """

    code: int | None = None
    signal: str | None = None
    log_tail: str = ""
    reason: str = ""


class WorkerHost(Protocol):
    """Runs one worker, once. Used on the engine's loop alone; both callbacks are called there."""

    pid: int | None

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start it; its first event is Hello. Raises WorkerFailed where it cannot be started at all.

        on_exit is called exactly once, after the last event.
        """

    def send(self, command: Command) -> None:
        """Queue a command; never blocks, and is ignored once the worker has ended."""

    async def stop(self, timeout_s: float) -> None:
        """Shutdown and wait, then kill; on_exit has been called when this returns. Idempotent."""

    def kill(self) -> None:
        """End it at once: SIGKILL for a process; a thread is abandoned. on_exit follows."""


NewHost = Callable[[str, ModelSpec], WorkerHost]
"""Makes the host of a worker, by its id and what it is going to load, devices included."""


class ChannelHost:
    """Common part of all hosts: the engine's end of the channel, and one report of the worker's exit.

    The exit is reported when two things have happened, in any order: the channel has closed (so every event has been
    handed out), and the worker has ended (so the reason is known).
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.pid: int | None = None
        self._channel: EngineChannel | None = None
        self._channel_closed = False
        self._exit: WorkerExit | None = None
        self._exit_reported = asyncio.Event()

    def _listen(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        self._on_event = on_event
        self._on_exit = on_exit

    async def _connect(self, sock: socket.socket) -> None:
        self._channel = await EngineChannel.connect(sock, self._deliver, self._on_channel_closed)

    def _deliver(self, event: Event) -> None:
        """Hand out an event; an exception of its listener must not cost the worker its channel."""
        try:
            self._on_event(event)
        except Exception:
            _logger.exception("an event of worker %s could not be handled: %s", self.worker_id, type(event).__name__)

    def send(self, command: Command) -> None:
        """Queue a command; never blocks, and is ignored once the worker has ended."""
        if self._channel is not None:
            self._channel.send(command)

    def _on_channel_closed(self) -> None:
        self._channel_closed = True
        self._report_exit()

    def _set_exit(self, reason: WorkerExit) -> None:
        self._exit = self._exit or reason
        self._report_exit()

    def _report_exit(self) -> None:
        if self._channel_closed and self._exit is not None and not self._exit_reported.is_set():
            self._exit_reported.set()
            self._on_exit(self._exit)

    async def _exited_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._exit_reported.wait()
        return self._exit_reported.is_set()


class ProcessHost(ChannelHost):
    """A worker in a child process: a crash, an out-of-memory or a hung kernel takes it down and nothing else.

    log_path: a file that its stdout and stderr are appended to as well.  forks: starts it; None starts an interpreter.
    What is in its RAM files is kept for the next worker of its id, unless it ends otherwise than by SIGKILL.
    Start it on a loop whose thread outlives it (see process.spawn).
    """

    def __init__(self, worker_id: str, *, log_path: Path | None = None, forks: ForkServer | None = None) -> None:
        super().__init__(worker_id)
        self._log_path = log_path
        self._forks = forks
        self._kill: Callable[[], None] | None = None
        self._output: NativeOutput | None = None

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the process; its first event is Hello. Raises WorkerFailed where it cannot be started at all."""
        self._listen(on_event, on_exit)
        ours, theirs = socket_pair()
        self._output = NativeOutput(self._deliver, self._log_path)
        try:
            start = self._fork if self._forks is not None else self._spawn
            self._kill = start(theirs, self._output.child_fd)
        except OSError as error:
            ours.close()
            self._output.finish()
            message = f"worker {self.worker_id} could not be started: {error}"
            raise WorkerFailed(message, worker=self.worker_id) from error
        finally:
            self._output.started()
            theirs.close()
        await self._connect(ours)

    def _fork(self, sock: socket.socket, output_fd: int) -> Callable[[], None]:
        """Have the worker forked; return what kills it."""
        assert self._forks is not None

        def started(pid: int) -> None:
            self.pid = pid

        return self._forks.fork(sock, output_fd, on_pid=started, on_exit=self._ended)

    def _spawn(self, sock: socket.socket, output_fd: int) -> Callable[[], None]:
        """Start an interpreter; return what kills it."""
        loop = asyncio.get_running_loop()
        process = spawn(self.worker_id, sock, output_fd)
        self.pid = process.pid

        def reaped(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits for it
                loop.call_soon_threadsafe(self._ended, code)

        def kill() -> None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

        reap(process, reaped)
        return kill

    async def stop(self, timeout_s: float) -> None:
        """Shutdown and wait, then SIGKILL; the process is gone and reaped when this returns."""
        if self._kill is None:
            return
        self.send(Shutdown())
        if await self._exited_within(timeout_s):
            return
        self.kill()
        if not await self._exited_within(KILL_PATIENCE_S):
            self._give_up()

    def kill(self) -> None:
        """SIGKILL, for what it started too (ninja and nvcc, say); on_exit follows."""
        if self._kill is not None:
            self._kill()

    def _deliver(self, event: Event) -> None:
        """Hand out an event. The memory of a loaded model is kept from then on."""
        if isinstance(event, Hello):
            self.pid = event.pid  # which may be here before the word of who forked it
        if isinstance(event, Loaded) and self._forks is not None and self.pid is not None:
            self._forks.keep_memory(self.worker_id, self.pid)
        super()._deliver(event)

    def _ended(self, code: int, reason: str = "") -> None:
        assert self._output is not None
        if self._forks is not None and code != -signal.SIGKILL:  # what a crash did to its memory is not known
            self._forks.release_memory(self.worker_id)
        self._output.finish()
        how = WorkerExit(code=code) if code >= 0 else WorkerExit(signal=signal_name(-code))
        self._set_exit(msgspec.structs.replace(how, log_tail=self._output.tail, reason=reason))

    def _on_channel_closed(self) -> None:
        """Kill a process that closed its channel and does not exit by itself."""
        super()._on_channel_closed()
        if not self._exit_reported.is_set():
            asyncio.get_running_loop().call_later(KILL_PATIENCE_S, self.kill)

    def _give_up(self) -> None:
        """Stop waiting for a process that sits in the kernel and cannot die yet: it is reaped when it does."""
        assert self._channel is not None and self._output is not None
        self._channel.abort()
        self._channel_closed = True
        self._set_exit(WorkerExit(signal="SIGKILL", log_tail=self._output.tail))


class ThreadHost(ChannelHost):
    """The same loop in a daemon thread of this process, over the same kind of channel. For tests and debugging:
    a failed self-check of the backend ends the worker, and nothing can kill it."""

    def __init__(self, worker_id: str, *, backend_factory: BackendFactory | None = None) -> None:
        super().__init__(worker_id)
        self._backend_factory = backend_factory or create_backend

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the thread; its first event is Hello."""
        self._listen(on_event, on_exit)
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket_pair()
        await self._connect(ours)
        threading.Thread(target=self._run, args=(theirs,), name=f"worker-{self.worker_id}", daemon=True).start()

    async def stop(self, timeout_s: float) -> None:
        """Shutdown and wait; a thread that does not end in time is abandoned."""
        if self._channel is None:
            return
        self.send(Shutdown())
        if not await self._exited_within(timeout_s):
            self.kill()
            await self._exit_reported.wait()

    def kill(self) -> None:
        """Abandon the thread: it ends by itself when it next looks at its channel. on_exit follows."""
        if self._channel is not None:
            self._channel.abort()
            self._loop.call_soon(self._set_exit, WorkerExit(log_tail="the worker's thread was abandoned"))

    def _run(self, sock: socket.socket) -> None:
        channel = WorkerChannel(sock)
        reason = WorkerExit(code=1)
        try:
            with forwarded_logs(channel, this_thread_only=True):
                healthy = WorkerLoop(channel, self._backend_factory, strict=True).run()
            reason = WorkerExit(code=0 if healthy else 1)
        except BaseException:
            reason = WorkerExit(code=1, log_tail=traceback.format_exc())
        finally:
            channel.close()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._set_exit, reason)


def host_factory(
    config: EngineConfig, backend_factory: BackendFactory | None, forks: ForkServer | None = None
) -> NewHost:
    """Return the constructor of worker hosts that `config` asks for. forks: starts processes."""
    if config.worker_host == "thread":
        return lambda worker_id, spec: ThreadHost(worker_id, backend_factory=backend_factory)

    def process(worker_id: str, spec: ModelSpec) -> WorkerHost:
        folder = config.log_dir
        log_path = None if folder is None else folder / f"worker-{worker_id}.log"
        return ProcessHost(worker_id, log_path=log_path, forks=forks)

    return process
