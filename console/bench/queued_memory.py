"""The memory that a request takes in this process while it waits for a worker."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import msgspec
import psutil

from console.bench.engines import running
from console.bench.plan import PROMPT_TOKENS, Plan
from console.bench.progress import Show
from engine.engine import Engine, GenerateRequest, RequestStream


class WaitingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per request that waits, each with a prompt of `prompt_tokens` and a task that reads its stream.

    traced_bytes: what Python allocated.  rss_bytes: what the process grew by.
    """

    waiting: int
    prompt_tokens: int
    traced_bytes: float
    rss_bytes: float


async def measure_waiting(plan: Plan, count: int, show: Show) -> WaitingReport:
    """Fill the queue with `count` requests, once for each reading. Raises EngineError."""
    show(f"memory of {count} waiting requests")
    async with running(plan, workers=1, threads=1, max_prompts=1, concurrent=1, max_queue=count) as engine:
        process = psutil.Process()
        rss_bytes = await _per_request(engine, plan, count, lambda: process.memory_info().rss)
        tracemalloc.start()
        try:
            traced_bytes = await _per_request(engine, plan, count, lambda: tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    return WaitingReport(waiting=count, prompt_tokens=PROMPT_TOKENS, traced_bytes=traced_bytes, rss_bytes=rss_bytes)


async def _per_request(engine: Engine, plan: Plan, count: int, used_bytes: Callable[[], int]) -> float:
    """What `used_bytes` grows by for each of `count` requests that wait behind a long one."""
    long = msgspec.structs.replace(plan.params(0), max_tokens=None)
    first = engine.submit(GenerateRequest(prompt_ids=plan.prompt(0), params=long))
    await anext(first)
    gc.collect()
    before = used_bytes()
    readers = [asyncio.create_task(_read(engine.submit(plan.for_engine(number)))) for number in range(count)]
    await asyncio.sleep(0)  # each reader gets to its first wait
    gc.collect()
    grown = used_bytes() - before
    queued = engine.snapshot().queued
    await first.aclose()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return grown / queued


async def _read(stream: RequestStream) -> None:
    async with stream:
        async for _ in stream:
            pass
