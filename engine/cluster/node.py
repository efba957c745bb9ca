"""The Ray actors of a node. Plain classes: they import no Ray, and neither do the workers that they start."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from engine import config, errors, snapshot
from engine.backends import base
from engine.backends.base import LoadProgress
from engine.cluster import messages
from engine.cluster.messages import ModelPlace, Started
from engine.cluster.models import fetch, lacks, path_on_node, require
from engine.cluster.names import visible_gpus
from engine.cluster.wire import Listener
from engine.devices import DeviceProbe, computable, new_probe, usable_cores
from engine.errors import EngineError
from engine.snapshot import DeviceReading
from engine.worker_process import protocol
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.loading import ProgressThrottle
from engine.worker_process.logs import NativeOutput
from engine.worker_process.process import reap, signal_name, spawn
from engine.worker_process.protocol import Codec, Event, Hello, LoadFailed, LogLine, Progress

# What must be the same on every node: the package's version, and the messages it speaks.


def own_version() -> str:
    """For instance "0.1.0 (messages 3f2a91c0), Python 3.11": equal on machines that understand each other."""
    digest = hashlib.blake2b(digest_size=4)
    for module in (base, config, errors, messages, protocol, snapshot):
        digest.update(Path(str(module.__file__)).read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{_package_version()} (messages {digest.hexdigest()}), Python {python}"


def _package_version() -> str:
    try:
        return metadata.version("ericllm")
    except metadata.PackageNotFoundError:
        return "not installed"


ENGINE_PATIENCE_S = 30.0
_MAX_LINES = 10_000

_log = logging.getLogger(__name__)


class NodeAgent:
    """Says what devices its node has. One per node, using nothing of what Ray hands out."""

    def __init__(self, gib: Sequence[float]) -> None:
        self._gib = tuple(gib)
        self._probe: DeviceProbe | None = None

    def about(self) -> tuple[str, int]:
        """The version that is installed here, and the cores that may be used."""
        return own_version(), usable_cores()

    def read(self, pids: Collection[int]) -> tuple[DeviceReading, ...]:
        """The node's devices that can be computed on, now; `pids` are the engine's processes there."""
        if self._probe is None:
            self._probe = new_probe(self._gib)
        return tuple(computable(self._probe.read(pids)))


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a worker since the last call, and how it ended, if it has."""

    lines: tuple[str, ...] = ()
    exit: WorkerExit | None = None


class WorkerActor:
    """Starts one worker process, whose channel is a connection from the engine, and is there for as long as it runs.

    The worker dies with this process on Linux, and everywhere when its channel closes. gpus: those that it may see, by
    their ids on the node.  node: what the engine calls it.
    """

    def __init__(self, worker_id: str, *, node: str, token: bytes, gpus: Sequence[str], model: ModelPlace) -> None:
        self._worker_id = worker_id
        self._node = node
        self._token = token
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = threading.Event()
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._exit: WorkerExit | None = None
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)

    def open(self, address: str) -> Started:
        """Wait for the engine on `address` in the background."""
        listener = Listener(address, self._token)
        threading.Thread(target=self._run, args=(listener,), name="worker", daemon=True).start()
        path = str(path_on_node(self._model))
        return Started(address=address, port=listener.port, path=path, pid=os.getpid())

    def output(self) -> Output:
        """Wait for output, or the worker's end, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._exit is not None)
            lines = tuple(self._lines)
            self._lines.clear()
            return Output(lines=lines, exit=self._exit)

    def kill(self) -> None:
        """Kill the worker, or stop it from starting."""
        self._cancelled.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # -- the worker's thread, which the kernel takes for its parent: it lives as long as the worker does ----------

    def _run(self, listener: Listener) -> None:
        try:
            exit_ = asyncio.run(self._serve(listener))
        except Exception as error:  # whatever it is, the engine must hear of the end
            _log.exception("worker %s could not be run", self._worker_id)
            exit_ = WorkerExit(code=1, log_tail=str(error))
        with self._changed:
            self._exit = exit_
            self._changed.notify_all()

    async def _serve(self, listener: Listener) -> WorkerExit:
        sock = await asyncio.to_thread(listener.accept, ENGINE_PATIENCE_S)
        try:
            await asyncio.to_thread(self._provide_model, sock)
        except EngineError as error:
            _send(sock, LoadFailed(error=error.info))
            sock.close()
            return WorkerExit(code=1, log_tail=error.message)
        return await self._run_process(sock)

    def _provide_model(self, sock: socket.socket) -> None:
        """Have the model on this node, reporting a download as part of the load. Raises EngineError."""
        if lacks(self._model):
            _send(sock, Hello(pid=os.getpid()))

            def report(progress: LoadProgress) -> None:
                _send(sock, Progress(progress=progress))

            fetch(self._model, report=ProgressThrottle(report).report, cancelled=self._cancelled.is_set)
        require(self._model, self._node)

    async def _run_process(self, sock: socket.socket) -> WorkerExit:
        """Start the worker on its channel, hand on what it writes, and wait for its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        output = NativeOutput(self._say)
        try:
            self._process = spawn(self._worker_id, sock, output.child_fd)
        finally:
            output.started()
            sock.close()

        def reaped(code: int) -> None:
            loop.call_soon_threadsafe(ended.set_result, code)

        reap(self._process, reaped)
        if self._cancelled.is_set():
            self.kill()
        code = await ended
        output.finish()
        how = WorkerExit(code=code) if code >= 0 else WorkerExit(signal=signal_name(-code))
        return msgspec.structs.replace(how, log_tail=output.tail)

    def _say(self, line: LogLine) -> None:
        with self._changed:
            self._lines.append(line.message)
            self._changed.notify_all()


def _send(sock: socket.socket, event: Event) -> None:
    """Send an event before the worker itself can; an engine that is gone misses nothing."""
    with contextlib.suppress(OSError):
        sock.sendall(Codec().frame(event))
