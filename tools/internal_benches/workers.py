"""Several workers with fewer threads each against one with all of them: throughput and memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from console.bench.engine_target import all_ready
from console.bench.progress import Show
from console.bench.text import table
from engine.engine import Engine
from engine.errors import InvalidRequest
from tools.internal_benches.rounds import Rounds, Spread, run_round, running_engine, worker_processes

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
    """Memory of all worker processes together. Shared memory counts once per process in rss_bytes, once in pss_bytes.
    pss_bytes: None where the system does not report it."""

    workers: int
    rss_bytes: int
    pss_bytes: int | None


class WorkersReport(msgspec.Struct, frozen=True, kw_only=True):
    """weights_bytes: of one worker.  shared_bytes: the part of them that all workers share."""

    model: str
    dtype: str
    threads: int
    rounds: int
    weights_bytes: int
    shared_bytes: int
    rates: tuple[Rate, ...]
    memory: tuple[WorkersMemory, ...]


async def measure_workers(
    rounds: Rounds, show: Show, *, concurrent: Sequence[int] = CONCURRENT, memory_of: Sequence[int] = MEMORY_OF
) -> WorkersReport:
    """Measure the memory of a growing number of workers, then interleave rounds of both. Raises EngineError."""
    if rounds.model.threads < WORKERS[-1]:
        raise InvalidRequest(
            f"{WORKERS[-1]} workers need as many threads; available: {rounds.model.threads}", param="threads"
        )
    memory = []
    async with running_engine(rounds, workers=1, threads=1, max_prompts=8, concurrent=8) as engine:
        model = engine.snapshot().status.model
        assert model is not None
        for count in memory_of:
            show(f"memory of {count} worker{'s' * (count > 1)}")
            await engine.reconfigure(num_workers=count)
            await all_ready(engine, count)
            await run_round(engine, rounds, 0, 8 * count)
            memory.append(_memory(engine))
    return WorkersReport(
        model=rounds.model.spec.name,
        dtype=model.dtype,
        threads=rounds.model.threads,
        rounds=rounds.count,
        weights_bytes=model.weights_bytes,
        shared_bytes=model.shared_bytes,
        rates=await _rates(rounds, concurrent, show),
        memory=tuple(memory),
    )


async def _rates(rounds: Rounds, concurrents: Sequence[int], show: Show) -> tuple[Rate, ...]:
    max_concurrent = max(concurrents)
    measured: dict[tuple[int, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        show("loading")
        engines = {
            workers: await stack.enter_async_context(
                running_engine(
                    rounds,
                    workers=workers,
                    threads=rounds.model.threads // workers,
                    max_prompts=max_concurrent,
                    concurrent=max_concurrent,
                )
            )
            for workers in WORKERS
        }
        for number in range(rounds.count + 1):
            show(f"round {number} of {rounds.count}" if number else "warming up")
            for concurrent in concurrents:
                for workers, engine in engines.items():
                    timing = await run_round(engine, rounds, number, concurrent)
                    if number:
                        measured.setdefault((concurrent, workers), []).append(timing.tokens_per_s)
    return tuple(
        Rate(
            workers=workers,
            threads_each=rounds.model.threads // workers,
            concurrent=concurrent,
            tokens_per_s=Spread.of(rates),
        )
        for (concurrent, workers), rates in measured.items()
    )


def _memory(engine: Engine) -> WorkersMemory:
    processes = worker_processes(engine)
    pss = [getattr(process.memory_full_info(), "pss", None) for process in processes]
    sizes = [size for size in pss if size is not None]
    return WorkersMemory(
        workers=len(processes),
        rss_bytes=sum(process.memory_info().rss for process in processes),
        pss_bytes=sum(sizes) if len(sizes) == len(processes) else None,
    )


def workers_text(report: WorkersReport) -> str:
    """The report as text."""
    rates = {(rate.concurrent, rate.workers): rate for rate in report.rates}
    ways = sorted({(rate.workers, rate.threads_each) for rate in report.rates})
    header = ["tokens per second", *(f"{workers} x {threads} threads" for workers, threads in ways)]
    rows = [
        [f"{concurrent} concurrent", *(_spread(rates[concurrent, workers].tokens_per_s) for workers, _ in ways)]
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
            f"Weights of one worker: {_mib(report.weights_bytes)}, shared by all: {_mib(report.shared_bytes)}.",
        )
    )


def _spread(spread: Spread) -> str:
    return f"{spread.median:.0f} ({spread.least:.0f} to {spread.most:.0f})"


def _mib(size_bytes: int | None, among: int = 1) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / among / _MIB:,.0f} MiB"
