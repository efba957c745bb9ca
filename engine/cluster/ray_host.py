"""RayHost: a worker on a node of the cluster, with the face of a worker in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from engine.cluster import messages
from engine.cluster.models import place_of
from engine.cluster.names import Translation, gpu_share, is_gpu, translation
from engine.cluster.wire import dial, new_token
from engine.config import AdapterSpec, ModelSpec
from engine.errors import NodeGone
from engine.worker_process.hosts import KILL_PATIENCE_S, ChannelHost, WorkerExit
from engine.worker_process.protocol import Attach, Command, Event, Hello, Load, Loaded, LogLine, SetThreads, Shutdown

DIAL_S = 10.0
LOST_PATIENCE_S = 2.0
_LOOK_S = 0.25


class ClusterWorkers(Protocol):
    """The cluster as a host uses it. starting: threads that wait for workers to start."""

    starting: ThreadPoolExecutor

    def start_worker(self, host: RayHost, model: messages.ModelPlace, token: bytes) -> messages.Started:
        """Start its actor, and set its node_id; it hears of the actor from now on. Blocks.

        Raises WorkerFailed and its children.
        """

    def kill_worker(self, key: str) -> None:
        """Kill the worker."""

    def forget_worker(self, key: str) -> None:
        """It has ended: give back what was reserved."""

    def lives(self, node_id: str) -> bool:
        """Return whether the node was there at the last look."""

    def threads(self, node_id: str) -> int:
        """CPU threads for each worker of a node."""


class RayHost(ChannelHost):
    """Runs one worker as an actor of Ray on one node. Used on the engine's loop alone.

    node: what the node is called.  key: what this start of the worker is called; unique.
    """

    def __init__(self, worker_id: str, spec: ModelSpec, cluster: ClusterWorkers) -> None:
        super().__init__(worker_id)
        self.key = f"{worker_id}-{secrets.token_hex(4)}"
        self.spec = spec
        self.names = translation([share.device for share in spec.shares] or [spec.device])
        self.node = self.names.node
        self.node_id = ""
        self._cluster = cluster
        self._path = str(spec.path)
        self._own_threads = spec.threads
        self._greeted = False
        self._started = False

    @property
    def node_name(self) -> str:
        """Name of the node for people."""
        return self.node or "this machine"

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the actor and connect; the first event is Hello, or LoadFailed where the node lacks the model.

        Raises NodeGone, NodeFull, WorkerFailed or ModelLoadFailed.
        """

        def over(exit_: WorkerExit) -> None:
            self._cluster.forget_worker(self.key)
            on_exit(exit_)

        self._listen(on_event, over)
        self._loop = asyncio.get_running_loop()
        token = new_token()
        threads = self._cluster.starting
        model = await self._loop.run_in_executor(threads, place_of, self.spec)
        started = await self._loop.run_in_executor(threads, self._cluster.start_worker, self, model, token)
        self._started, self.pid, self._path = True, started.pid, started.path
        try:
            sock = await self._loop.run_in_executor(threads, dial, started.address, started.port, token, DIAL_S)
        except OSError as error:
            self._cluster.forget_worker(self.key)
            raise NodeGone(
                f"worker {self.worker_id} on {self.node_name} cannot be reached at {started.address}:{started.port} "
                f"({error}); a firewall may be in the way",
                worker=self.worker_id,
                node=self.node,
            ) from error
        await self._connect(sock)

    def send(self, command: Command) -> None:
        """Queue a command, its devices and folders in the node's names; no folder is looked for where Ray works."""
        match command:
            case Load(spec=spec):
                local = msgspec.structs.replace(
                    self.names.to_worker(spec),
                    path=Path(self._path),
                    lora=spec.lora and spec.lora.absolute(),
                    draft_model=spec.draft_model and spec.draft_model.absolute(),
                )
                command = msgspec.structs.replace(
                    command,
                    spec=local,
                    threads=self._threads(command.threads),
                    adapters=tuple(map(_absolute, command.adapters)),
                )
            case Attach(adapter=adapter):
                command = Attach(adapter=_absolute(adapter))
            case SetThreads(threads=threads):
                command = SetThreads(threads=self._threads(threads))
        super().send(command)

    async def stop(self, timeout_s: float) -> None:
        """Shutdown and wait, then SIGKILL; a worker out of reach is given up. Idempotent."""
        if not self._started:
            return
        self.send(Shutdown())
        if await self._exited_within(timeout_s):
            return
        self.kill()
        if not await self._exited_within(KILL_PATIENCE_S):
            self._give_up("it did not answer")
            await self._exit_reported.wait()

    def kill(self) -> None:
        """SIGKILL; on_exit follows."""
        if self._started:
            self._cluster.kill_worker(self.key)

    # -- what is heard, on the engine's loop --------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Have one of those below called on the engine's loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits for it
            self._loop.call_soon_threadsafe(callback, *arguments)

    def log_lines(self, lines: tuple[str, ...]) -> None:
        """Native output of the worker."""
        for line in lines:
            self._deliver(LogLine(level=logging.INFO, logger="native", message=line))

    def over(self, ended: messages.Ended) -> None:
        """The worker ended, or the actor that ran it."""
        if ended.reason:
            self._give_up(ended.reason)
            return
        self._set_exit(WorkerExit(code=ended.code, signal=ended.signal, log_tail=ended.log_tail))
        self._loop.call_later(LOST_PATIENCE_S, self._abort)  # its last events are on the way, if it has a connection

    def node_gone(self) -> None:
        """The node has left the cluster."""
        self._give_up(f"{self.node_name} has left the cluster")

    def _deliver(self, event: Event) -> None:
        match event:
            case Hello(pid=pid):
                self.pid = pid
                if self._greeted:  # the actor greeted before it, while it fetched the model
                    return
                self._greeted = True
            case Loaded(model=model):
                event = msgspec.structs.replace(event, model=self.names.from_worker(model))
        super()._deliver(event)

    def _on_channel_closed(self) -> None:
        super()._on_channel_closed()
        if not self._exit_reported.is_set():
            self._loop.call_later(_LOOK_S, self._await_reason, self._loop.time() + KILL_PATIENCE_S)

    def _await_reason(self, deadline: float) -> None:
        """The connection has ended: it is leaving, which takes a moment, or it went with its node."""
        if self._exit_reported.is_set():
            return
        if not self._cluster.lives(self.node_id):
            self.node_gone()
        elif self._loop.time() > deadline:
            self.kill()
            self._give_up(f"the connection to {self.node_name} was lost")
        else:
            self._loop.call_later(_LOOK_S, self._await_reason, deadline)

    def _give_up(self, reason: str) -> None:
        """Nothing more will be heard of it."""
        self._set_exit(WorkerExit(reason=reason))
        self._abort()

    def _abort(self) -> None:
        if self._channel is not None and not self._channel_closed:
            self._channel.abort()
        elif self._channel is None:
            super()._on_channel_closed()

    def _threads(self, asked: int) -> int:
        return self._own_threads or self._cluster.threads(self.node_id) or asked


def gpus_of(spec: ModelSpec, names: Translation, totals: dict[str, int]) -> dict[str, float]:
    """The share of each GPU that `spec` takes, by its id within the node. totals: bytes of each device by its name."""
    needed = {device: 0 for device, local in names.local.items() if is_gpu(local)}
    for share in spec.shares:
        if share.device in needed:
            needed[share.device] += share.total_bytes
    return {names.local[device]: gpu_share(size, totals.get(device, 0)) for device, size in needed.items()}


def _absolute(adapter: AdapterSpec) -> AdapterSpec:
    return msgspec.structs.replace(adapter, path=adapter.path.absolute())
