"""ForkServer: a process that has imported what workers import, and forks one when the engine asks for it.

So a worker that takes another's place, or that of a model that was asleep, imports nothing, and the pages of what was
imported are in memory once. Nothing but imports may happen before a fork: no thread, no OpenMP region and no device
context survives one.

It also forks keepers: processes that hold a worker's RAM files (weights and KV pages) open, so that the worker which
takes its place finds them. Where memory runs out, the kernel ends a keeper before anything else, which costs nothing
but that.

All that it forks are children of the engine (CLONE_PARENT), which reaps them: the process itself can die, or be killed
where it does not answer, and costs no more than the imports of the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from engine.devices.cpu_and_ram import memory_file_bytes
from engine.system.child_process import block_stop_signals, die_with_parent, name_process, python_command
from engine.worker_process.logs import NativeOutput
from engine.worker_process.process import reap, signal_name, worker_environment
from engine.worker_process.protocol import LogLine

_MESSAGE_BYTES = 256
_PRELOADED = "engine.backends.torch.backend"
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts its threads when it is imported."""
_RAM_FILES = "/memfd:ericllm-"
_ANSWER_S = 5.0
"""A process that takes longer to fork stands still."""
_MAX_ATTEMPTS = 2
_CLOSE_S = 5.0

_log = logging.getLogger("engine")


# The engine's end.


@dataclass(slots=True, eq=False)
class _Process:
    """One that forks. is_ready: its imports are done.  is_closed: nothing more is heard of it or of what it forks.
    code: how it ended.  problem: why it was killed."""

    popen: subprocess.Popen[bytes]
    control: socket.socket
    output: NativeOutput
    environment: Mapping[str, str]
    is_ready: bool = False
    is_closed: bool = False
    code: int | None = None
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Child:
    """A worker or a keeper, from its order ("fork" or "keep") to its end. descriptors: for it, ours until it exists.
    on_exit: takes its exit code, -9 for SIGKILL, and "" or why there never was a process.
    sent_to: who has the order; attempts: how many had it.  pid: once it exists.  is_killed: its end was ordered."""

    order: str
    descriptors: Sequence[int]
    on_pid: Callable[[int], None]
    on_exit: Callable[[int, str], None]
    sent_to: _Process | None = None
    attempts: int = 0
    pid: int | None = None
    is_killed: bool = False


def can_fork() -> bool:
    """Return whether this system has what a ForkServer needs: Linux, with CONFIG_CHECKPOINT_RESTORE as distributions
    build it."""
    return sys.platform == "linux" and platform.machine() in _CLONE and bool(_tid_address())


