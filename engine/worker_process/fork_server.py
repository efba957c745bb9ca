"""ForkServer: a process that has imported what workers import, and forks one when the engine asks for it.

So a worker that takes another's place, or that of a model that was asleep, imports nothing, and the pages of what was
imported are in memory once. Nothing but imports may happen before a fork: no thread, no OpenMP region and no device
context survives one.

It also forks keepers: processes that hold a worker's RAM files (weights and KV pages) open, so that the worker which
takes its place finds them. Where memory runs out, the kernel ends a keeper before anything else, which costs nothing
but that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.system.child_process import block_stop_signals, die_with_parent, name_process, python_command
from engine.worker_process.logs import NativeOutput
from engine.worker_process.process import reap, signal_name, worker_environment
from engine.worker_process.protocol import LogLine

_MESSAGE_BYTES = 256
_PRELOADED = "engine.backends.torch.backend"
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts its threads when it is imported."""
_RAM_FILES = "/memfd:ericllm-"
_CLOSE_S = 5.0

_log = logging.getLogger("engine")


# The engine's end.


@dataclass(slots=True)
class _Forked:
    """A worker that was asked for. on_exit: takes its exit code, -9 for SIGKILL, and "" or what it was lost with.
    exists: it was forked.  is_killed: its end was ordered."""

    on_pid: Callable[[int], None]
    on_exit: Callable[[int, str], None]
    exists: bool = False
    is_killed: bool = False


class ForkServer:
    """Starts workers by forking a process of its own, which is started with the first one, or by `prepare`.

    Lives on one asyncio loop, whose thread must outlive it: on Linux the kernel kills the process when the thread that
    started it ends, and the workers with it. Linux only.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environment: Mapping[str, str] = {}
        self._workers: dict[int, _Forked] = {}
        self._keepers: dict[str, int] = {}
        self._count = 0
        self._ended = asyncio.Event()

    @classmethod
    def importing(cls) -> ForkServer | None:
        """Return one that imports already, for an engine that is not there yet; None where workers are not forked."""
        if sys.platform != "linux":
            return None
        forks = cls()
        with contextlib.suppress(OSError):  # the first worker will say so
            forks.prepare()
        return forks

    @property
    def pid(self) -> int | None:
        """Its process, while there is one."""
        return self._process.pid if self._process is not None else None

    def prepare(self) -> None:
        """Start the process, where there is none, or one without workers whose environment is not today's.

        Raises OSError.
        """
        environment = {**worker_environment(), **_NO_THREADS}
        if self._process is not None and (self._workers or environment == self._environment):
            return
        self._kill()
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        output = NativeOutput(_log_line)
        try:
            with theirs, block_stop_signals():
                process = subprocess.Popen(
                    [
                        *python_command("-m", "engine.worker_process", "--forks"),
                        *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output.child_fd,
                    stderr=output.child_fd,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                    env={**worker_environment(), **_NO_THREADS},
                )
        except OSError:
            ours.close()
            output.finish()
            raise
        finally:
            output.started()
        self._process, self._control = process, ours
        self._environment = environment
        self._keepers.clear()
        workers: dict[int, _Forked] = {}
        self._workers = workers
        self._ended = asyncio.Event()
        loop.add_reader(ours, self._read)

        def reaped(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits for it
                loop.call_soon_threadsafe(self._on_ended, process, output, workers, code)

        reap(process, reaped)

    def fork(
        self,
        sock: socket.socket,
        output_fd: int,
        *,
        on_pid: Callable[[int], None],
        on_exit: Callable[[int, str], None],
    ) -> Callable[[], None]:
        """Start a worker on its end of the channel; return what kills it, and what it started. Raises OSError.

        on_pid: called with its process id.  on_exit: called once, after that, with its exit code, negative for the
        signal that ended it, and the reason if it was lost with this server.
        """
        self.prepare()
        self._count += 1
        number = self._count
        self._send(f"fork {number}", sock.fileno(), output_fd)
        self._workers[number] = _Forked(on_pid, on_exit)
        return partial(self._kill_worker, number)

    def keep_memory(self, name: str, pid: int) -> None:
        """Keep the RAM files of a worker, in place of those of the name's earlier one, until `release_memory`."""
        self._count += 1
        with contextlib.suppress(OSError):  # they end with the worker then
            self._send(f"keep {self._count} {pid}")
            self.release_memory(name)
            self._keepers[name] = self._count

    def release_memory(self, name: str) -> None:
        """Let go of what is kept under a name. Idempotent."""
        if (number := self._keepers.pop(name, None)) is not None:
            with contextlib.suppress(OSError):
                self._send(f"release {number}")

    async def close(self) -> None:
        """End the process, and with it the workers that are left. Idempotent."""
        ended = self._ended
        if self._kill():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await ended.wait()

    def _kill_worker(self, number: int) -> None:
        if (worker := self._workers.get(number)) is None:
            return
        worker.is_killed = True
        if not worker.exists and all(each.is_killed for each in self._workers.values()):
            self._kill()  # it hangs, in an import perhaps
            return
        with contextlib.suppress(OSError):
            self._send(f"kill {number}")
        if not worker.exists:
            self._workers.pop(number).on_exit(-signal.SIGKILL, "")

    def _kill(self) -> bool:
        """Kill the process; return whether there was one. Its workers die with it."""
        process, self._process = self._process, None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if process is not None:
            process.kill()
        return process is not None

    def _send(self, message: str, *descriptors: int) -> None:
        if self._control is None:
            raise OSError("the process that forks workers has ended")
        socket.send_fds(self._control, [message.encode()], descriptors)

    def _read(self) -> None:
        """Take the messages of the process. Its end is seen by `reap`."""
        while self._control is not None:
            try:
                message = self._control.recv(_MESSAGE_BYTES).decode()
            except BlockingIOError:
                return
            except OSError:
                message = ""
            if not message:
                asyncio.get_running_loop().remove_reader(self._control)
                return
            kind, number, value = message.split()
            if kind == "forked" and (worker := self._workers.get(int(number))) is not None:
                worker.exists = True
                worker.on_pid(int(value))
            elif kind == "ended" and (worker := self._workers.pop(int(number), None)) is not None:
                worker.on_exit(int(value), "")

    def _on_ended(
        self, process: subprocess.Popen[bytes], output: NativeOutput, workers: dict[int, _Forked], code: int
    ) -> None:
        """A process ended, and its workers with it."""
        if process is self._process:
            self._read()
            self._kill()
        output.finish()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        lines = output.tail.strip().splitlines()
        reason = f"the process that forks workers {how}" + (f": {lines[-1]}" if lines else "")
        for number in list(workers):
            workers.pop(number).on_exit(-signal.SIGKILL, reason)
        if workers is self._workers:
            self._ended.set()


