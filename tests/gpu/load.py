"""The whole engine under load: c clients in a closed loop, each sending again as soon as its answer is complete."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.metrics.distributions import percentiles
from tests.gpu.place import Place
from tests.gpu.report import Row, measured

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


@dataclass(slots=True)
class Latencies:
    """Seconds from each request to its first token, and between tokens."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        (first_s,), (gap_s,) = percentiles(self.first_s, 0.5), percentiles(self.gaps_s, 0.95)
        if first_s is None or gap_s is None:
            return "no latencies"
        return f"first token {first_s * 1e3:.1f} ms (p50), between tokens {gap_s * 1e3:.1f} ms (p95)"


async def engine_rate(
    engine: Engine, clients: int, requests: int, first: int, latencies: Latencies | None = None
) -> float:
    """Generated tokens per second of `requests` greedy answers, from prompt number `first` on; what each took goes to
    `latencies`."""
    numbers = iter(range(first, first + requests))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def client() -> int:
        tokens = 0
        for number in numbers:
            stream = engine.submit(GenerateRequest(prompt_ids=prompt(number), params=params))
            deltas = [delta async for delta in stream]
            last = deltas[-1]
            if last.finish != "length":
                raise RuntimeError(f"an answer ended with {last.finish}: {last.error}")
            tokens += last.output_tokens
            if latencies is not None:
                latencies.first_s += [] if last.ttft_s is None else [last.ttft_s]
                latencies.gaps_s += [gap for delta in deltas for gap in delta.gaps]
        return tokens

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return tokens / (time.perf_counter() - started)


def requests_for(clients: int) -> int:
    """Answers to measure over, so that filling and draining the batch do not decide."""
    return max(3, 2 * clients)


async def rate_rows(
    place: Place, serves: tuple[Engine, LoadedModel], name: str, clients: Sequence[int]
) -> AsyncGenerator[Row, None]:
    """Generated tokens per second for each number of concurrent requests: medians of rounds. serves: as `serving`."""
    engine, model = serves
    parts = (f"{model.parameters / 1e9:.2f}B {model.dtype}", f"attention {model.attention}", model.linear)
    detail = ", ".join(part for part in parts if part)
    first = 0
    for number, count in enumerate(clients):
        rates: list[float] = []
        latencies = Latencies()
        for counted in place.rounds(len(clients) - number):
            rate = await engine_rate(engine, count, requests_for(count), first, latencies if counted else None)
            first += requests_for(count)
            if counted:
                rates.append(rate)
        yield measured(f"{name}: {count} requests", statistics.median(rates), "tok/s", f"{latencies}; {detail}")


def as_they_come(rows: AsyncGenerator[Row, None]) -> Generator[Row, None, None]:
    """Rows of an asynchronous check, each as soon as it is there; its loop stands still between them."""

    async def following() -> Row | None:
        return await anext(rows, None)

    with asyncio.Runner() as runner:
        try:
            while (row := runner.run(following())) is not None:
                yield row
        finally:
            runner.run(rows.aclose())
