"""What a console has measured: the engine that serves, on its own loop, or a server, on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from console.bench.engine_target import EngineTarget
from console.bench.forms import check_size, check_trace
from console.bench.http_target import HttpTarget
from console.bench.kinds.base import Lab, Plan, fits
from console.bench.kinds.threads import Threads
from console.bench.result import BenchResult
from console.bench.run import Report, run_bench
from console.bench.target import Target
from console.bench.workload import Mix
from console.links.benches import BenchOrder, BenchServer
from console.loops import LoopThread
from engine.engine import Engine

_LETTERS_PER_TOKEN = 3
"""Of a trace's prompts, at least: to count them exactly takes as long as to make them."""


class Job(Protocol):
    """A bench that can begin. `name` is of the bench, `model` of what is asked."""

    @property
    def name(self) -> str:
        """Of the bench."""

    @property
    def model(self) -> str:
        """Of the model, or where it is asked while that is not known."""

    async def run(self, tell: Report, cancelled: Callable[[], bool]) -> BenchResult:
        """Measure. Raises EngineError."""


async def job_for(order: BenchOrder, plan: Plan, engine: Engine) -> Job:
    """What was ordered. Raises EngineError for what cannot be asked, or does not answer; nothing else is asked yet."""
    plan.check()
    if trace := getattr(plan, "trace", ""):
        await asyncio.to_thread(check_trace, trace)
    if order.server is not None:
        return await _server_job(order.server, plan)
    return await _engine_job(order.model, plan, engine)


class EngineJob:
    """Job: the engine that serves others, too."""

    def __init__(self, engine: Engine, target: EngineTarget, plan: Plan, model: str) -> None:
        self.name, self.model = plan.name, model
        self._engine, self._target, self._plan = engine, target, plan
        self._before = engine.snapshot().totals.requests

    async def run(self, tell: Report, cancelled: Callable[[], bool]) -> BenchResult:
        """Job: with a note of what others asked meanwhile."""
        result = await run_bench(self._plan, self._target, tell, cancelled)
        return _with_note(result, self._engine.snapshot().totals.requests - self._before - self._target.sent)


class ServerJob:
    """Job: a server. Its clients have a thread of their own, so that neither they nor the engine wait for the other."""

    def __init__(self, server: BenchServer, plan: Plan, model: str) -> None:
        self.name, self.model = plan.name, model or server.url
        self._server, self._plan = server, plan

    async def run(self, tell: Report, cancelled: Callable[[], bool]) -> BenchResult:
        """Job."""
        clients = LoopThread("bench")
        try:
            return await asyncio.wrap_future(clients.submit(self._measured(tell, cancelled)))
        finally:
            await asyncio.to_thread(clients.stop)

    async def _measured(self, tell: Report, cancelled: Callable[[], bool]) -> BenchResult:
        async with _target(self._server) as target:
            return await run_bench(self._plan, target, tell, cancelled)


async def _engine_job(model: str, plan: Plan, engine: Engine) -> EngineJob:
    serving = await engine.serving(model)
    target = EngineTarget(engine, model=serving.name, fresh=True)
    if isinstance(plan, Threads):
        plan = msgspec.structs.replace(plan, guessed=(target.guessing,))
    parts, mix = plan.parts(target), await _mix(plan, target)
    fits(target, mix)
    check_size(plan, parts, _prompt_tokens(mix), engine.config.max_queue)
    return EngineJob(engine, target, plan, serving.name)


async def _server_job(server: BenchServer, plan: Plan) -> ServerJob:
    async with _target(server) as target:
        plan.parts(target)
        await _mix(plan, target)
        await target.greet()
        return ServerJob(server, plan, target.info.model)


def _target(server: BenchServer) -> HttpTarget:
    return HttpTarget(server.url, dialect=server.dialect, model=server.model, key=server.key)


async def _mix(plan: Plan, target: Target) -> Mix:
    lab = Lab(target, plan.seed)
    await plan.prepare(lab)
    return plan.mix(lab)


def _prompt_tokens(mix: Mix) -> int:
    """Of one request: at most, or on average where a trace says."""
    shared = mix.prefix.tokens if mix.prefix else 0
    if mix.prompt.most is not None:
        return shared + mix.prompt.most
    return shared + sum(len(each.asked) for each in mix.trace) // (_LETTERS_PER_TOKEN * len(mix.trace))


def _with_note(result: BenchResult, others: int) -> BenchResult:
    if others <= 0:
        return result
    asked = "1 request of others was" if others == 1 else f"{others:,} requests of others were"
    return msgspec.structs.replace(result, notes=(*result.notes, f"{asked} taken meanwhile, which is in the numbers."))
