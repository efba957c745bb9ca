"""The engine's overhead over a bare loop over the backend: dispatch, channel, text and streams; time and memory."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable

import msgspec
import psutil

from console.bench.progress import Show
from console.bench.text import table
from engine.engine import Engine, GenerateRequest, RequestStream
from tools.internal_benches.bare_backend import BareLoop
from tools.internal_benches.rounds import PROMPT_TOKENS, Rounds, Spread, Timing, run_round, running_engine


class WaitingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per queued request with a prompt of `prompt_tokens` and a task that reads its stream.

    traced_bytes: allocated by Python.  rss_bytes: growth of the process.
    """

    waiting: int
    prompt_tokens: int
    traced_bytes: float
    rss_bytes: float


async def measure_waiting(rounds: Rounds, count: int, show: Show) -> WaitingReport:
    """Fill the queue with `count` requests, once per kind of memory. Raises EngineError."""
    show(f"memory of {count} waiting requests")
    async with running_engine(rounds, workers=1, threads=1, max_prompts=1, concurrent=1, max_queue=count) as engine:
        process = psutil.Process()
        rss_bytes = await _per_request(engine, rounds, count, lambda: process.memory_info().rss)
        tracemalloc.start()
        try:
            traced_bytes = await _per_request(engine, rounds, count, lambda: tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    return WaitingReport(waiting=count, prompt_tokens=PROMPT_TOKENS, traced_bytes=traced_bytes, rss_bytes=rss_bytes)


async def _per_request(engine: Engine, rounds: Rounds, count: int, used_bytes: Callable[[], int]) -> float:
    """Growth of `used_bytes` per request, with `count` requests queued behind a long one."""
    long = msgspec.structs.replace(rounds.params(0), max_tokens=None)
    first = engine.submit(GenerateRequest(prompt_ids=rounds.prompt(0), params=long))
    await anext(first)
    gc.collect()
    before = used_bytes()
    readers = [asyncio.create_task(_read(engine.submit(rounds.engine_request(number)))) for number in range(count)]
    await asyncio.sleep(0)  # each reader gets to its first wait
    gc.collect()
    grown = used_bytes() - before
    queued = engine.publish().queued
    await first.aclose()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return grown / queued


async def _read(stream: RequestStream) -> None:
    async with stream:
        async for _ in stream:
            pass


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the bare loop and of the engine.

    overhead: share of the bare loop's throughput that the engine costs, from pairs of neighbouring rounds.
    *_cpu_us: microseconds of CPU per token of the bare loop, of the engine's worker, and of the process of the engine
    and its clients, including threads that spin at a barrier.
    """

    model: str
    dtype: str
    threads: int
    concurrent: int
    rounds: int
    bare: Spread
    engine: Spread
    overhead: Spread
    bare_cpu_us: Spread
    worker_cpu_us: Spread
    engine_cpu_us: Spread
    memory: WaitingReport


async def measure_overhead(rounds: Rounds, concurrent: int, waiting: int, show: Show) -> OverheadReport:
    """Interleave rounds of both, after a warm-up of each. Raises EngineError."""
    memory = await measure_waiting(rounds, waiting, show)
    show("loading")
    timings: list[tuple[Timing, Timing, float]] = []
    async with (
        BareLoop(rounds, concurrent) as bare,
        running_engine(
            rounds, workers=1, threads=rounds.model.threads, max_prompts=concurrent, concurrent=concurrent
        ) as engine,
    ):
        model = engine.snapshot().status.model
        assert model is not None
        for number in range(rounds.count + 1):
            show(f"round {number} of {rounds.count}" if number else "warming up")
            without = await bare.round(number)
            cpu_s = time.process_time()
            timings.append((without, await run_round(engine, rounds, number, concurrent), time.process_time() - cpu_s))
    counted = timings[1:]
    return OverheadReport(
        model=rounds.model.spec.name,
        dtype=model.dtype,
        threads=rounds.model.threads,
        concurrent=concurrent,
        rounds=rounds.count,
        bare=Spread.of(without.tokens_per_s for without, _, _ in counted),
        engine=Spread.of(with_.tokens_per_s for _, with_, _ in counted),
        overhead=Spread.of(1 - with_.tokens_per_s / without.tokens_per_s for without, with_, _ in counted),
        bare_cpu_us=Spread.of(without.cpu_us for without, _, _ in counted),
        worker_cpu_us=Spread.of(with_.cpu_us for _, with_, _ in counted),
        engine_cpu_us=Spread.of(1e6 * cpu_s / with_.tokens for _, with_, cpu_s in counted),
        memory=memory,
    )


def overhead_text(report: OverheadReport) -> str:
    """The report as text."""
    rates = (("bare backend loop", report.bare), ("engine", report.engine))
    cpu = (
        ("CPU of the bare loop", report.bare_cpu_us),
        ("CPU of the engine's worker", report.worker_cpu_us),
        ("CPU of the engine's process", report.engine_cpu_us),
    )
    overhead, memory = report.overhead, report.memory
    rows = [
        *_rows(rates, "{:.0f}", " tok/s"),
        ["overhead of the engine", f"{overhead.median:.1%}", f"{overhead.least:.1%} to {overhead.most:.1%}"],
        *_rows(cpu, "{:.1f}", " us/token"),
    ]
    return "\n".join(
        (
            f"{report.model} ({report.dtype}), {report.concurrent} concurrent requests, {report.threads} threads, "
            f"{report.rounds} rounds of each",
            "",
            table(["", "median", "least to most"], rows),
            "",
            f"{memory.waiting} queued requests, prompts of {memory.prompt_tokens} tokens: "
            f"{memory.traced_bytes / 1024:.1f} KiB each allocated by Python, "
            f"{memory.rss_bytes / 1024:.1f} KiB each of RSS",
        )
    )


def _rows(named: Iterable[tuple[str, Spread]], form: str, unit: str) -> list[list[str]]:
    return [
        [name, form.format(spread.median) + unit, f"{form.format(spread.least)} to {form.format(spread.most)}"]
        for name, spread in named
    ]
