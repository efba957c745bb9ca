"""The simulated cluster: workers, nodes, the front end, and deaths."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.simulation.step_costs import StepCosts


class FrontDoor(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds that the one loop with the API and the engine spends (defaults as measured in docs/performance.md).

    request_s: a request, HTTP and admission included.  output_s: new tokens of one request in a message, passed on as
    one event of a stream.  message_s: a worker's message, whatever is in it.  slot_s: for each worker that a request
    might go to, when it is placed.
    shared: the share of its CPU time by which steps of workers on the same cores get longer; 0 has cores of its own.
    """

    request_s: float = 600e-6
    output_s: float = 34e-6
    message_s: float = 0.0
    slot_s: float = 2.5e-6
    shared: float = 0.0


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A node dies with its workers. detected_s: until the engine knows.  restart_s: from there until they are back."""

    at_s: float
    node: int = 0
    detected_s: float = 0.0
    restart_s: float = 60.0

    @property
    def back_s(self) -> float:
        """When its workers are there again."""
        return self.at_s + self.detected_s + self.restart_s


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """N workers of the same kind, numbered, workers_per_node to a node. The other names are those of EngineConfig.

    kv_tokens: what the KV pages of one worker hold.  hop_s: from the engine's loop to a worker or back.
    course: the speed drift of a worker, see engine.simulation.step_costs; empty where its speed is constant.
    """

    costs: StepCosts
    course: tuple[float, ...] = ()
    workers: int = 1
    workers_per_node: int = 1
    kv_tokens: int = 65_536
    max_model_len: int = 8192
    max_prompts: int = EngineConfig().max_prompts
    step_tokens: int = EngineConfig().step_tokens
    page_tokens: int = EngineConfig().page_tokens
    max_queue: int = EngineConfig().max_queue
    timeout_s: float = EngineConfig().timeout_s
    slo_itl_s: float | None = None
    hop_s: float = 0.0
    front: FrontDoor = FrontDoor()
    deaths: tuple[Death, ...] = ()

    def validate(self) -> Cluster:
        """Itself, or InvalidRequest naming the first field out of range."""
        self.costs.validate()
        for param, low, high in (
            ("workers", 1, 100_000),
            ("workers_per_node", 1, 1024),
            ("kv_tokens", self.page_tokens, 10**9),
            ("max_model_len", 2, 10**8),
            ("max_prompts", 1, 4096),
            ("step_tokens", 16, 10**6),
            ("page_tokens", 1, 4096),
            ("max_queue", 0, 10**7),
            ("timeout_s", 0, 10**6),
            ("hop_s", 0, 60),
        ):
            value = getattr(self, param)
            if not low <= value <= high:
                raise InvalidRequest(f"{param} is {value:g}; it must be between {low:g} and {high:g}", param=param)
        if not all(0 < factor < 1000 for factor in self.course):
            raise InvalidRequest("each load factor must be above 0 and below 1000", param="course")
        for name, cost in msgspec.structs.asdict(self.front).items():
            if not 0 <= cost <= 60:
                raise InvalidRequest(f"{name} of the front end is {cost:g}; it must be between 0 and 60", param=name)
        for death in self.deaths:
            if not (0 <= death.node < self.nodes and min(death.at_s, death.detected_s, death.restart_s) >= 0):
                raise InvalidRequest(f"no node {death.node}: nodes are 0 to {self.nodes - 1}", param="deaths")
        return self

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that a worker takes: it needs room for one of its answer."""
        return min(self.max_model_len, self.kv_tokens) - 1

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.workers // self.workers_per_node)

    def of_node(self, node: int) -> range:
        """The workers of a node."""
        return range(node * self.workers_per_node, min(self.workers, (node + 1) * self.workers_per_node))