def _log_line(line: LogLine) -> None:
    _log.log(line.level, "%s", line.message, extra={"source": "workers"})


# The process.


def preload(module: str | None) -> None:
    """Import the module that makes backends, or the torch backend. Where that fails, each worker tries again, and says
    why."""
    gc.disable()  # looks at what modules are made of are an eighth of an import
    with contextlib.suppress(Exception):
        importlib.import_module(module or _PRELOADED)
    gc.enable()
    gc.collect()
    gc.freeze()  # else a collection in a worker would copy the pages of all objects


def fork_workers(control: socket.socket) -> socket.socket | None:
    """Fork a worker for each order until the engine closes its end; None then. In each worker, return its channel.

    Where an import has left a thread, which would not survive a fork, each worker is a new interpreter.
    """
    server_pid, is_alone = os.getpid(), len(list(Path("/proc/self/task").iterdir())) == 1
    if not is_alone:
        sys.stderr.write("each worker imports everything itself, as an import has left a thread\n")
    ended, wake = os.pipe()
    for each in (ended, wake):
        os.set_blocking(each, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    workers: dict[str, int] = {}
    while True:
        readable = select.select([control.fileno(), ended], [], [])[0]
        if ended in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, _MESSAGE_BYTES)
            _report_ended(workers, control)
        if control.fileno() not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
        if not message:
            return None
        order, number, *worker = message.decode().split()
        if order == "keep":
            if int(worker[0]) in workers.values():  # else it has ended, and its number may be another's
                with contextlib.suppress(OSError):
                    workers[number] = _fork_keeper(int(worker[0]))
            continue
        if order in ("kill", "release"):
            if number in workers:
                os.killpg(workers[number], signal.SIGKILL)
                if order == "release":  # the next worker finds none of its files, and their memory is free
                    os.waitpid(workers.pop(number), 0)
            continue
        channel, output = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            os.write(output, f"fork: {error.strerror}\n".encode())
            control.send(f"ended {number} 1".encode())
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                control.close()
                for each in (ended, wake, output):
                    os.close(each)
                os.set_inheritable(channel, not is_alone)
                if not is_alone:
                    options = ("--fd", str(channel), "--parent", str(server_pid))
                    command = python_command("-m", "engine.worker_process", *options)
                    os.execv(command[0], command)
                return socket.socket(fileno=channel)
            with contextlib.suppress(OSError):  # it has done so itself, and may be gone
                os.setpgid(pid, pid)
            workers[number] = pid
            control.send(f"forked {number} {pid}".encode())
        os.close(channel)
        os.close(output)


def _fork_keeper(pid: int) -> int:
    """Fork a process that holds the RAM files of a worker, if it has any, open until it is killed; return its id.

    Raises OSError.
    """
    server_pid = os.getpid()
    keeper = os.fork()
    if keeper:
        with contextlib.suppress(OSError):
            os.setpgid(keeper, keeper)
        return keeper
    try:
        os.setpgid(0, 0)
        name_process("ericllm-keeper")
        if die_with_parent(server_pid):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            files: list[int] = []
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()).startswith(_RAM_FILES):
                        files.append(os.open(descriptor, os.O_RDONLY | os.O_CLOEXEC))
            while files:
                signal.pause()
    finally:
        os._exit(1)


def _report_ended(workers: dict[str, int], control: socket.socket) -> None:
    """Reap the workers that have ended, and send their exit codes, negative for a signal."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            for number in [number for number, pid in workers.items() if pid == found[0]]:
                del workers[number]
                control.send(f"ended {number} {os.waitstatus_to_exitcode(found[1])}".encode())
