"""The process that holds Ray for the engine: `python -m engine.cluster --fd N`, started by `client` alone.

It does what it is called for, on as many threads as there are calls, and sends what workers say and how they end. When
the engine goes away it leaves the cluster, and its actors end with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from engine.cluster import messages
from engine.cluster.agents import Agents
from engine.cluster.library import Ray
from engine.cluster.node import Output, WorkerActor
from engine.errors import ClusterUnavailable, EngineError, ErrorInfo, NodeFull, NodeGone
from engine.worker.protocol import split_frames

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
        self._ray: Ray | None = None
        self._agents: Agents | None = None
        self._running: dict[str, Running] = {}

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
        if self._ray is not None:
            self._ray.leave()

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
            sentence = f"Ray: {type(error).__name__}: {first_line(error)}"
            self._send(messages.Reply(id=call.id, error=ErrorInfo(code="worker_failed", message=sentence)))

    def _do(self, request: messages.Request) -> messages.Sight | messages.Started | messages.Done:
        match request:
            case messages.Join():
                return self._join(request)
            case messages.Look(pids=pids):
                return self._require_agents().look(pids)
            case messages.Start():
                return self._start(request)
            case messages.Kill(key=key):
                if key in self._running:
                    self._running[key].actor.kill.remote()
            case messages.Discard(key=key):
                self._discard(key)
        return messages.Done()

    # -- the cluster --------------------------------------------------------------------------------------------

    def _join(self, join: messages.Join) -> messages.Sight:
        self._ray = Ray(join.address)
        self._agents = Agents(self._ray, join.gib)
        return self._agents.look({}, patience_s=FIRST_LOOK_S)

    def _require_ray(self) -> Ray:
        if self._ray is None:
            raise ClusterUnavailable("the cluster was not joined")
        return self._ray

    def _require_agents(self) -> Agents:
        if self._agents is None:
            raise ClusterUnavailable("the cluster was not joined")
        return self._agents

    # -- workers ------------------------------------------------------------------------------------------------

    def _start(self, start: messages.Start) -> messages.Started:
        node = self._require_agents().require(start.node)
        running = self._reserve(start)
        try:
            started: messages.Started = self._require_ray().get(running.actor.open.remote(node.address), START_S)
        except Exception as error:
            self._give_back(running)
            self._require_agents().require(start.node)
            why = first_line(error)
            raise NodeGone(f"worker {start.worker_id} could not be started on {start.node_name}: {why}") from error
        self._running[start.key] = running
        self._follow(start.key)
        return started

    def _reserve(self, start: messages.Start) -> Running:
        """Room on the node and the actor in it. Without a CPU where other jobs have reserved all: memory decides how
        many workers a node takes, and cores are shared."""
        ray = self._require_ray()
        for cpus, patience_s in ((1, RESERVE_CPU_S), (0, RESERVE_S)):
            group = ray.reserve(start.node, start.gpus, cpus, patience_s)
            if group is not None:
                actor = ray.actor_in(
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
        self._require_agents().require(start.node)
        wanted = " + ".join(f"{share:g}" for share in start.gpus.values()) or "no"
        raise NodeFull(
            f"Ray has no room left on {start.node_name} for worker {start.worker_id}, which takes {wanted} GPU: "
            "other jobs of the cluster have reserved it",
            worker=start.worker_id,
            node=start.node_name,
        )

    def _follow(self, key: str) -> None:
        """Ask a worker's actor what there is to tell, again and again until it has told the end."""
        running = self._running.get(key)
        if running is not None:
            answer = running.actor.output.remote()
            self._require_ray().when_done(answer, lambda done: self._submit(self._heard, key, done))

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        """Go on on a thread of ours: Ray's own must not wait for Ray."""
        self._threads.submit(work, *arguments)

    def _heard(self, key: str, done: Future[Output]) -> None:
        error = done.exception()
        if error is not None:
            self._lost(key, error)
            return
        output = done.result()
        if output.lines:
            self._send(messages.Said(key=key, lines=output.lines))
        if output.exit is None:
            self._follow(key)
            return
        how = output.exit
        self._send(messages.Ended(key=key, code=how.code, signal=how.signal, log_tail=how.log_tail))

    def _lost(self, key: str, error: BaseException) -> None:
        """An actor that is dead ends its worker; one that is only out of reach is asked again while its node lives."""
        running = self._running.get(key)
        if running is None:
            return
        if self._require_ray().is_passing(error) and self._require_agents().lives(running.node):
            timer = threading.Timer(_RETRY_S, self._submit, (self._follow, key))
            timer.daemon = True
            timer.start()
            return
        self._send(messages.Ended(key=key, reason="the Ray actor that ran it is gone"))

    def _discard(self, key: str) -> None:
        running = self._running.pop(key, None)
        if running is not None:
            self._give_back(running)

    def _give_back(self, running: Running) -> None:
        ray = self._require_ray()
        for give_back, what in ((ray.kill, running.actor), (ray.release, running.group)):
            try:
                give_back(what)
            except Exception as error:  # it went with its node
                _log.debug("nothing to give back: %s", error)


def first_line(error: BaseException) -> str:
    """What an error says first; of one that Ray passed on, the cause."""
    cause = getattr(error, "cause", None)
    lines = str(cause or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
