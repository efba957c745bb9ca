"""Cluster: the nodes as the engine knows them, and the workers on them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.cluster import messages
from engine.cluster.client import DriverClient
from engine.cluster.names import join_device, name_nodes, named_reading
from engine.cluster.ray_host import RayHost, gpus_of
from engine.config import ModelSpec
from engine.devices import DeviceProbe, new_probe
from engine.errors import ClusterUnavailable, EngineError, InvalidRequest, NodeGone
from engine.snapshot import DeviceReading

# RayProbe: the devices of this machine and of every node of the cluster, as one machine's.


class ClusterDevices(Protocol):
    """The cluster as the probe uses it."""

    @property
    def has_this_machine(self) -> bool:
        """True if workers can run on the engine's own machine."""

    def look(self) -> tuple[DeviceReading, ...]:
        """Every node's devices, in the engine's names, but for this machine's."""

    def pids_here(self) -> set[int]:
        """The workers' processes on this machine."""


class RayProbe:
    """This machine's devices, where it is a node of the cluster, and each node's as "gpu-box/cuda:0".

    gib: simulated devices, in place of each machine's own.
    """

    def __init__(self, cluster: ClusterDevices, gib: Sequence[float] = ()) -> None:
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


MAX_WORKERS = 64
JOIN_S = 90.0
START_S = 90.0
LOOK_S = 10.0
REJOIN_PATIENCE_S = 60.0
_REJOIN_S = 3.0
_CLIENT = re.compile(r"ray://[^\s/:]+:\d{1,5}|ray://\[[0-9a-fA-F:]+\]:\d{1,5}")

_log = logging.getLogger("engine")


def check_address(address: str) -> str:
    """`address`, if it may be a cluster's. Raises InvalidRequest."""
    if address == "auto" or _CLIENT.fullmatch(address):
        return address
    raise InvalidRequest(
        f"cluster is {address!r}; it must be local, auto or ray://HOST:PORT", param="cluster", value=address
    )


def open_cluster(address: str, gib: Sequence[float] = ()) -> Cluster:
    """Join a Ray cluster. Blocks for seconds: call it off the loop.

    "auto": the cluster at RAY_ADDRESS, which must answer; else the one that runs on this machine; else one is started
    on this machine, which ends with the engine. This machine is a node then, and its devices go by their plain names.
    "ray://HOST:PORT": through the Ray Client server of a cluster's head. This machine is no node of it and computes
    nothing; it must be able to reach every node.
    gib: simulated devices that every node has in place of its own.
    Raises ClusterUnavailable, InvalidRequest.
    """
    return Cluster(check_address(address), tuple(gib))


class Cluster:
    """Made by `open_cluster`. May be used from any thread; what blocks says so."""

    def __init__(self, address: str, gib: tuple[float, ...]) -> None:
        self.address = address
        self._gib = gib
        self._lock = threading.Lock()
        self._nodes: dict[str, messages.NodeView] = {}
        self._names: dict[str, str] = {}
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

    def cores(self, node: str) -> int:
        """CPU cores of the node of that name; 1 where it is unknown."""
        with self._lock:
            return next((view.cores for id_, view in self._nodes.items() if self._names[id_] == node), 1)

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
        """Start its actor; it hears of the actor from now on. A cluster that is out of reach is waited for. Blocks.

        Raises NodeGone, NodeFull or WorkerFailed.
        """
        self._joined.wait(REJOIN_PATIENCE_S)
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

    def _start_of(self, host: RayHost, model: messages.ModelPlace, token: bytes) -> messages.Start:
        """Return the request to start a worker; raises NodeGone."""
        with self._lock:
            node_id = next((id_ for id_, name in self._names.items() if name == host.node), "")
            node = self._nodes.get(node_id)
        why = "it is not in the cluster" if node is None else node.problem
        if node is None or why:
            raise NodeGone(
                f"worker {host.worker_id} cannot run on {host.node_name}: {why}", worker=host.worker_id, node=host.node
            )
        host.node_id = node_id
        totals = {
            name: reading.total_bytes for reading in node.devices for name in (join_device(host.node, reading.id),)
        }
        return messages.Start(
            key=host.key,
            worker_id=host.worker_id,
            node=node_id,
            node_name=host.node_name,
            gpus=gpus_of(host.spec, host.names, totals),
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
            view = driver.call(messages.Join(address=self.address, gib=self._gib), JOIN_S)
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
            self._nodes = {node.id: node for node in view.nodes}
            still_there = {node_id: name for node_id, name in before.items() if node_id in self._nodes}
            self._names = name_nodes(view.nodes, still_there)
            names = dict(self._names)
            lost_hosts = [host for host in self._hosts.values() if host.node_id not in self._nodes]
        for node_id in before.keys() - names.keys():
            _log.error("%s has left the cluster", before[node_id] or "this machine", extra={"source": "ray"})
        for node in view.nodes:
            if node.id not in before:
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
                named_reading(self._names[node.id], reading)
                for node in self._nodes.values()
                if not node.here and not node.problem
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
            host.call_soon(host.over, news)

    def _lost(self, reason: str) -> None:
        """The driver is gone, and every actor ends with it. Called on a thread of its own, which joins again."""
        if not self._joined.is_set():
            return  # it went while it joined, whose caller gets the error
        _log.error("%s; it is joined again when it answers", reason, extra={"source": "ray"})
        self._joined.clear()
        with self._lock:
            hosts = list(self._hosts.values())
            self._nodes, self._names = {}, {}
        for host in hosts:
            host.call_soon(host.over, messages.Ended(key=host.key, reason=reason))
        while not self._closed.wait(_REJOIN_S):
            with contextlib.suppress(EngineError):
                self._join()
                break
        if self._closed.is_set():
            self._driver.close()
