"""Tokens per second and TTFT of the whole engine, in process and over HTTP: `python -m tools.performance.throughput`.

Closed loop: c clients that begin together, each asking again as soon as its answer is complete; about 128 prompt
tokens in, exactly 128 out, greedy. TTFT is the client's, of the requests that arrive together and of all. Rounds of
all settings are interleaved; medians are printed. Synthetic shapes have random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, get_args

import aiohttp

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from engine.config import AttentionName, EngineConfig, ModelSpec, SamplingParams, WeightsName
from engine.engine import Engine, GenerateRequest
from tools.synthetic_models import make_synthetic

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
SHAPES = ("135m", "0.5b")


class Answer(NamedTuple):
    """Tokens of an answer, and seconds to the first of them."""

    tokens: int
    ttft_s: float


class Round(NamedTuple):
    """A round: generated tokens per second; TTFT p50 of the requests that arrived together, and p50 and p99 of all, in
    milliseconds."""

    rate: float
    together_ms: float
    p50_ms: float
    p99_ms: float


Ask = Callable[[int], Awaitable[Answer]]


def prompt(number: int) -> list[int]:
    """About PROMPT_TOKENS ids, of which no two prompts share a page."""
    stride = 7 + number // 290
    return [3 + (number * 131 + index * stride) % 290 for index in range(PROMPT_TOKENS - 16 + number * 5 % 33)]


def in_process(engine: Engine) -> Ask:
    """Submit to the engine itself."""

    async def ask(number: int) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        began_s, ttft_s, last = time.perf_counter(), 0.0, None
        async for delta in engine.submit(GenerateRequest(prompt_ids=prompt(number), params=params)):
            ttft_s, last = ttft_s or time.perf_counter() - began_s, delta
        assert last is not None and last.finish == "length", last
        return Answer(last.output_tokens, ttft_s)

    return ask


def over_http(session: aiohttp.ClientSession, url: str) -> Ask:
    """Stream a completion."""

    async def ask(number: int) -> Answer:
        body = {"prompt": prompt(number), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage: dict[str, int] = {}
        began_s, ttft_s = time.perf_counter(), 0.0
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    usage = json.loads(line[6:]).get("usage") or usage
        return Answer(int(usage["completion_tokens"]), ttft_s)

    return ask


async def closed_loop(ask: Ask, clients: int, requests: int, first: int) -> Round:
    """Measure `requests` answers to `clients` clients."""
    numbers = iter(range(first, first + requests))

    async def client() -> list[Answer]:
        return [await ask(number) for number in numbers]

    started = time.perf_counter()
    answers = await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - started
    ttft_ms = sorted(1e3 * each.ttft_s for client_answers in answers for each in client_answers)
    return Round(
        rate=sum(each.tokens for client_answers in answers for each in client_answers) / seconds,
        together_ms=statistics.median(1e3 * client_answers[0].ttft_s for client_answers in answers),
        p50_ms=statistics.median(ttft_ms),
        p99_ms=ttft_ms[round(0.99 * (len(ttft_ms) - 1))],
    )


@asynccontextmanager
async def serving(spec: ModelSpec, clients: int) -> AsyncIterator[tuple[Engine, str]]:
    """An engine with the model loaded and its API on a free port."""
    engine = Engine(EngineConfig(max_prompts=clients, max_queue=10_000))
    await engine.start()
    api = ApiServer(engine, ApiSettings(port=0))
    try:
        loaded = await engine.load(spec)
        seconds = engine.snapshot().workers[0].load_s
        print(f"{spec.name}: {loaded.parameters / 1e6:.0f} M parameters, {loaded.dtype}, loaded in {seconds:.2f} s")
        await api.start()
        yield engine, api.status().url
    finally:
        await api.stop(drain_s=0)
        await engine.close(drain_s=0)


async def measure(spec: ModelSpec, given: argparse.Namespace) -> None:
    """Print one line for each number of clients."""
    async with serving(spec, max(given.clients)) as (engine, url), aiohttp.ClientSession() as session:
        ways = {"HTTP": over_http(session, url), "in process": in_process(engine)}
        found: dict[tuple[str, int], list[Round]] = {}
        first = 0
        for round_ in range(given.rounds + 1):
            for count in given.clients:
                for way, ask in ways.items():
                    measured = await closed_loop(ask, count, max(2, 2 * count), first)
                    first += 2 * count + 2
                    if round_:  # the first round warms up
                        found.setdefault((way, count), []).append(measured)
        for (way, count), rounds in found.items():
            median = Round(*map(statistics.median, zip(*rounds, strict=True)))
            rates = [each.rate for each in rounds]
            line = f"c={count:<3} {way:10} {median.rate:7.1f} tok/s (spread {max(rates) - min(rates):.1f})"
            line += f", TTFT p50 {median.together_ms:.0f} ms of those that arrive together, p50 {median.p50_ms:.0f} ms"
            print(f"{line} and p99 {median.p99_ms:.0f} ms of all")


def spec_of(model: Path, given: argparse.Namespace) -> ModelSpec:
    """How a folder is loaded."""
    return ModelSpec(
        path=model,
        name=model.name,
        weights=given.weights,
        attention=given.attention,
        cache_bits=given.cache_bits,
    )


def main() -> None:
    """Measure a folder or the synthetic shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder; else the synthetic shapes")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", choices=get_args(WeightsName), default="auto")
    parser.add_argument("--attention", choices=get_args(AttentionName), default="auto")
    parser.add_argument("--cache-bits", type=int, choices=(16, 8, 4), default=16)
    given = parser.parse_args()
    if given.model:
        asyncio.run(measure(spec_of(given.model, given), given))
        return
    for shape in given.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            model = make_synthetic(shape, Path(folder) / shape)
            asyncio.run(measure(spec_of(model, given), given))


if __name__ == "__main__":
    main()
