"""Rounds of requests that are the same in every run, and an engine that answers them."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import psutil

from console.bench.engine_target import all_ready
from console.planning.measuring import LocalModel, local_model
from engine.backends.base import BackendRequest
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import WorkerFailed

PROMPT_TOKENS = 128
OUTPUT_TOKENS = range(96, 161)
"""Answers of every length in it, so that requests end one by one, as in production."""


class Spread(msgspec.Struct, frozen=True):
    """Median, minimum and maximum over rounds; low, high: the 95% confidence interval of the median, by order
    statistics, which is all there is for fewer than six rounds."""

    median: float
    least: float
    most: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of one or more values."""
        ordered = sorted(values)
        outside = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))) - 1)
        return cls(statistics.median(ordered), ordered[0], ordered[-1], ordered[outside], ordered[-1 - outside])


class Timing(msgspec.Struct, frozen=True):
    """Tokens and seconds of a round, and the CPU that the process of the backend used for it."""

    tokens: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU per token."""
        return 1e6 * self.cpu_s / self.tokens


@dataclass(frozen=True, slots=True)
class Rounds:
    """count: rounds of each variant, after a warm-up that is not measured."""

    model: LocalModel
    count: int

    @classmethod
    def on(cls, model: str, *, threads: int | None, count: int) -> Rounds:
        """Rounds on a model of this machine. Raises EngineError where it cannot be loaded."""
        return cls(local_model(model, threads=threads), count)

    def spec_for(self, concurrent: int, threads: int) -> ModelSpec:
        """The model for a worker with `threads` threads and KV pages for 2 x `concurrent` requests."""
        max_tokens = PROMPT_TOKENS + OUTPUT_TOKENS.stop
        return msgspec.structs.replace(self.model.spec, threads=threads, kv_cache_tokens=2 * concurrent * max_tokens)

    def prompt(self, number: int) -> list[int]:
        """Token ids. No two prompts share a page."""
        return random.Random(number).choices(range(self.model.vocab_size), k=PROMPT_TOKENS)

    def params(self, number: int) -> SamplingParams:
        """Greedy, with a number of tokens that depends on the request's number alone."""
        tokens = OUTPUT_TOKENS[number * 37 % len(OUTPUT_TOKENS)]
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)

    def engine_request(self, number: int) -> GenerateRequest:
        """Request `number` for an engine."""
        return GenerateRequest(prompt_ids=self.prompt(number), params=self.params(number), source="bench")

    def backend_requests(self, numbers: Iterable[int]) -> Iterator[BackendRequest]:
        """The same requests for a backend."""
        for number in numbers:
            yield BackendRequest(id=str(number), prompt_ids=self.prompt(number), params=self.params(number))


def request_numbers(round_: int, concurrent: int) -> range:
    """The requests of a round: two per client, none of them in another round."""
    return range(2 * concurrent * round_, 2 * concurrent * (round_ + 1))


@asynccontextmanager
async def running_engine(
    rounds: Rounds, *, workers: int, threads: int, max_prompts: int, concurrent: int, max_queue: int = 1024
) -> AsyncIterator[Engine]:
    """An engine with `workers` workers of `threads` threads, each with KV pages for `concurrent` requests.

    Raises EngineError where the model cannot be loaded.
    """
    engine = Engine(EngineConfig(num_workers=workers, max_prompts=max_prompts, max_queue=max_queue, timeout_s=0))
    await engine.start()
    try:
        await engine.load(rounds.spec_for(concurrent, threads))
        await all_ready(engine, workers)
        yield engine
    finally:
        await engine.close(drain_s=0)


async def run_round(engine: Engine, rounds: Rounds, number: int, concurrent: int) -> Timing:
    """Send the requests of a round from `concurrent` clients, each one after the other. Raises EngineError."""
    numbers = iter(request_numbers(number, concurrent))

    async def client() -> int:
        return sum([await _output_tokens(engine, rounds, number) for number in numbers])

    started_s, cpu_s = time.perf_counter(), _workers_cpu_s(engine)
    tokens = sum(await asyncio.gather(*(client() for _ in range(concurrent))))
    return Timing(tokens, time.perf_counter() - started_s, _workers_cpu_s(engine) - cpu_s)


def worker_processes(engine: Engine) -> list[psutil.Process]:
    """The processes of an engine's workers."""
    return [psutil.Process(worker.pid) for worker in engine.snapshot().workers if worker.pid is not None]


def _workers_cpu_s(engine: Engine) -> float:
    times = [process.cpu_times() for process in worker_processes(engine)]
    return float(sum(each.user + each.system for each in times))


async def _output_tokens(engine: Engine, rounds: Rounds, number: int) -> int:
    """Read an answer to its end and return its tokens."""
    tokens = 0
    async for delta in engine.submit(rounds.engine_request(number)):
        tokens = delta.output_tokens
        if delta.finish not in (None, "length"):
            raise WorkerFailed(delta.error.message if delta.error else f"an answer ended with {delta.finish}")
    return tokens
