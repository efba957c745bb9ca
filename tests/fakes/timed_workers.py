"""Workers that only keep time, on a virtual clock: the scheduler, its pages and its accounts are the real ones, and
steps take as long as step costs say. No thread, no process, no token that means anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from engine.backends.base import BackendRequest, BackendStats, LoadedModel, SequenceStats, TimeLost
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.config import ModelSpec
from engine.simulation.step_costs import StepCosts, StepShape
from engine.snapshot import DeviceReading
from engine.worker_process import protocol
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.loop import GAUGE_S
from tests.fakes.engines import StillProbe
from tests.fakes.scripted_workers import KEPT_FREE_BYTES, WORKER_BYTES

PAGE_TOKENS = 16
MAX_MODEL_LEN = 4096


@dataclass
class TimedMachine(StillProbe):
    """Workers and what their work costs. slower: how many times as slow as the others a worker is.

    compile_s: of a grammar.  room: how many workers fit into memory.  hosts: of all workers so far, in the order of
    their starts.
    """

    costs: StepCosts
    kv_tokens: int = 8192
    load_s: float = 1.0
    compile_s: float = 5.0
    room: int = 2
    slower: dict[str, float] = field(default_factory=dict)
    hosts: list[TimedHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def read(self, pids: Collection[int] = ()) -> list[DeviceReading]:
        """The CPU, with the memory that workers leave."""
        free = KEPT_FREE_BYTES + max(0, self.room - sum(host.alive for host in self.hosts)) * WORKER_BYTES
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]

    def new_host(self, worker_id: str, spec: ModelSpec) -> TimedHost:
        """Engine's new_host."""
        host = TimedHost(self, worker_id)
        self.hosts.append(host)
        return host


@dataclass
class _Job:
    """A request here. left: tokens that its answer has yet to get.  lost: of its time before its sequence was there."""

    sequence: Sequence
    left: int
    lost: TimeLost
    begun: bool = False


