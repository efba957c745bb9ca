"""The process that holds Ray for the engine: `python -m engine.cluster --fd N`, started by `client` alone.

It does what it is called for, on as many threads as there are calls, and sends what workers say and how they end. When
the engine goes away it leaves the cluster, and its actors end with it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from engine.cluster import messages
from engine.cluster.messages import ClusterView, NodeView
from engine.cluster.node import NodeAgent, Output, WorkerActor, own_version
from engine.errors import ClusterUnavailable, EngineError, ErrorInfo, NodeFull, NodeGone, WorkerFailed, first_line
from engine.snapshot import DeviceReading
from engine.system.files import distrust, tighten_folder
from engine.system.install_command import install_extra
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import split_frames
from engine.workers.health import AwakeClock

# All that is used of Ray, behind a face with types. For the driver process alone; imports Ray when it joins.

OBJECT_STORE_BYTES = 128 * 2**20
"""Of a cluster that is started here: nothing is kept in it but actors' replies."""
ANSWER_S = 5.0
_NODE_ID_LABEL = "ray.io/node-id"
_PROCESSES = ("raylet", "gcs_server")
_TOKEN_RESOURCE = {"memory": 2**20}


class Ray:
    """A connection to one cluster. Every method blocks, and may be called from any thread."""

    def __init__(self, address: str) -> None:
        """Join; see `engine.cluster.Cluster`. Raises ClusterUnavailable."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
        if importlib.util.find_spec("ray") is None:
            raise ClusterUnavailable(
                f"--cluster needs Ray, which is not installed; install it with `{install_extra('ray')}`", lacks="ray"
            )
        self._ray: Any = importlib.import_module("ray")
        logging.getLogger("ray").setLevel(logging.ERROR)  # not before: the import sets it
        self._groups: Any = importlib.import_module("ray.util.placement_group")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self._errors: Any = importlib.import_module("ray.exceptions")
        wanted = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        self._by_client = wanted.startswith("ray://")
        self._folder = ""
        try:
            self._join(wanted)
        except Exception as error:  # Ray raises whatever its parts do
            raise unavailable(wanted, error) from error

    def _join(self, wanted: str) -> None:
        """Join the cluster at `wanted`; without one, that of this machine, which is started if need be."""
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "ericllm"}
        tighten_folder(Path.home() / ".ray")  # a reader of Ray's token may run programs as this user
        if wanted:
            _require_answer(wanted)
            self._ray.init(wanted, **settings)
            return
        with suppress(ConnectionError):
            if _finds_only_ours():
                self._ray.init("auto", **settings)
                return
        # Ray makes its folder writable for everybody, by default /tmp/ray: put it into one that no other user can
        # enter.
        self._folder = tempfile.mkdtemp(prefix="ericllm-ray-", dir="/tmp")
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        self._ray.init("local", _temp_dir=f"{self._folder}/ray", **local, **settings)

    def leave(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- nodes --------------------------------------------------------------------------------------------------

    def own_node(self) -> str:
        """The id of the node that is this machine; "" where it is none."""
        return "" if self._by_client else str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> list[NodeView]:
        """The living nodes, as Ray lists them."""
        return [
            NodeView(
                id=node["NodeID"],
                label=node.get("NodeName") or "",
                hostname=node.get("NodeManagerHostname") or "",
                address=node["NodeManagerAddress"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    # -- actors -------------------------------------------------------------------------------------------------

    def actor_on(self, node_id: str, kind: type, *arguments: object) -> Any:
        """An actor on that node that takes none of its resources."""
        strategy = self._strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        return self._ray.remote(kind).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)

    def actor_in(self, group: Any, cpus: int, kind: type, *arguments: object, calls: int, **named: object) -> Any:
        """An actor in the first bundle of a placement group, which takes up to `calls` calls at once.

        It asks for no GPU itself, so that Ray hides none from it: its group holds them.
        """
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = {"num_cpus": cpus, "max_concurrency": calls, "scheduling_strategy": strategy, "max_restarts": 0}
        return self._ray.remote(kind).options(**options).remote(*arguments, **named)

    def get(self, reference: Any, patience_s: float) -> Any:
        """The value; raises what the call raised, or TimeoutError."""
        return self._ray.get(reference, timeout=patience_s)

    def wait(self, references: Sequence[Any], patience_s: float) -> set[Any]:
        """Those that are done, all of them or as many as are after `patience_s`."""
        if not references:
            return set()
        done, _ = self._ray.wait(list(references), num_returns=len(references), timeout=patience_s)
        return set(done)

    def when_done(self, reference: Any, then: Callable[[Future[Any]], object]) -> None:
        """Call `then`, on some thread, with the finished future."""
        reference.future().add_done_callback(then)

    def kill(self, actor: Any) -> None:
        """End an actor's process."""
        self._ray.kill(actor)

    def is_passing(self, error: BaseException) -> bool:
        """Return whether an actor's failure may pass: it is out of reach, but not known to be dead."""
        return isinstance(error, self._errors.ActorUnavailableError)

    # -- placement groups ---------------------------------------------------------------------------------------

    def reserve(self, node_id: str, gpus: Mapping[str, float], cpus: int, patience_s: float) -> Any:
        """A placement group on that node: `cpus`, and a bundle for each further GPU; None if there is no room now.

        One bundle cannot hold parts of two GPUs: Ray takes numbers above 1 for whole ones.
        """
        shares = list(gpus.values())
        first: dict[str, float] = {"CPU": cpus} if cpus else dict(_TOKEN_RESOURCE)
        bundles = [{**first, **({"GPU": shares[0]} if shares else {})}, *({"GPU": share} for share in shares[1:])]
        where = [{_NODE_ID_LABEL: node_id}] * len(bundles)
        group = self._groups.placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=where)
        if group.wait(patience_s):
            return group
        self.release(group)
        return None

    def release(self, group: Any) -> None:
        """Give a placement group back."""
        self._groups.remove_placement_group(group)


