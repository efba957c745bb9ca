"""The nodes of a cluster and what their agents say, asked again with every look and never waited for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.cluster.library import Node, Ray
from engine.cluster.messages import NodeSight, Sight
from engine.cluster.node import NodeAgent
from engine.cluster.version import own_version
from engine.errors import NodeGone
from engine.snapshot import DeviceReading

LOOK_S = 0.5
_ANSWERED_S = 5.0
_SILENCE_S = 10.0
_SECOND_CHANCE_S = 30.0


class _Agent:
    """One node's agent: its last reading, and the question that it has not answered yet."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.about: Any = actor.about.remote()
        self.asked: Any = None
        self.asked_at = 0.0
        self.version = ""
        self.cores = 1
        self.devices: tuple[DeviceReading, ...] | None = None
        self.problem = ""
        self.failed_at: float | None = None

    @property
    def questions(self) -> list[Any]:
        """What it has not answered."""
        return [question for question in (self.about, self.asked) if question is not None]

    def ask(self, pids: Sequence[int], now: float) -> None:
        """Ask for a reading, unless it owes one."""
        if self.asked is None:
            self.asked, self.asked_at = self.actor.read.remote(tuple(pids)), now


class Agents:
    """Looks at the nodes. A node whose agent has failed is taken for gone before Ray itself finds out."""

    def __init__(self, ray: Ray, gib: Sequence[float]) -> None:
        self._ray = ray
        self._gib = tuple(gib)
        self._own = ray.own_node()
        self._version = own_version()
        self._agents: dict[str, _Agent] = {}
        self._nodes: dict[str, Node] = {}
        self._looking = threading.Lock()

    def look(self, pids: Mapping[str, Sequence[int]], patience_s: float = LOOK_S) -> Sight:
        """The living nodes with readings no older than the last look, where they answered within `patience_s`."""
        with self._looking:
            nodes = {node.id: node for node in self._ray.nodes()}
            self._meet(nodes)
            self._ask(pids, patience_s)
            self._nodes = {node_id: node for node_id, node in nodes.items() if self._agents[node_id].failed_at is None}
            sights = tuple(self._sight(node) for node in self._nodes.values() if self._known(node.id))
            return Sight(nodes=sights, unready=len(self._nodes) - len(sights))

    def lives(self, node_id: str) -> bool:
        """Whether the node was there at the last look."""
        return node_id in self._nodes

    def require(self, node_id: str) -> Node:
        """The node; raises NodeGone."""
        self.look({})
        node = self._nodes.get(node_id)
        if node is None:
            raise NodeGone("its node has left the cluster", node=node_id)
        return node

    def _known(self, node_id: str) -> bool:
        agent = self._agents[node_id]
        return bool(agent.problem or (agent.version and (agent.devices is not None or node_id == self._own)))

    def _meet(self, nodes: Mapping[str, Node]) -> None:
        """An agent for each node; a new one where Ray still lists the node long after its agent failed."""
        now = time.monotonic()
        for node_id, agent in list(self._agents.items()):
            if node_id not in nodes or (agent.failed_at is not None and now - agent.failed_at > _SECOND_CHANCE_S):
                del self._agents[node_id]
        for node_id in nodes.keys() - self._agents.keys():
            self._agents[node_id] = _Agent(self._ray.actor_on(node_id, NodeAgent, self._gib))

    def _ask(self, pids: Mapping[str, Sequence[int]], patience_s: float) -> None:
        now = time.monotonic()
        agents = {id_: agent for id_, agent in self._agents.items() if not agent.problem and agent.failed_at is None}
        for node_id, agent in agents.items():
            if node_id != self._own:
                agent.ask(pids.get(node_id, ()), now)
        questions = [question for agent in agents.values() for question in agent.questions]
        answered = self._ray.wait(questions, patience_s)
        for agent in agents.values():
            self._take(agent, answered)
            if agent.version and agent.asked is not None and now - agent.asked_at > _SILENCE_S:
                agent.failed_at = now

    def _take(self, agent: _Agent, answered: set[Any]) -> None:
        """Take an agent's answers; one that fails after it has ever answered went with its node."""
        try:
            if agent.about in answered:
                agent.version, agent.cores = self._ray.get(agent.about, _ANSWERED_S)
                agent.about = None
            if agent.asked in answered:
                agent.devices = self._ray.get(agent.asked, _ANSWERED_S)
                agent.asked = None
        except Exception as error:
            if agent.version or self._ray.is_passing(error):
                agent.failed_at = time.monotonic()
            else:
                agent.problem = f"EricLLM does not run there: {' '.join(str(error).split())[-200:]}"

    def _sight(self, node: Node) -> NodeSight:
        agent = self._agents[node.id]
        problem = agent.problem
        if not problem and agent.version != self._version:
            problem = f"it has EricLLM {agent.version}, and this machine {self._version}: install the same on both"
        return NodeSight(
            id=node.id,
            label=node.label,
            hostname=node.hostname,
            address=node.address,
            here=node.id == self._own,
            cores=agent.cores,
            devices=agent.devices or (),
            problem=problem,
        )
