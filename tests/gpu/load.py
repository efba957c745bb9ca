"""Concurrent requests in a closed loop: c clients, each asking again as soon as its answer is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest

OUTPUT_TOKENS = 128


def prompt(number: int) -> list[int]:
    """About 128 tokens; no two prompts share a page, so no prefix cache helps."""
    return [3 + (number * 131 + index * 7 + number // 290) % 290 for index in range(112 + number * 5 % 33)]


@asynccontextmanager
async def serving(
    spec: ModelSpec, max_prompts: int, step_tokens: int = 512
) -> AsyncIterator[tuple[Engine, LoadedModel]]:
    """An engine with one process worker that has `spec` loaded."""
    engine = Engine(EngineConfig(max_prompts=max_prompts, max_queue=10_000, step_tokens=step_tokens))
    await engine.start()
    try:
        yield engine, await engine.load(spec)
    finally:
        await engine.close(drain_s=0)


async def engine_rate(engine: Engine, clients: int, requests: int, first: int) -> float:
    """Generated tokens per second of `requests` greedy answers, from prompt number `first` on."""
    numbers = iter(range(first, first + requests))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def client() -> int:
        tokens = 0
        for number in numbers:
            stream = engine.submit(GenerateRequest(prompt_ids=prompt(number), params=params))
            last = [delta async for delta in stream][-1]
            if last.finish != "length":
                raise RuntimeError(f"an answer ended with {last.finish}: {last.error}")
            tokens += last.output_tokens
        return tokens

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return tokens / (time.perf_counter() - started)


def requests_for(clients: int) -> int:
    """Answers to measure over, so that filling and draining the batch do not decide."""
    return max(3, 2 * clients)
