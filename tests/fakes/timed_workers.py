"""Workers on a virtual clock: the product's own loop, with its texts, grammars and outbox, over a backend whose
scheduler and pages are the real ones too, and whose steps take as long as step costs say. No thread, no process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine.backends import base
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence as Tokens
from engine.config import AdapterSpec, Grammar, ModelSpec
from engine.simulation.step_costs import StepCosts, StepShape
from engine.snapshot import DeviceReading
from engine.worker_process import protocol
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.loop import HEARTBEAT_S, WorkerLoop
from tests.fakes.backend import nearest
from tests.fakes.engines import StillProbe
from tests.fakes.model import VOCAB_SIZE
from tests.fakes.scripted_workers import KEPT_FREE_BYTES, WORKER_BYTES

PAGE_TOKENS = 16
MAX_MODEL_LEN = 4096
COMPILE_S = 5.0
"""What a grammar takes to compile."""
T = TypeVar("T")


def compile_later(work: Callable[[], T], grammar: Grammar) -> Future[T]:
    """`in_deep_thread` on the virtual loop: the grammar is compiled, COMPILE_S later."""
    future: Future[T] = Future()
    asyncio.get_running_loop().call_later(COMPILE_S, lambda: future.set_result(work()))
    return future


@dataclass
class TimedMachine(StillProbe):
    """Workers and what their work costs. slower: how many times as slow as the others a worker is.

    nodes: machines, each with a CPU of its own; 0: there is this one.  room: how many workers fit into memory of each.
    hosts: of all workers so far, in the order of their starts.
    """

    costs: StepCosts
    kv_tokens: int = 8192
    load_s: float = 1.0
    room: int = 2
    max_model_len: int = MAX_MODEL_LEN
    nodes: int = 0
    slower: dict[str, float] = field(default_factory=dict)
    hosts: list[TimedHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def read(self, pids: Collection[int] = ()) -> list[DeviceReading]:
        """The CPUs, with the memory that workers leave."""
        [cpu], alive = self.readings, sum(host.alive for host in self.hosts)
        free = KEPT_FREE_BYTES + max(0, self.room - alive // max(1, self.nodes)) * WORKER_BYTES
        cpu = msgspec.structs.replace(cpu, free_bytes=free)
        names = [f"node{number}" for number in range(1, self.nodes + 1)]
        return [msgspec.structs.replace(cpu, id=f"{name}/cpu", node=name) for name in names] or [cpu]

    def new_host(self, worker_id: str, spec: ModelSpec) -> TimedHost:
        """Engine's new_host."""
        host = TimedHost(self, worker_id)
        self.hosts.append(host)
        return host


class _Channel(WorkerChannel):
    """A worker's end of a channel that nothing is read from in a thread: commands are put in."""

    def __init__(self, host: TimedHost) -> None:
        self.commands = deque[protocol.Command]()
        self._host = host

    @property
    def closed(self) -> bool:
        return not self._host.alive

    def take(self, timeout_s: float = 0.0) -> protocol.Command | None:
        return self.commands.popleft() if self.commands else None

    def wake(self) -> None:
        self._host.turn_at(0.0)

    def has_waiting(self, *kinds: type[protocol.Command]) -> bool:
        return any(isinstance(command, kinds) for command in self.commands)

    def send(self, event: protocol.Event) -> None:
        self._host.emit(event)

    def close(self) -> None:
        self.commands.clear()


