"""Tokens per second of the whole engine, in process and over HTTP. `python -m tools.performance.throughput --help`

Closed loop: c clients, each asking again as soon as its answer is complete; about 128 prompt tokens in, exactly
128 out, greedy. Rounds of all settings are interleaved; medians are printed. Synthetic shapes have random weights.

`--neighbours 0 1 2` measures beside as many busy processes of the lowest priority, over HTTP alone, and what share of
the quiet rate is left: `--shape 135m --clients 1 8 --neighbours 0 1 2`. With `--own-sessions` each is in a session of
its own, where Linux (`kernel.sched_autogroup_enabled`) gives it a fair share of its core, whatever its priority.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import get_args

import aiohttp

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from engine.config import AttentionName, EngineConfig, ModelSpec, SamplingParams, WeightsName
from engine.engine import Engine, GenerateRequest
from tools.synthetic_models import make_synthetic

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
SHAPES = ("135m", "0.5b")
Ask = Callable[[int], Awaitable[int]]


def prompt(number: int) -> list[int]:
    """About PROMPT_TOKENS ids, of which no two prompts share a page."""
    return [3 + (number * 131 + index * 7) % 290 for index in range(PROMPT_TOKENS - 16 + number * 5 % 33)]


def in_process(engine: Engine) -> Ask:
    """Submit to the engine itself."""

    async def ask(number: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        stream = engine.submit(GenerateRequest(prompt_ids=prompt(number), params=params))
        last = [delta async for delta in stream][-1]
        assert last.finish == "length", last
        return last.output_tokens

    return ask


def over_http(session: aiohttp.ClientSession, url: str) -> Ask:
    """Stream a completion."""

    async def ask(number: int) -> int:
        body = {"prompt": prompt(number), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage: dict[str, int] = {}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
        return int(usage["completion_tokens"])

    return ask


async def closed_loop(ask: Ask, clients: int, requests: int, first: int) -> float:
    """Generated tokens per second of `requests` answers to `clients` clients."""
    numbers = iter(range(first, first + requests))

    async def client() -> int:
        return sum([await ask(number) for number in numbers])

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return tokens / (time.perf_counter() - started)


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


@contextmanager
def busy_processes(count: int, *, own_sessions: bool) -> Iterator[None]:
    """Processes of the lowest priority that compute all the time."""
    command = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command, start_new_session=own_sessions) for _ in range(count)]
    try:
        if started:
            time.sleep(0.5)  # until they run
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


async def measure(spec: ModelSpec, given: argparse.Namespace) -> None:
    """Print one line for each number of clients and of neighbours."""
    async with serving(spec, max(given.clients)) as (engine, url), aiohttp.ClientSession() as session:
        ways = {"HTTP": over_http(session, url)}
        if given.neighbours == [0]:
            ways["in process"] = in_process(engine)
        rates: dict[tuple[str, int, int], list[float]] = {}
        first = 0
        for round_ in range(given.rounds + 1):
            for neighbours in given.neighbours[: None if round_ else 1]:  # the first round warms up
                with busy_processes(neighbours, own_sessions=given.own_sessions):
                    for count in given.clients:
                        for way, ask in ways.items():
                            rate = await closed_loop(ask, count, max(2, 2 * count), first)
                            first += 2 * count + 2
                            if round_:
                                rates.setdefault((way, count, neighbours), []).append(rate)
        medians = {key: statistics.median(each) for key, each in rates.items()}
        for (way, count, neighbours), median in medians.items():
            found = rates[way, count, neighbours]
            line = f"c={count:<3} {way:10} {median:7.1f} tok/s (spread {max(found) - min(found):.1f})"
            if given.neighbours != [0]:
                quiet = medians.get((way, count, 0))
                line += f", {neighbours} busy" + (f": {median / quiet:.0%} of quiet" if quiet else "")
            print(line)


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
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0], help="busy processes of the lowest priority")
    parser.add_argument("--own-sessions", action="store_true", help="each neighbour in a session of its own")
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
