"""The pace at which tokens reach their clients: gaps between the chunks of streams over HTTP, beside the times between
tokens as the worker made them, which every ITL shown consists of.

    python -m tools.performance.token_flow [--shape 135m | --model DIR] [--streams 16 32] [--tokens 256] [--rounds 2]

Streams begin together. What counts lies between the first token of the last one and the last token of the first one, so
that no step has a prompt. The engine and its API are in this process, the worker and the clients in processes of their
own. Where no two steps fit into 25 ms, tokens are sent step by step: p99 of the gaps is held against 1.5 times the
worker's median. About a minute, on a machine with nothing else running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import aiohttp
import msgspec

from engine.config import ModelSpec, WeightsName
from engine.metrics.distributions import percentiles
from engine.metrics.meter import Meter
from engine.system.tasks import reduce_gc_pauses
from engine.worker_process.outbox import MAX_INTERVAL_S
from tools.performance.throughput import SHAPES, prompt, serving
from tools.synthetic_models import make_synthetic

GOAL = 1.5
WARM_UP_TOKENS = 32


class Seen(msgspec.Struct, frozen=True):
    """Gaps that clients saw between began_s and ended_s, of the system's monotonic clock. gaps_s: between two chunks of
    a stream.  chunks, tokens: in all."""

    began_s: float
    ended_s: float
    gaps_s: list[float]
    chunks: int
    tokens: int


class Round(NamedTuple):
    """The worker's times between tokens and the clients' gaps, in seconds; tokens in a chunk on average."""

    made_p50_s: float
    made_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    longest_s: float
    tokens_per_chunk: float

    @classmethod
    def of(cls, seen: Seen, made: list[tuple[float, float]]) -> Round:
        """made: when each token came to the engine, and the seconds before it."""
        if not seen.gaps_s:
            raise SystemExit("the first answer was complete before the last one began: ask for more --tokens")
        own = [seconds for at_s, seconds in made if seen.began_s <= at_s <= seen.ended_s]
        made_p50_s, made_p99_s = (each or 0.0 for each in percentiles(own, 0.5, 0.99))
        gap_p50_s, gap_p99_s, longest_s = (each or 0.0 for each in percentiles(seen.gaps_s, 0.5, 0.99, 1.0))
        return cls(made_p50_s, made_p99_s, gap_p50_s, gap_p99_s, longest_s, seen.tokens / seen.chunks)

    @property
    def ratio(self) -> float:
        """The gaps' 99th percentile over the median time between tokens."""
        return self.gap_p99_s / self.made_p50_s

    def text(self) -> str:
        """A line."""
        made, gap = (self.made_p50_s, self.made_p99_s), (self.gap_p50_s, self.gap_p99_s, self.longest_s)
        return (
            f"worker p50 {made[0] * 1e3:.1f}, p99 {made[1] * 1e3:.1f} ms; clients p50 {gap[0] * 1e3:.1f}, p99 "
            f"{gap[1] * 1e3:.1f}, longest {gap[2] * 1e3:.1f} ms; {self.tokens_per_chunk:.2f} tokens a chunk; "
            f"p99 at clients is {self.ratio:.2f} times the worker's p50"
        )


def verdict(rounds: list[Round]) -> str:
    """Return a line for rounds of as many streams: their medians, and is the goal met."""
    median = Round(*map(statistics.median, zip(*rounds, strict=True)))
    if median.made_p50_s <= MAX_INTERVAL_S / 2:
        return f"{median.text()}: steps of up to {MAX_INTERVAL_S * 1e3:.0f} ms in all may be sent together"
    return f"{median.text()}: {'within' if median.ratio <= GOAL else 'above'} {GOAL:g}"


async def clients(url: str, streams: int, tokens: int, first: int) -> Seen:
    """Read this number of streams at once. first: number of the first prompt."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        found = await asyncio.gather(
            *(_stream(session, url, number, tokens) for number in range(first, first + streams))
        )
    began_s, ended_s = max(each[0][0] for each in found), min(each[-1][0] for each in found)
    gaps = [
        later - earlier
        for each in found
        for (earlier, _), (later, _) in pairwise(each)
        if began_s <= earlier and later <= ended_s
    ]
    return Seen(began_s, ended_s, gaps, sum(map(len, found)), sum(count for each in found for _, count in each))


async def _stream(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> list[tuple[float, int]]:
    """Return when each chunk came, and how many tokens it had, those without text too."""
    body: dict[str, object] = {"prompt": prompt(number), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "return_token_ids": True}
    lines: list[tuple[float, bytes]] = []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            lines.append((time.monotonic(), line))
    events = [(at_s, json.loads(line[6:])) for at_s, line in lines if line.startswith(b"data: {")]
    return [
        (at_s, len(ids)) for at_s, event in events for choice in event["choices"] if (ids := choice.get("token_ids"))
    ]


@contextmanager
def times_between_tokens() -> Iterator[list[tuple[float, float]]]:
    """Collect what the engine counts: when each token came, and the seconds before it as its worker measured them."""
    found: list[tuple[float, float]] = []
    count_steps = Meter.count_steps

    def counted(meter: Meter, now: float, *given: Any, **more: Any) -> None:
        found.extend((now, seconds) for seconds, times in more["gaps"].items() for _ in range(times))
        count_steps(meter, now, *given, **more)

    with patch.object(Meter, "count_steps", counted):
        yield found


async def measure(spec: ModelSpec, given: argparse.Namespace) -> None:
    """Print a line for each round, and one for each number of streams."""
    reduce_gc_pauses()
    rounds: defaultdict[int, list[Round]] = defaultdict(list)
    async with serving(spec, max(given.streams)) as (_, url):
        numbers = count(0, max(given.streams))
        for round_ in range(given.rounds + 1):
            for streams in given.streams:
                tokens = given.tokens if round_ else WARM_UP_TOKENS
                with times_between_tokens() as made:
                    seen = await _in_child(url, streams, tokens, next(numbers))
                if round_:
                    rounds[streams].append(Round.of(seen, made))
                    print(f"{streams} streams: {rounds[streams][-1].text()}", flush=True)
    print("\nmedians")
    for streams, found in rounds.items():
        print(f"{streams} streams: {verdict(found)}")


async def _in_child(url: str, streams: int, tokens: int, first: int) -> Seen:
    arguments = ("--clients-of", url, "--streams", streams, "--tokens", tokens, "--first", first)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.performance.token_flow", *map(str, arguments)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the clients ended with {process.returncode}")
    return msgspec.json.decode(output, type=Seen)


def main() -> None:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; else a synthetic shape")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--weights", choices=get_args(WeightsName), default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients-of", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.clients_of:
        [streams] = given.streams
        seen = asyncio.run(clients(given.clients_of, streams, given.tokens, given.first))
        print(msgspec.json.encode(seen).decode())
        return
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make_synthetic(given.shape, Path(folder) / given.shape)
        asyncio.run(measure(ModelSpec(path=model, name=model.name, weights=given.weights), given))


if __name__ == "__main__":
    main()
