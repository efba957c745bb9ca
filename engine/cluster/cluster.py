"""Cluster: the nodes as the engine knows them, and the workers on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from engine.cluster import messages
from engine.cluster.client import DriverClient
from engine.cluster.models import place_of
from engine.cluster.names import join_device, name_nodes, translation
from engine.cluster.wire import dial, new_token
from engine.config import AdapterSpec, ModelSpec
from engine.devices import DeviceProbe, new_probe
from engine.errors import ClusterUnavailable, EngineError, InvalidRequest, NodeGone, WorkerFailed
from engine.snapshot import DeviceReading
from engine.worker_process.hosts import KILL_PATIENCE_S, ChannelHost, WorkerExit
from engine.worker_process.protocol import Attach, Command, Event, Hello, Load, Loaded, LogLine, SetThreads, Shutdown

MAX_WORKERS = 64
JOIN_S = 90.0
START_S = 90.0
LOOK_S = 10.0
REJOIN_PATIENCE_S = 60.0
DIAL_S = 10.0
LOST_PATIENCE_S = 2.0
_WATCH_S = 0.25
_REJOIN_S = 3.0
_LOOK_AGAIN_S = 0.25
_CLIENT = re.compile(r"ray://[^\s/:]+:\d{1,5}|ray://\[[0-9a-fA-F:]+\]:\d{1,5}")

_log = logging.getLogger("engine")


def check_address(address: str) -> str:
    """`address`, if it may be a cluster's. Raises InvalidRequest."""
    if address == "auto" or _CLIENT.fullmatch(address):
        return address
    raise InvalidRequest(
        f"cluster is {address!r}; it must be local, auto or ray://HOST:PORT", param="cluster", value=address
    )


