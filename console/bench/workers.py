"""Several workers with fewer threads each, or one with all of them: throughput, and what their memory comes to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from console.bench.engines import all_ready, run_round, running, worker_processes
from console.bench.plan import Plan, Spread
from console.bench.progress import Show
from console.bench.text import table
from engine.engine import Engine
from engine.errors import InvalidRequest

CONCURRENT = (1, 8, 32)
WORKERS = (1, 2)
MEMORY_OF = (1, 2, 4)
_MIB = 1 << 20


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of all workers together."""

    workers: int
    threads_each: int
    concurrent: int
    tokens_per_s: Spread


class WorkersMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of all worker processes together. rss_bytes counts what they share once for each of them, pss_bytes once;
    pss_bytes is None where the system does not tell."""

    workers: int
    rss_bytes: int
    pss_bytes: int | None


class WorkersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The table. weights_bytes, shared_bytes: of one worker, and what of it all have once."""

    model: str
    dtype: str
    threads: int
    rounds: int
    weights_bytes: int
    shared_bytes: int
    rates: tuple[Rate, ...]
    memory: tuple[WorkersMemory, ...]


async def measure_workers(
    plan: Plan, show: Show, *, concurrent: Sequence[int] = CONCURRENT, memory_of: Sequence[int] = MEMORY_OF
) -> WorkersReport:
    """Memory of a growing number of workers, then rounds of both ways by turns. Raises EngineError."""
    if plan.threads < WORKERS[-1]:
        raise InvalidRequest(
            f"{WORKERS[-1]} workers need as many threads, and there is {plan.threads}", param="threads"
        )
    memory = []
    async with running(plan, workers=1, threads=1, max_prompts=8, concurrent=8) as engine:
        model = engine.snapshot().status.model
        assert model is not None
        for count in memory_of:
            show(f"memory of {count} worker{'s' * (count > 1)}")
            await engine.reconfigure(workers=count)
            await all_ready(engine, count)
            await run_round(engine, plan, 0, 8 * count)
            memory.append(_memory(engine))
    return WorkersReport(
        model=plan.spec.name,
        dtype=model.dtype,
        threads=plan.threads,
        rounds=plan.rounds,
        weights_bytes=model.weights_bytes,
        shared_bytes=model.shared_bytes,
        rates=await _rates(plan, concurrent, show),
        memory=tuple(memory),
    )


async def _rates(plan: Plan, concurrents: Sequence[int], show: Show) -> tuple[Rate, ...]:
    most = max(concurrents)
    found: dict[tuple[int, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        show("loading")
        engines = {
            workers: await stack.enter_async_context(
                running(plan, workers=workers, threads=plan.threads // workers, max_prompts=most, concurrent=most)
            )
            for workers in WORKERS
        }
        for number in range(plan.rounds + 1):
            show(f"round {number} of {plan.rounds}" if number else "warming up")
            for concurrent in concurrents:
                for workers, engine in engines.items():
                    timing = await run_round(engine, plan, number, concurrent)
                    if number:
                        found.setdefault((concurrent, workers), []).append(timing.tokens_per_s)
    return tuple(
        Rate(
            workers=workers,
            threads_each=plan.threads // workers,
            concurrent=concurrent,
            tokens_per_s=Spread.of(rates),
        )
        for (concurrent, workers), rates in found.items()
    )


def _memory(engine: Engine) -> WorkersMemory:
    processes = worker_processes(engine)
    pss = [getattr(process.memory_full_info(), "pss", None) for process in processes]
    known = [size for size in pss if size is not None]
    return WorkersMemory(
        workers=len(processes),
        rss_bytes=sum(process.memory_info().rss for process in processes),
        pss_bytes=sum(known) if len(known) == len(processes) else None,
    )


def workers_text(report: WorkersReport) -> str:
    """The report for a person."""
    rates = {(rate.concurrent, rate.workers): rate for rate in report.rates}
    ways = sorted({(rate.workers, rate.threads_each) for rate in report.rates})
    header = ["tokens per second", *(f"{workers} x {threads} threads" for workers, threads in ways)]
    rows = [
        [f"{concurrent} at once", *(_spread(rates[concurrent, workers].tokens_per_s) for workers, _ in ways)]
        for concurrent in sorted({rate.concurrent for rate in report.rates})
    ]
    sizes = [
        [f"{each.workers}", _mib(each.rss_bytes), _mib(each.pss_bytes), _mib(each.pss_bytes, each.workers)]
        for each in report.memory
    ]
    return "\n".join(
        (
            f"{report.model} ({report.dtype}), {report.threads} threads in all, {report.rounds} rounds of each",
            "",
            table(header, rows),
            "",
            table(["workers", "RSS of all", "PSS of all", "PSS of each"], sizes),
            "",
            f"Weights of one: {_mib(report.weights_bytes)}. In one mapping for all: {_mib(report.shared_bytes)}.",
        )
    )


def _spread(spread: Spread) -> str:
    return f"{spread.median:.0f} ({spread.least:.0f} to {spread.most:.0f})"


def _mib(size_bytes: int | None, among: int = 1) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / among / _MIB:,.0f} MiB"