class TimedHost:
    """WorkerHost."""

    def __init__(self, machine: TimedMachine, worker_id: str) -> None:
        self.pid: int | None = None
        self.alive = False
        self._machine = machine
        self._id = worker_id
        self._slower = machine.slower.get(worker_id, 1.0)
        self._jobs: dict[str, _Job] = {}
        self._compiling: dict[str, asyncio.TimerHandle] = {}
        self._stepping = False
        self._gauges_s = 0.0
        self._steps = 0

    async def start(self, on_event: Callable[[protocol.Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """It runs at once."""
        self._loop = asyncio.get_running_loop()
        self._on_event, self._on_exit = on_event, on_exit
        self.alive = True
        self._later(0.0, self._on_event, protocol.Hello(pid=1))

    def send(self, command: protocol.Command) -> None:
        """Do it now."""
        if not self.alive:
            return
        match command:
            case protocol.Load():
                self._later(self._machine.load_s, self._load, command)
            case protocol.Submit(request=request):
                self._submit(request)
            case protocol.Cancel(request_id=request_id):
                self._forget(request_id)
            case protocol.SetMaxPrompts(max_prompts=max_prompts):
                self._scheduler.limits.set_max_prompts(max_prompts)
            case protocol.SetStepTokens(step_tokens=step_tokens):
                self._scheduler.limits.set_step_tokens(step_tokens)
            case protocol.Shutdown():
                self._later(0.0, self.die, WorkerExit(code=0))
            case _:
                pass

    async def stop(self, timeout_s: float) -> None:
        """It ends."""
        self.die(WorkerExit(code=0))

    def kill(self) -> None:
        """It ends."""
        self._later(0.0, self.die, WorkerExit(signal="SIGKILL"))

    def die(self, how: WorkerExit) -> None:
        """Its end, reported once."""
        if self.alive:
            self.alive = False
            self._jobs.clear()
            self._on_exit(how)

    def _later(self, delay_s: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, lambda: call(*args) if self.alive else None)

    def _load(self, load: protocol.Load) -> None:
        pages = self._machine.kv_tokens // PAGE_TOKENS
        self._scheduler = Scheduler(
            PagePool(pages, PAGE_TOKENS),
            max_prompts=load.max_prompts,
            step_tokens=load.step_tokens,
            max_model_len=MAX_MODEL_LEN,
            clock=self._loop.time,
        )
        model = LoadedModel(
            backend="timed", architecture="none", dtype="none", devices=("cpu",), vocab_size=257,
            max_model_len=MAX_MODEL_LEN, kv_tokens=self._machine.kv_tokens, page_tokens=PAGE_TOKENS, weights_bytes=1,
            kv_bytes=1, parameters=1,
        )  # fmt: skip
        self._on_event(protocol.Loaded(model=model, load_s=self._machine.load_s))

    def _submit(self, request: BackendRequest) -> None:
        """Begin with a request; one with a grammar, once that is compiled."""
        self._on_event(protocol.RequestStarted(request_id=request.id))
        if request.params.grammar is None:
            self._begin(request, TimeLost())
        else:
            lost = TimeLost(seconds={"grammar": self._machine.compile_s})
            self._compiling[request.id] = self._later(self._machine.compile_s, self._begin, request, lost)

    def _begin(self, request: BackendRequest, lost: TimeLost) -> None:
        sequence = Sequence(request.id, [*request.prompt_ids, *request.generated], len(request.prompt_ids))
        self._scheduler.submit(sequence)
        self._jobs[request.id] = _Job(sequence, (request.params.max_tokens or 0) - len(request.generated), lost)
        if not self._stepping:
            self._stepping = True
            self._later(0.0, self._step)

    def _forget(self, request_id: str) -> None:
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling.cancel()
        if (job := self._jobs.pop(request_id, None)) is not None:
            self._scheduler.remove(job.sequence)

    def _step(self) -> None:
        """Plan a step; it is over when its costs say so."""
        self._stepping = bool(self._jobs)
        if self._stepping:
            plan = self._scheduler.plan()
            step_s = self._slower * self._machine.costs.seconds(StepShape.of_plan(plan))
            self._later(step_s, self._end_step, plan, step_s)

    def _end_step(self, plan: BatchPlan, step_s: float) -> None:
        sampled = [sequence for sequence in plan.sampled_sequences if sequence.id in self._jobs]
        self._scheduler.commit(plan, ([0] for _ in plan.sampled_sequences))
        self._steps += 1
        outputs, answers = list[protocol.RequestOutput](), 0
        for sequence in sampled:
            job = self._jobs[sequence.id]
            job.left -= 1
            answers += job.begun
            output = protocol.RequestOutput(request_id=sequence.id, token_ids=[0], text="a")
            if not job.begun:
                job.begun, output.cached_tokens = True, sequence.cached_tokens or 0
            if job.left <= 0:
                self._forget(sequence.id)
                output.finish, output.lost = "length", self._lost(sequence.id, job)
            outputs.append(output)
        lost: dict[str, TimeLost] = {}
        if self._loop.time() - self._gauges_s >= GAUGE_S:
            self._gauges_s = self._loop.time()
            lost = {name: self._lost(name, job) for name, job in self._jobs.items()}
        self._on_event(
            protocol.StepBatch(
                outputs=outputs, stats=self._stats(), steps=1, answers=answers, step_s=step_s, lost=lost,
            )
        )  # fmt: skip
        if self.alive:
            self._step()

    def _lost(self, name: str, job: _Job) -> TimeLost:
        more = self._scheduler.times.lost(name)
        return TimeLost(seconds={**job.lost.seconds, **more.seconds}, behind=more.behind)

    def _stats(self) -> BackendStats:
        scheduler = self._scheduler
        return BackendStats(
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.num_pages,
            pages_free=scheduler.pool.free_pages,
            prompt_tokens_computed=scheduler.counters.prompt_tokens_computed,
            preemptions=scheduler.counters.preemptions,
            steps=self._steps,
            sequences=tuple(
                SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.num_tokens)
                for each in (*scheduler.running, *scheduler.waiting)
            ),
            limited=dict(scheduler.times.limited),
        )