class ForkServer:
    """Starts workers by having them forked, by a process that is started with the first one, or by `prepare`.

    An order that is not answered goes to another process, once. Lives on one asyncio loop, whose thread must outlive
    it: the kernel kills all its processes when the thread that started the first one ends. Where `can_fork` alone.
    """

    def __init__(self) -> None:
        self._current: _Process | None = None
        self._processes: set[_Process] = set()
        self._children: dict[int, _Child] = {}
        self._keepers: dict[str, int] = {}
        self._count = 0
        self._changed = asyncio.Event()

    @classmethod
    def importing(cls) -> ForkServer | None:
        """Return one that imports already, for an engine that is not there yet; None where workers are not forked."""
        if not can_fork():
            return None
        forks = cls()
        with contextlib.suppress(OSError):  # the first worker will say so
            forks.prepare()
        return forks

    @property
    def pid(self) -> int | None:
        """The process that forks, while there is one."""
        return self._current.popen.pid if self._current is not None else None

    @property
    def pids(self) -> set[int]:
        """The processes that run besides workers, with what they keep in memory."""
        keepers = {child.pid for child in self._children.values() if child.order == "keep" and child.pid is not None}
        return keepers if self.pid is None else {self.pid, *keepers}

    def prepare(self) -> None:
        """Start the process, where there is none, or one with nothing to do whose environment is not today's.

        Raises OSError.
        """
        environment = {**worker_environment(), **_NO_THREADS}
        if self._current is not None:
            if environment == self._current.environment or self._waiting_for(self._current):
                return
            self._end(self._current)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        output = NativeOutput(_log_line)
        try:
            with theirs, block_stop_signals():
                popen = subprocess.Popen(
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
        process = _Process(popen, ours, output, environment)
        self._current = process
        self._processes.add(process)
        loop.add_reader(ours, self._read, process)

        def reaped(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits for it
                loop.call_soon_threadsafe(self._on_ended, process, code)

        reap(popen, reaped)

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
        signal that ended it, and the reason if it could not be forked.
        """
        self.prepare()
        return partial(self._kill, self._order("fork", (sock.fileno(), output_fd), on_pid, on_exit))

    def keep_memory(self, name: str, pid: int) -> None:
        """Keep the RAM files of a worker, in place of those of the name's earlier one, until `release_memory`."""
        if not any(child.pid == pid and child.order == "fork" for child in self._children.values()):
            return  # it has ended, and its number may be another's
        with contextlib.suppress(OSError):  # they end with the worker then
            self.prepare()
            files = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                number = self._order("keep", (files,), lambda pid: None, lambda code, reason: None)
            finally:
                os.close(files)
            self.release_memory(name)
            self._keepers[name] = number

    def release_memory(self, name: str) -> None:
        """Let go of what is kept under a name, before any worker starts that is asked for later. Idempotent."""
        if (number := self._keepers.pop(name, None)) is not None:
            self._kill(number)

    def kept_bytes(self, name: str) -> int:
        """Return the bytes of RAM that are kept under a name."""
        keeper = self._children.get(self._keepers.get(name, 0))
        return 0 if keeper is None or keeper.pid is None else memory_file_bytes(keeper.pid)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for number in list(self._children):
            self._kill(number)
        if self._current is not None:
            self._end(self._current)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._children or self._processes:
                    self._changed.clear()
                    await self._changed.wait()

    # -- orders -------------------------------------------------------------------------------------------------

    def _order(
        self,
        order: str,
        descriptors: Sequence[int],
        on_pid: Callable[[int], None],
        on_exit: Callable[[int, str], None],
    ) -> int:
        self._count += 1
        self._children[self._count] = _Child(order, tuple(map(os.dup, descriptors)), on_pid, on_exit)
        number = self._count
        self._send_orders()
        return number

    def _send_orders(self) -> None:
        """Send what is not sent. Workers wait for the end of keepers that let go: they must find none of those files,
        and their memory free."""
        waits = any(child.is_killed for child in self._children.values() if child.order == "keep")
        for number in list(self._children):
            child = self._children.get(number)  # else it was killed by who waits for one before it
            if child is None or child.pid is not None or child.sent_to is not None:
                continue
            if waits and child.order == "fork":
                continue
            try:
                self.prepare()
            except OSError as error:
                self._forget(number, -signal.SIGKILL, f"the process that forks workers does not start: {error}")
                continue
            assert self._current is not None
            child.sent_to, child.attempts = self._current, child.attempts + 1
            with contextlib.suppress(OSError):  # it has ended, or reads nothing: `_read` or `_check_answer` sees that
                message = f"{child.order} {number}".encode()
                socket.send_fds(self._current.control, [message], child.descriptors)
            if self._current.is_ready:
                self._expect_answer(self._current, number)

    def _expect_answer(self, process: _Process, number: int) -> None:
        asyncio.get_running_loop().call_later(_ANSWER_S, self._check_answer, process, number)

    def _check_answer(self, process: _Process, number: int) -> None:
        """End a process that has not answered. Its orders go to another one."""
        self._read(process)  # this loop may have stood still
        if number in self._waiting_for(process) and not process.problem:
            process.problem = "does not answer"
            _log.warning("the process that forks workers does not answer; it is replaced", extra={"source": "workers"})
            self._end(process)

    def _waiting_for(self, process: _Process) -> list[int]:
        """The numbers of what it was to fork and did not, as far as is known."""
        return [number for number, child in self._children.items() if child.sent_to is process and child.pid is None]

    def _kill(self, number: int) -> None:
        """Kill a child, and what it started, or see to it that there will be none."""
        if (child := self._children.get(number)) is None:
            return
        if child.pid is not None:
            child.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        elif not child.is_killed:
            child.is_killed = True
            report, child.on_exit = child.on_exit, lambda code, reason: None
            process = child.sent_to or self._current
            if child.sent_to is None:
                self._forget(number, -signal.SIGKILL, "")
            if process is not None and child.order == "fork" and self._hangs(process):
                self._end(process)
            report(-signal.SIGKILL, "")

    def _hangs(self, process: _Process) -> bool:
        """Return whether a process has orders, in an import perhaps, and no worker is to come of them any more."""
        waiting = [self._children[each] for each in self._waiting_for(process)]
        return bool(waiting) and all(each.is_killed or each.order == "keep" for each in waiting)

    def _end(self, process: _Process) -> None:
        """Kill a process that forks. Nothing is sent to it any more, and what it said before is read yet."""
        if process is self._current:
            self._current = None
        process.popen.kill()

    # -- reports ------------------------------------------------------------------------------------------------

    def _read(self, process: _Process) -> None:
        """Take the messages of a process and of what it forked. They all have its socket until they have reported, so
        there is nothing that it forked and that we do not know once that is closed."""
        while not process.is_closed:
            try:
                message = process.control.recv(_MESSAGE_BYTES).decode()
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has left orders unread; what it said is still to be read
            except OSError:
                message = ""
            kind, *values = message.split() or ("closed",)
            if kind == "ready":
                process.is_ready = True
                for number in self._waiting_for(process):
                    self._expect_answer(process, number)
            elif kind == "forked":
                self._on_forked(int(values[0]), int(values[1]))
            elif kind == "failed":
                self._forget(int(values[0]), 1, f"it could not be forked: {os.strerror(int(values[1]))}")
            else:
                process.is_closed = True
                asyncio.get_running_loop().remove_reader(process.control)
                process.control.close()
                self._end(process)
                self._replace(process)

    def _on_forked(self, number: int, pid: int) -> None:
        loop, child = asyncio.get_running_loop(), self._children[number]
        child.pid = pid
        self._close_descriptors(child)

        def wait() -> None:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number stays its own until `_on_exited`
            try:
                loop.call_soon_threadsafe(self._on_exited, number, pid)
            except RuntimeError:  # the loop is closed
                os.waitpid(pid, 0)

        threading.Thread(target=wait, name=f"reap-{pid}", daemon=True).start()
        if child.is_killed:
            self._kill(number)
        else:
            child.on_pid(pid)

    def _on_exited(self, number: int, pid: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for name in [name for name, keeper in self._keepers.items() if keeper == number]:
            del self._keepers[name]
        self._forget(number, code, "")
        self._send_orders()

    def _on_ended(self, process: _Process, code: int) -> None:
        process.code = code
        if process is self._current:
            self._current = None
        self._replace(process)

    def _replace(self, process: _Process) -> None:
        """Once a process has ended and nothing more is heard of it, give its orders to another one."""
        if process.code is None or not process.is_closed:
            return
        self._processes.discard(process)
        process.output.finish()
        code, lines = process.code, process.output.tail.strip().splitlines()
        how = process.problem or (f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}")
        reason = f"the process that forks workers {how}" + (f": {lines[-1]}" if lines else "")
        waiting = self._waiting_for(process)
        for number in waiting:
            self._children[number].sent_to = None
        for number in waiting:
            child = self._children.get(number)
            if child is not None and (child.is_killed or child.attempts >= _MAX_ATTEMPTS):
                self._forget(number, -signal.SIGKILL, reason)
        self._send_orders()
        self._changed.set()

    def _forget(self, number: int, code: int, reason: str) -> None:
        child = self._children.pop(number)
        self._close_descriptors(child)
        self._changed.set()
        child.on_exit(code, reason)

    def _close_descriptors(self, child: _Child) -> None:
        for each in child.descriptors:
            os.close(each)
        child.descriptors = ()


def _log_line(line: LogLine) -> None:
    _log.log(line.level, "%s", line.message, extra={"source": "workers"})


# The process.

_CLONE = {"x86_64": 56, "aarch64": 220}
"""Number of the system call, by machine."""
_CLONE_FLAGS = 0x00008000 | 0x01000000 | 0x00200000 | 17
"""CLONE_PARENT, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID; SIGCHLD is sent at the end."""
_PR_GET_TID_ADDRESS = 40


def preload(module: str | None) -> bool:
    """Import the module that makes backends, or the torch backend. Where that fails, each worker tries again, and says
    why. Return whether this process can be forked: an import may have left a thread, which would not survive that."""
    gc.disable()  # looks at what modules are made of are an eighth of an import
    with contextlib.suppress(Exception):
        importlib.import_module(module or _PRELOADED)
    gc.enable()
    gc.collect()
    gc.freeze()  # else a collection in a worker would copy the pages of all objects
    return _is_alone()


def _is_alone() -> bool:
    """Return whether this process has one thread."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def start_again_bare(control: socket.socket) -> NoReturn:
    """Run this process's program again in its place, without imports: each worker then imports everything itself."""
    sys.stderr.write("each worker imports everything itself, as an import has left a thread\n")
    control.set_inheritable(True)
    command = python_command("-m", "engine.worker_process", *sys.argv[1:], "--bare")
    os.execv(command[0], command)


def fork_workers(control: socket.socket, engine_pid: int) -> socket.socket | None:
    """Fork a worker or a keeper for each order until the engine closes its end; None then. In each worker, return its
    channel. Where this interpreter has started a thread by itself, each worker runs another interpreter."""
    alone = _is_alone()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
        if not message:
            return None
        order, number = message.decode().split()
        try:
            is_child = _fork_sibling() == 0
        except OSError as error:
            control.send(f"failed {number} {error.errno}".encode())
            is_child = False
        if is_child:
            os.setpgid(0, 0)
            if not die_with_parent(engine_pid):
                os._exit(1)
            control.send(f"forked {number} {os.getpid()}".encode())
            control.close()
            if order == "keep":
                _hold_ram_files(descriptors[0])
            channel, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.set_inheritable(channel, not alone)
            if not alone:
                command = python_command(
                    "-m", "engine.worker_process", "--fd", str(channel), "--parent", str(engine_pid)
                )
                os.execv(command[0], command)
            return socket.socket(fileno=channel)
        for each in descriptors:
            os.close(each)


def _fork_sibling() -> int:
    """Fork as os.fork does, but a child of our parent; return its id, 0 in the child. Raises OSError.

    For a process of one thread alone: what libraries have registered with pthread_atfork is not called.
    """
    library, address = ctypes.PyDLL(None, use_errno=True), _tid_address()  # which releases no lock of the interpreter
    library.syscall.restype = ctypes.c_long
    arguments = (_CLONE[platform.machine()], _CLONE_FLAGS, 0, 0, address, address)  # the fourth or the fifth is read
    library.PyOS_BeforeFork()
    pid = int(library.syscall(*map(ctypes.c_long, arguments)))
    error = ctypes.get_errno()
    if pid == 0:
        library.PyOS_AfterFork_Child()
    else:
        library.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def _tid_address() -> int:
    """Return where C's library has the id of this thread, which a fork has to change; 0 where that is not known."""
    address = ctypes.c_void_p()
    ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address.value or 0


def _hold_ram_files(folder: int) -> NoReturn:
    """Hold the RAM files of a worker, if it has any, open until the end. folder: a descriptor of that of its files."""
    try:
        name_process("ericllm-keeper")
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        files: list[int] = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(name, dir_fd=folder).startswith(_RAM_FILES):
                    files.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder))
        os.close(folder)
        while files:
            signal.pause()
    finally:
        os._exit(1)