def _finds_only_ours() -> bool:
    """Return whether Ray, left to find a cluster on this machine, would find ours or none.

    It joins any cluster whose processes it sees, else the one that a file in /tmp names: another user's would be handed
    models and prompts. Raises PermissionError where there are both, as only a person can say which is meant.
    """
    uids = {
        each.info["uids"].real
        for each in psutil.process_iter(["name", "uids"])
        if each.info["name"] in _PROCESSES and each.info["uids"]
    }
    ours = uids & {0, os.geteuid()}
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    foreign = uids - ours or (file.exists() and distrust(file))
    if foreign and ours:
        raise PermissionError("this machine also runs clusters of other users; set RAY_ADDRESS=HOST:PORT")
    return not foreign


def _require_answer(address: str) -> None:
    """Raise ConnectionError where nothing listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # Ray knows other forms of addresses, and says what is wrong with them
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {host}:{port} ({error})") from error


def unavailable(address: str, error: BaseException) -> ClusterUnavailable:
    """Why a cluster cannot be joined, in one sentence."""
    text = " ".join(str(error).split())
    where = f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"
    if isinstance(error, ImportError) and "grpc" in text.lower():
        why = f"the package grpcio is not installed, which ray:// needs; install it with `{install_extra('ray')}`"
    elif "client connection timeout" in text:
        why = f"{text}; a cluster with a token needs RAY_AUTH_MODE=token and the token on this machine"
    elif "ersion mismatch" in text:
        why = f"its Ray or Python version differs from this machine: {text}"
    else:
        why = (text[:300] or type(error).__name__).rstrip(".")
    return ClusterUnavailable(f"{where} cannot be joined: {why}", address=address)


# The nodes of a cluster and what their agents say, asked again with every look and never waited for long.

LOOK_S = 0.5
_ANSWERED_S = 5.0
_SILENCE_S = 10.0
_SECOND_CHANCE_S = 30.0
_START_SILENCE_S = 60.0


class _Agent:
    """One node's agent: its last reading, and the question that it has not answered yet.

    problem: why no worker can run there. failed_at: when it failed; it is not asked again, and replaced after a while.
    asked_at: by the awake clock, as who did not look heard nothing.
    """

    def __init__(self, actor: Any, problem: str, asked_at: float) -> None:
        self.actor = actor
        self.about: Any = actor.about.remote()
        self.asked: Any = None
        self.asked_at = asked_at
        self.version = ""
        self.cores = 1
        self.devices: tuple[DeviceReading, ...] | None = None
        self.problem = problem
        self.failed_at: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if it has answered once and fails now, which is how a node that is lost shows first."""
        return self.failed_at is not None and not self.problem