class Cluster:
    """A Ray cluster that was joined. May be used from any thread; what blocks says so.

    "auto": the cluster at RAY_ADDRESS, which must answer; else the one that runs on this machine; else one is started
    on this machine, which ends with the engine. This machine is a node then, and its devices go by their plain names.
    "ray://HOST:PORT": through the Ray Client server of a cluster's head. This machine is no node of it and computes
    nothing; it must be able to reach every node.
    gib: simulated devices that every node has in place of its own.
    """

    def __init__(self, address: str, gib: Sequence[float] = ()) -> None:
        """Join it. Blocks for seconds: call it off the loop. Raises ClusterUnavailable, InvalidRequest."""
        self._address = check_address(address)
        self._gib = tuple(gib)
        self._lock = threading.Lock()
        self._nodes: dict[str, messages.NodeView] = {}
        self._names: dict[str, str] = {}
        self._awaits = False
        self._looking = threading.Lock()  # an older view must not follow a newer one
        self._hosts: dict[str, RayHost] = {}
        self._closed = threading.Event()
        self._joined = threading.Event()
        self.starting = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="cluster-start")
        self._driver: DriverClient
        self._join()

    # -- what the engine asks for -------------------------------------------------------------------------------

    def new_host(self, worker_id: str, spec: ModelSpec) -> RayHost:
        """A host for a worker where placement put it: on the devices of spec.shares, else on spec.device.

        It fails to start with NodeGone when their node is not there, and with NodeFull when other jobs of the cluster
        have reserved it: the worker must be placed again then.
        """
        return RayHost(worker_id, spec, self)

    def probe(self) -> RayProbe:
        """A probe of all its devices."""
        return RayProbe(self, self._gib)

    def close(self) -> None:
        """Leave the cluster; what still runs of the workers ends. Blocks. Idempotent."""
        self._closed.set()
        self._driver.close()
        self.starting.shutdown(wait=False, cancel_futures=True)

    # -- for RayProbe -------------------------------------------------------------------------------------------

    @property
    def has_this_machine(self) -> bool:
        """True if this machine is a node."""
        with self._lock:
            return any(view.here for view in self._nodes.values())

    def pids_here(self) -> set[int]:
        """The workers' processes on this machine."""
        with self._lock:
            return {host.pid for host in self._hosts.values() if host.pid is not None and not host.node}

    def look(self) -> tuple[DeviceReading, ...]:
        """The devices of every other node, read now. A cluster out of reach has none, and is joined again."""
        if not self._joined.is_set():
            return ()
        with self._looking:
            with self._lock:
                pids: dict[str, list[int]] = {}
                for host in self._hosts.values():
                    if host.pid is not None:
                        pids.setdefault(host.node_id, []).append(host.pid)
            try:
                view = self._driver.call(messages.Look(pids=pids), LOOK_S)
            except EngineError as error:
                _log.warning("the cluster's nodes cannot be read: %s", error.message)
                return self._readings()
            assert isinstance(view, messages.ClusterView)
            self._update(view)
        return self._readings()

    # -- for RayHost --------------------------------------------------------------------------------------------

    def start_worker(self, host: RayHost, model: messages.ModelPlace, token: bytes) -> messages.Started:
        """Start its actor; it hears of the actor from now on. A cluster that is out of reach is waited for, and so is a
        node that has not answered since it was joined. Blocks.

        Raises NodeGone, NodeFull or WorkerFailed.
        """
        self._await_node(host)
        start = self._start_of(host, model, token)
        with self._lock:
            self._hosts[host.key] = host
        try:
            started = self._driver.call(start, START_S)
        except ClusterUnavailable as error:
            self.forget_worker(host.key)
            raise NodeGone(f"worker {host.worker_id}: {error.message}", worker=host.worker_id) from error
        except EngineError:
            self.forget_worker(host.key)
            raise
        assert isinstance(started, messages.Started)
        return started

    def _await_node(self, host: RayHost) -> None:
        """Wait while the cluster is out of reach, or a host's node may be one of those that have not answered yet."""
        until = time.monotonic() + REJOIN_PATIENCE_S
        while not self._joined.is_set() or self._may_come(host):
            if self._closed.is_set() or time.monotonic() >= until or host.cancelled.wait(_LOOK_AGAIN_S):
                return
            if not self._looking.locked():  # else the views of all that wait would hold up the device readings
                self.look()

    def _may_come(self, host: RayHost) -> bool:
        """Return whether its node is missing and may be one of those that have not answered yet."""
        with self._lock:
            return self._awaits and host.node not in self._names.values()

    def _start_of(self, host: RayHost, model: messages.ModelPlace, token: bytes) -> messages.Start:
        """Return the request to start a worker; raises NodeGone, or WorkerFailed where its node can run none."""
        with self._lock:
            node_id = next((id_ for id_, name in self._names.items() if name == host.node), "")
            node = self._nodes.get(node_id)
        if node is None or node.problem:
            failure, why = (NodeGone, "it is not in the cluster") if node is None else (WorkerFailed, node.problem)
            raise failure(
                f"worker {host.worker_id} cannot run on {host.node_name}: {why}", worker=host.worker_id, node=host.node
            )
        host.node_id = node_id
        return messages.Start(
            key=host.key,
            worker_id=host.worker_id,
            node=node_id,
            node_name=host.node_name,
            gpus=host.names.gpu_shares(host.spec.shares, {each.id: each.total_bytes for each in node.devices}),
            token=token,
            model=model,
        )

    def kill_worker(self, key: str) -> None:
        """Kill the worker."""
        self._driver.call_soon(messages.Kill(key=key))

    def forget_worker(self, key: str) -> None:
        """It has ended: give back what was reserved."""
        with self._lock:
            self._hosts.pop(key, None)
        self._driver.call_soon(messages.Discard(key=key))

    def lives(self, node_id: str) -> bool:
        """Return whether the node was there at the last look."""
        with self._lock:
            return node_id in self._nodes

    def threads(self, node_id: str) -> int:
        """CPU threads for each worker of a node: its cores, shared out."""
        with self._lock:
            workers = Counter(host.node_id for host in self._hosts.values())[node_id]
            cores = self._nodes[node_id].cores if node_id in self._nodes else 1
            return max(1, cores // max(1, workers))

    # -- the driver ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        driver = DriverClient(self._take_news, self._lost)
        try:
            view = driver.call(messages.Join(address=self._address, gib=self._gib), JOIN_S)
        except EngineError:
            driver.close()
            raise
        assert isinstance(view, messages.ClusterView)
        self._update(view)
        self._driver = driver
        self._joined.set()

    def _update(self, view: messages.ClusterView) -> None:
        """Update the nodes; report lost ones to their workers."""
        with self._lock:
            before = dict(self._names)
            problems = {node.id: node.problem for node in self._nodes.values()}
            self._nodes = {node.id: node for node in view.nodes}
            self._awaits = view.awaits
            still_there = {node_id: name for node_id, name in before.items() if node_id in self._nodes}
            self._names = name_nodes(view.nodes, still_there)
            names = dict(self._names)
            lost_hosts = [host for host in self._hosts.values() if host.node_id not in self._nodes]
        for node_id in before.keys() - names.keys():
            _log.error("%s has left the cluster", before[node_id] or "this machine", extra={"source": "ray"})
        for node in view.nodes:
            if problems.get(node.id) != node.problem:
                self._log_node(names[node.id], node)
        for host in lost_hosts:
            host.call_soon(host.node_gone)

    def _log_node(self, name: str, node: messages.NodeView) -> None:
        if node.problem:
            _log.error("no worker can run on %s: %s", name or "this machine", node.problem, extra={"source": "ray"})
        else:
            _log.info("%s (%s) is in the cluster", name or "this machine", node.address, extra={"source": "ray"})

    def _readings(self) -> tuple[DeviceReading, ...]:
        with self._lock:
            return tuple(
                msgspec.structs.replace(reading, id=join_device(name, reading.id), node=name)
                for node in self._nodes.values()
                if not node.here and not node.problem
                for name in (self._names[node.id],)
                for reading in node.devices
            )

    def _take_news(self, news: messages.OutputLines | messages.Ended) -> None:
        with self._lock:
            host = self._hosts.get(news.key)
        if host is None:
            return
        if isinstance(news, messages.OutputLines):
            host.call_soon(host.log_lines, news.lines)
        else:
            host.call_soon(host.over, news.exit)

    def _lost(self, reason: str) -> None:
        """The driver is gone, and every actor ends with it. Called on a thread of its own, which joins again."""
        if not self._joined.is_set():
            return  # it went while it joined, whose caller gets the error
        _log.error("%s; it rejoins when it answers", reason, extra={"source": "ray"})
        self._joined.clear()
        with self._lock:
            hosts = list(self._hosts.values())
            self._nodes, self._names = {}, {}
        for host in hosts:
            host.call_soon(host.over, WorkerExit(reason=reason))
        while not self._closed.wait(_REJOIN_S):
            with contextlib.suppress(EngineError):
                self._join()
                break
        if self._closed.is_set():
            self._driver.close()


class RayProbe:
    """This machine's devices, where it is a node of the cluster, and each node's as "gpu-box/cuda:0".

    gib: simulated devices, in place of each machine's own.
    """

    def __init__(self, cluster: Cluster, gib: Sequence[float] = ()) -> None:
        self._cluster = cluster
        self._gib = tuple(gib)
        self._here: DeviceProbe | None = None

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """All readings. `pids` may be of any node, where they mean nothing to the others: the cluster knows which
        are where, and of `pids` only this process itself is added."""
        nodes = self._cluster.look()
        if not self._cluster.has_this_machine:
            return nodes
        if self._here is None:
            self._here = new_probe(self._gib)
        return (*self._here.read({os.getpid()} | self._cluster.pids_here()), *nodes)


class RayHost(ChannelHost):
    """Runs one worker as an actor of Ray on one node, by the interface of a worker in a child process. Used on the
    engine's loop alone.

    node: what the node is called, node_name: for people.  key: what this start of the worker is called; unique.
    cancelled: it is not to be waited for any more before it has started.
    """

    def __init__(self, worker_id: str, spec: ModelSpec, cluster: Cluster) -> None:
        super().__init__(worker_id)
        self.key = f"{worker_id}-{secrets.token_hex(4)}"
        self.spec = spec
        self.names = translation([share.device for share in spec.shares] or [spec.device])
        self.node = self.names.node
        self.node_name = self.node or "this machine"
        self.node_id = ""
        self._cluster = cluster
        self._path = str(spec.path)
        self._own_threads = spec.threads
        self._greeted = False
        self._started = False
        self.cancelled = threading.Event()

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the actor and connect; the first event is Hello, or LoadFailed where the node lacks the model.

        Raises NodeGone, NodeFull, WorkerFailed or ModelLoadFailed.
        """

        def over(exit_: WorkerExit) -> None:
            self._cluster.forget_worker(self.key)
            on_exit(exit_)

        self._listen(on_event, over)
        self._loop = asyncio.get_running_loop()
        token, on_thread = new_token(), partial(self._loop.run_in_executor, self._cluster.starting)
        model = await on_thread(place_of, self.spec)
        started = await on_thread(self._cluster.start_worker, self, model, token)
        self._started, self.pid, self._path = True, started.pid, started.path
        try:
            sock = await on_thread(dial, started.address, started.port, token, DIAL_S)
        except OSError as error:
            self._cluster.forget_worker(self.key)
            failure = WorkerFailed if self._cluster.lives(self.node_id) else NodeGone
            raise failure(
                f"worker {self.worker_id} on {self.node_name} is unreachable at {started.address}:{started.port} "
                f"({error}); check the firewall",
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
        """SIGKILL; on_exit follows. A start is not waited for any more."""
        self.cancelled.set()
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

    def over(self, how: WorkerExit) -> None:
        """The worker ended, or the actor that ran it."""
        if how.reason:
            self._give_up(how.reason)
            return
        self._set_exit(how)
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
            self._loop.call_later(_WATCH_S, self._await_reason, self._loop.time() + KILL_PATIENCE_S)

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
            self._loop.call_later(_WATCH_S, self._await_reason, deadline)

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


def _absolute(adapter: AdapterSpec) -> AdapterSpec:
    return msgspec.structs.replace(adapter, path=adapter.path.absolute())
