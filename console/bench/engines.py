"""Engines to be measured, and closed loops of clients over them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from console.bench.plan import Plan, Timing, numbers_of
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import WorkerFailed

_POLL_S = 0.05


@asynccontextmanager
async def running(
    plan: Plan, *, workers: int, threads: int, max_prompts: int, concurrent: int, max_queue: int = 1024
) -> AsyncIterator[Engine]:
    """An engine with `workers` workers of `threads` threads, each with KV pages for `concurrent` requests.

    Raises EngineError where the model cannot be loaded.
    """
    engine = Engine(EngineConfig(num_workers=workers, max_prompts=max_prompts, max_queue=max_queue, timeout_s=0))
    await engine.start()
    try:
        await engine.load(plan.spec_for(concurrent, threads))
        await all_ready(engine, workers)
        yield engine
    finally:
        await engine.close(drain_s=0)


async def all_ready(engine: Engine, workers: int, model: str = "") -> None:
    """Wait until so many workers answer, of all models or of one. Raises WorkerFailed where one cannot."""
    while True:
        readings = [worker for worker in engine.snapshot().workers if model in ("", worker.model)]
        failed = next((worker for worker in readings if worker.state in ("failed", "dead")), None)
        if failed is not None:
            reason = failed.last_error.message if failed.last_error else "it did not say why"
            raise WorkerFailed(f"worker {failed.id} did not get ready: {reason}", worker=failed.id)
        if [worker.state for worker in readings] == ["ready"] * workers:
            return
        await asyncio.sleep(_POLL_S)


async def run_round(engine: Engine, plan: Plan, number: int, concurrent: int) -> Timing:
    """The requests of a round by `concurrent` clients, each asking again once it is answered. Raises EngineError."""
    numbers = iter(numbers_of(number, concurrent))

    async def client() -> int:
        return sum([await _ask(engine, plan, number) for number in numbers])

    started_s, cpu_s = time.perf_counter(), _workers_cpu_s(engine)
    tokens = sum(await asyncio.gather(*(client() for _ in range(concurrent))))
    return Timing(tokens, time.perf_counter() - started_s, _workers_cpu_s(engine) - cpu_s)


def worker_processes(engine: Engine) -> list[psutil.Process]:
    """The processes of its workers."""
    return [psutil.Process(worker.pid) for worker in engine.snapshot().workers if worker.pid is not None]


def _workers_cpu_s(engine: Engine) -> float:
    times = [process.cpu_times() for process in worker_processes(engine)]
    return float(sum(each.user + each.system for each in times))


async def _ask(engine: Engine, plan: Plan, number: int) -> int:
    """Tokens of an answer that was read to its end."""
    tokens = 0
    async for delta in engine.submit(plan.for_engine(number)):
        tokens = delta.output_tokens
        if delta.finish not in (None, "length"):
            raise WorkerFailed(delta.error.message if delta.error else f"an answer ended with {delta.finish}")
    return tokens