class Agents:
    """Looks at the nodes. A node whose agent has failed is taken for gone before Ray itself finds out."""

    def __init__(self, ray: Ray, gib: Sequence[float]) -> None:
        self._ray = ray
        self._gib = tuple(gib)
        self._own = ray.own_node()
        self._version = own_version()
        self._agents: dict[str, _Agent] = {}
        self._nodes: dict[str, NodeView] = {}
        self._looking = threading.Lock()
        self._clock = AwakeClock(time.monotonic())

    def look(self, pids: Mapping[str, Sequence[int]], patience_s: float = LOOK_S) -> ClusterView:
        """The living nodes with readings no older than the last look, where they answered within `patience_s`."""
        with self._looking:
            self._clock.turn(time.monotonic())
            nodes = {node.id: node for node in self._ray.nodes()}
            self._start_agents(nodes)
            self._ask(pids, patience_s)
            self._nodes = {node_id: node for node_id, node in nodes.items() if not self._agents[node_id].is_gone}
            described = tuple(map(self._view, filter(self._is_described, self._nodes.values())))
            return ClusterView(nodes=described, awaits=len(described) < len(self._nodes))

    def lives(self, node_id: str) -> bool:
        """Return whether the node was there at the last look."""
        return node_id in self._nodes

    def require(self, node_id: str) -> NodeView:
        """The node; raises NodeGone."""
        self.look({})
        node = self._nodes.get(node_id)
        if node is None:
            raise NodeGone("its node has left the cluster", node=node_id)
        return node

    def _is_described(self, node: NodeView) -> bool:
        agent = self._agents[node.id]
        return bool(agent.problem or (agent.version and (agent.devices is not None or node.id == self._own)))

    def _start_agents(self, nodes: Mapping[str, NodeView]) -> None:
        """An agent for each node; a new one where Ray still lists the node long after its agent failed, which keeps
        the problem until it answers."""
        now = time.monotonic()
        problems: dict[str, str] = {}
        for node_id, agent in list(self._agents.items()):
            if node_id not in nodes or (agent.failed_at is not None and now - agent.failed_at > _SECOND_CHANCE_S):
                problems[node_id] = agent.problem
                del self._agents[node_id]
        for node_id in nodes.keys() - self._agents.keys():
            actor = self._ray.actor_on(node_id, NodeAgent, self._gib)
            self._agents[node_id] = _Agent(actor, problems.get(node_id, ""), self._awake_s)

    @property
    def _awake_s(self) -> float:
        return self._clock.read(time.monotonic())

    def _ask(self, pids: Mapping[str, Sequence[int]], patience_s: float) -> None:
        now = self._awake_s
        agents = {id_: agent for id_, agent in self._agents.items() if agent.failed_at is None}
        for node_id, agent in agents.items():
            if node_id != self._own and agent.asked is None:
                agent.asked, agent.asked_at = agent.actor.read.remote(tuple(pids.get(node_id, ()))), now
        questions = [each for agent in agents.values() for each in (agent.about, agent.asked) if each is not None]
        answered = self._ray.wait(questions, patience_s)
        for agent in agents.values():
            self._take(agent, answered)
            silence_s = self._awake_s - agent.asked_at
            if agent.version and agent.asked is not None and silence_s > _SILENCE_S:
                agent.failed_at = time.monotonic()
            elif not agent.version and agent.failed_at is None and silence_s > _START_SILENCE_S:
                agent.problem = f"EricLLM does not start there: no answer for {_START_SILENCE_S:g} s"
                agent.failed_at = time.monotonic()

    def _take(self, agent: _Agent, answered: set[Any]) -> None:
        """Take an agent's answers; one that fails after it has ever answered went with its node."""
        try:
            if agent.about in answered:
                agent.version, agent.cores = self._ray.get(agent.about, _ANSWERED_S)
                agent.about, agent.problem = None, ""
                agent.asked_at = self._awake_s  # it takes calls from now on: its start is no silence
            if agent.asked in answered:
                agent.devices = self._ray.get(agent.asked, _ANSWERED_S)
                agent.asked = None
        except Exception as error:
            agent.failed_at = time.monotonic()
            if not (agent.version or self._ray.is_passing(error)):
                agent.problem = f"EricLLM does not start there: {' '.join(str(error).split())[-200:]}"

    def _view(self, node: NodeView) -> NodeView:
        agent = self._agents[node.id]
        problem = agent.problem
        if not problem and agent.version != self._version:
            problem = f"it has EricLLM {agent.version}, this machine {self._version}: install the same version"
        devices = agent.devices or ()
        here = node.id == self._own
        return msgspec.structs.replace(node, here=here, cores=agent.cores, devices=devices, problem=problem)