class TimedHost:
    """WorkerHost. now: seconds on the worker's clock, ahead of the loop's while a step or a load lasts: what it sends
    then arrives at its end, and what it is sent meanwhile waits for it."""

    def __init__(self, machine: TimedMachine, worker_id: str) -> None:
        self.pid: int | None = None
        self.alive = False
        self.now = 0.0
        self.machine = machine
        self.slower = machine.slower.get(worker_id, 1.0)
        self._channel = _Channel(self)
        self._worker = WorkerLoop(self._channel, lambda _: TimedBackend(self), strict=True, clock=lambda: self.now)
        self._sent = deque[protocol.Event]()
        self._turn: asyncio.TimerHandle | None = None

    async def start(self, on_event: Callable[[protocol.Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """It runs at once."""
        self._loop = asyncio.get_running_loop()
        self._on_event, self._on_exit = on_event, on_exit
        self.alive, self.now = True, self._loop.time()
        self.emit(protocol.Hello(pid=1))
        self.turn_at(0.0)

    def send(self, command: protocol.Command) -> None:
        """Have it done once the step is over."""
        if self.alive:
            self._channel.commands.append(command)
            self.turn_at(0.0)

    async def stop(self, timeout_s: float) -> None:
        """It ends."""
        self.die(WorkerExit(code=0))

    def kill(self) -> None:
        """It ends."""
        self._loop.call_soon(self.die, WorkerExit(signal="SIGKILL"))

    def die(self, how: WorkerExit) -> None:
        """Its end, reported once."""
        if self.alive:
            self.alive = False
            self._on_exit(how)

    def turn_at(self, when: float) -> None:
        """Let the loop make its next turn then, or once its clock is the loop's again."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn = self._loop.call_at(max(when, self.now, self._loop.time()), self._make_turn)

    def emit(self, event: protocol.Event) -> None:
        """Send an event; it arrives when the loop's clock is the worker's."""
        self._sent.append(event)
        self._loop.call_at(max(self.now, self._loop.time()), self._deliver)

    def _deliver(self) -> None:
        event = self._sent.popleft()
        if self.alive:
            self._on_event(event)

    def _make_turn(self) -> None:
        if not self.alive:
            return
        self.now = max(self.now, self._loop.time())
        worker = self._worker
        worker._iterate()
        if worker._stopping:
            self.die(WorkerExit(code=0))
        busy = worker._busy_backend() is not None or worker._outbox.has_delayed
        self.turn_at(self.now if busy else self.now + HEARTBEAT_S)


@dataclass(slots=True)
class _Job:
    """A request here. mask: what its tokens are held to.  begun: it has a token."""

    tokens: Tokens
    mask: base.TokenMask | None
    begun: bool = False


class TimedBackend:
    """Backend. Every token is "a", or the next one that a mask allows."""

    def __init__(self, host: TimedHost) -> None:
        self._host = host
        self._jobs: dict[str, _Job] = {}
        self._steps = 0

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Callable[[base.LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> base.LoadedModel:
        """It takes as long as the machine says."""
        machine = self._host.machine
        self._host.now += machine.load_s
        self._scheduler = Scheduler(
            PagePool(machine.kv_tokens // PAGE_TOKENS, PAGE_TOKENS),
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            max_model_len=machine.max_model_len,
            clock=lambda: self._host.now,
        )
        return base.LoadedModel(
            backend="timed", architecture="none", dtype="none", devices=(spec.device,), vocab_size=VOCAB_SIZE,
            max_model_len=machine.max_model_len, kv_tokens=machine.kv_tokens, page_tokens=PAGE_TOKENS, weights_bytes=1,
            kv_bytes=1, parameters=1,
        )  # fmt: skip

    def submit(self, request: base.BackendRequest, mask: base.TokenMask | None = None) -> None:
        """Take a request."""
        token_ids = [*request.prompt_ids, *request.generated]
        tokens = Tokens(request.id, token_ids, len(request.prompt_ids), client=request.client)
        self._scheduler.submit(tokens)
        self._jobs[request.id] = _Job(tokens, mask)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        if (job := self._jobs.pop(request_id, None)) is not None:
            self._scheduler.remove(job.tokens)

    def step(self) -> Sequence[base.TokenEvent]:
        """Plan a step, let its time pass, and commit it."""
        plan, machine = self._scheduler.plan(), self._host.machine
        self._host.now += self._host.slower * machine.costs.seconds(StepShape.of_plan(plan))
        self._steps += 1
        events = [self._event(tokens.id) for tokens in plan.sampled_sequences]
        self._scheduler.commit(plan, ([event.token_id or 0] for event in events))
        return events

    def _event(self, request_id: str) -> base.TokenEvent:
        job, token_id = self._jobs[request_id], ord("a")
        if job.mask is not None:
            token_id = nearest(token_id, job.mask) or token_id
            job.mask.accept(token_id)
        first, job.begun = not job.begun, True
        cached_tokens = (job.tokens.cached_tokens or 0) if first else None
        return base.TokenEvent(request_id=request_id, token_id=token_id, cached_tokens=cached_tokens)

    def has_work(self) -> bool:
        """True if there is any request."""
        return bool(self._jobs)

    def stats(self) -> base.BackendStats:
        """Counters and gauges now."""
        scheduler = self._scheduler
        return base.BackendStats(
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.num_pages,
            pages_free=scheduler.pool.free_pages,
            prompt_tokens_computed=scheduler.counters.prompt_tokens_computed,
            preemptions=scheduler.counters.preemptions,
            steps=self._steps,
            sequences=tuple(
                base.SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.num_tokens)
                for each in (*scheduler.running, *scheduler.waiting)
            ),
            limited=dict(scheduler.times.limited),
        )

    def time_lost(self, request_id: str) -> base.TimeLost:
        """What the scheduler has seen."""
        return self._scheduler.times.lost(request_id)

    def set_max_prompts(self, max_prompts: int) -> None:
        """From the next step on."""
        self._scheduler.limits.set_max_prompts(max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """From the next step on."""
        self._scheduler.limits.set_step_tokens(step_tokens)

    def set_itl_target(self, target_s: float | None) -> None:
        """From the next step on."""
        self._scheduler.pacing.set_target(target_s)

    def prefix_changes(self) -> base.PrefixChanges:
        """None are told."""
        return base.PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """It takes no memory."""
        return 0

    def detach(self, key: str) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Prove the accounts of the scheduler."""
        self._scheduler.check()

    def unload(self) -> None:
        """Forget all requests."""
        self._jobs.clear()