FIRST_LOOK_S = 20.0
RESERVE_CPU_S = 1.0
RESERVE_S = 5.0
START_S = 60.0
_LEAVE_S = 10.0
_RETRY_S = 1.0
_CALLS_OF_AN_ACTOR = 4

_log = logging.getLogger("engine")


class Running(msgspec.Struct, frozen=True):
    """A worker's actor, its placement group and its node's id."""

    actor: Any
    group: Any
    node: str


class Driver:
    """Answers calls that come on a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="ray")
        self._ray: Ray  # from the first call on, which is Join
        self._agents: Agents
        self._running: dict[str, Running] = {}
        self._at_the_end = contextlib.ExitStack()

    def run(self) -> None:
        """Serve until the engine closes its end, then leave the cluster."""
        decoder, buffer = msgspec.msgpack.Decoder(messages.Call), bytearray()
        try:
            while chunk := self._sock.recv(1 << 16):
                buffer += chunk
                for body in split_frames(buffer):
                    self._threads.submit(self._answer, decoder.decode(body))
        except OSError:
            pass
        hanging = threading.Timer(_LEAVE_S, os._exit, (1,))
        hanging.daemon = True
        hanging.start()
        self._at_the_end.close()

    def _send(self, news: messages.News) -> None:
        with self._sending, contextlib.suppress(OSError):  # the engine is gone; `run` sees it too
            self._sock.sendall(messages.frame_of(self._encoder.encode(news)))

    def _answer(self, call: messages.Call) -> None:
        try:
            self._send(messages.Reply(id=call.id, result=self._do(call.request)))
        except EngineError as error:
            self._send(messages.Reply(id=call.id, error=error.info))
        except Exception as error:
            _log.exception("%s failed", type(call.request).__name__)
            sentence = f"Ray: {type(error).__name__}: {_text_of(error)}"
            self._send(messages.Reply(id=call.id, error=ErrorInfo(code="worker_failed", message=sentence)))

    def _do(self, request: messages.Request) -> messages.ClusterView | messages.Started | messages.Done:
        match request:
            case messages.Join():
                return self._join(request)
            case messages.Look(pids=pids):
                return self._agents.look(pids)
            case messages.Start():
                return self._start(request)
            case messages.Kill(key=key):
                if key in self._running:
                    self._running[key].actor.kill.remote()
            case messages.Discard(key=key):
                self._discard(key)
        return messages.Done()

    # -- the cluster --------------------------------------------------------------------------------------------

    def _join(self, join: messages.Join) -> messages.ClusterView:
        self._ray = Ray(join.address)
        self._at_the_end.callback(self._ray.leave)
        self._agents = Agents(self._ray, join.gib)
        return self._agents.look({}, patience_s=FIRST_LOOK_S)

    # -- workers ------------------------------------------------------------------------------------------------

    def _start(self, start: messages.Start) -> messages.Started:
        node = self._agents.require(start.node)
        running = self._reserve(start)
        try:
            started: messages.Started = self._ray.get(running.actor.open.remote(node.address), START_S)
        except Exception as error:
            self._give_back(running)
            self._agents.require(start.node)
            why = _text_of(error)
            raise WorkerFailed(f"worker {start.worker_id} could not be started on {start.node_name}: {why}") from error
        self._running[start.key] = running
        self._follow(start.key)
        return started

    def _reserve(self, start: messages.Start) -> Running:
        """Room on the node and the actor in it. Without a CPU where other jobs have reserved all: memory decides how
        many workers a node takes, and cores are shared."""
        for cpus, patience_s in ((1, RESERVE_CPU_S), (0, RESERVE_S)):
            group = self._ray.reserve(start.node, start.gpus, cpus, patience_s)
            if group is not None:
                actor = self._ray.actor_in(
                    group,
                    cpus,
                    WorkerActor,
                    start.worker_id,
                    calls=_CALLS_OF_AN_ACTOR,
                    node=start.node_name,
                    token=start.token,
                    gpus=tuple(start.gpus),
                    model=start.model,
                )
                return Running(actor, group, start.node)
        self._agents.require(start.node)
        wanted = " + ".join(f"{share:g}" for share in start.gpus.values()) or "no"
        raise NodeFull(
            f"Ray has no room left on {start.node_name} for worker {start.worker_id}, which takes {wanted} GPU: "
            "other jobs of the cluster have reserved it",
            worker=start.worker_id,
            node=start.node_name,
        )

    def _follow(self, key: str) -> None:
        """Ask a worker's actor for its output, again and again until the worker's end."""
        running = self._running.get(key)
        if running is not None:
            answer = running.actor.output.remote()
            # on a thread of ours: Ray's own must not wait for Ray
            self._ray.when_done(answer, lambda done: self._threads.submit(self._take_output, key, done))

    def _take_output(self, key: str, done: Future[Output]) -> None:
        error = done.exception()
        if error is not None:
            self._lost(key, error)
            return
        output = done.result()
        if output.lines:
            self._send(messages.OutputLines(key=key, lines=output.lines))
        if output.exit is None:
            self._follow(key)
            return
        self._send(messages.Ended(key=key, exit=output.exit))

    def _lost(self, key: str, error: BaseException) -> None:
        """An actor that is dead ends its worker; one that is only out of reach is asked again while its node lives."""
        running = self._running.get(key)
        if running is None:
            return
        if self._ray.is_passing(error) and self._agents.lives(running.node):
            timer = threading.Timer(_RETRY_S, self._threads.submit, (self._follow, key))
            timer.daemon = True
            timer.start()
            return
        self._send(messages.Ended(key=key, exit=WorkerExit(reason="its Ray actor has ended")))

    def _discard(self, key: str) -> None:
        running = self._running.pop(key, None)
        if running is not None:
            self._give_back(running)

    def _give_back(self, running: Running) -> None:
        for give_back, what in ((self._ray.kill, running.actor), (self._ray.release, running.group)):
            try:
                give_back(what)
            except Exception as error:  # it went with its node
                _log.debug("nothing to give back: %s", error)


def _text_of(error: BaseException) -> str:
    """The first line of an error; of one that Ray passed on, of its cause."""
    return first_line(getattr(error, "cause", None) or error)
