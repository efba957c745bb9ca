"""Time between tokens while long prompts are read: with ITL targets, and with unchanging step tokens beside them.

Streams go on for ever, each with a new answer as soon as one is complete; a long prompt comes every few seconds, or as
soon as the one before is read. Settings take turns in every round; medians of the rounds are printed. Gaps are those
that the worker measures. `python -m tools.performance.itl_target --help`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tools.performance.throughput import SHAPES
from tools.synthetic_models import make_synthetic

SHORT_TOKENS, ANSWER_TOKENS = 64, 512
WARM_UP_S = 10.0
STATIC = (32, 64, 128, 256, 512)


class Setting(NamedTuple):
    """A target in seconds, or None and a number of step tokens."""

    target_s: float | None
    step_tokens: int

    def __str__(self) -> str:
        return f"step tokens {self.step_tokens}" if self.target_s is None else f"target {self.target_s * 1e3:g} ms"


@dataclass
class Seen:
    """Gaps between tokens of the streams in seconds, and prompt tokens of long prompts that were read."""

    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0

    def gap(self, share: float) -> float:
        """The gap that this share of them stays within."""
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))]


class Load:
    """Streams and long prompts on an engine."""

    def __init__(self, engine: Engine, *, streams: int, prompt_tokens: int, every_s: float) -> None:
        self._engine = engine
        self._streams = streams
        self._prompt_tokens = prompt_tokens
        self._every_s = every_s
        self._numbers = count()
        self.seen = Seen()

    async def run(self, seconds: float) -> Seen:
        """Return what is seen within `seconds`, after those that warm up."""
        tasks = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
        tasks.append(asyncio.create_task(self._read_long_prompts()))
        await asyncio.sleep(WARM_UP_S)
        self.seen = Seen()
        computed = self._computed()
        await asyncio.sleep(seconds)
        self.seen.prompt_tokens = self._computed() - computed
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return self.seen

    def _computed(self) -> int:
        return sum(worker.stats.prompt_tokens_computed for worker in self._engine.snapshot().workers)

    def _ids(self, tokens: int) -> list[int]:
        """A prompt that shares no page with another."""
        number = next(self._numbers)
        return [3 + (number * 131 + index * 7) % 290 for index in range(tokens)]

    async def _stream(self) -> None:
        while True:
            params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            request = GenerateRequest(prompt_ids=self._ids(SHORT_TOKENS), params=params)
            async with self._engine.submit(request) as stream:
                async for delta in stream:
                    self.seen.gaps += delta.gaps

    async def _read_long_prompts(self) -> None:
        while True:
            began = time.perf_counter()
            params = SamplingParams(temperature=0.0, max_tokens=1)
            async with self._engine.submit(
                GenerateRequest(prompt_ids=self._ids(self._prompt_tokens), params=params)
            ) as read:
                async for _ in read:
                    pass
            await asyncio.sleep(max(0.0, self._every_s - (time.perf_counter() - began)))


async def measure(spec: ModelSpec, given: argparse.Namespace) -> None:
    """Print a line for each setting."""
    engine = Engine(EngineConfig(max_prompts=given.streams + 2))
    await engine.start()
    settings = [Setting(None, tokens) for tokens in given.static] + [Setting(ms / 1e3, 2048) for ms in given.targets]
    found: defaultdict[Setting, list[Seen]] = defaultdict(list)
    try:
        await engine.load(spec)
        for _ in range(given.rounds):
            for setting in settings:
                await engine.reconfigure(step_tokens=setting.step_tokens)
                await engine.observe({"slo_itl_s": setting.target_s})
                load = Load(engine, streams=given.streams, prompt_tokens=given.prompt, every_s=given.every)
                found[setting].append(await load.run(given.seconds))
                report = engine.snapshot().workers[0].stats.itl
                print(f"{setting}: {len(found[setting][-1].gaps)} gaps; {report or ''}")
    finally:
        await engine.close(drain_s=0)
    for setting, rounds in found.items():
        p50, p99 = (1e3 * statistics.median(seen.gap(share) for seen in rounds) for share in (0.5, 0.99))
        rate = statistics.median(seen.prompt_tokens / given.seconds for seen in rounds)
        print(f"{setting!s:<20} ITL p50 {p50:6.1f} ms, p99 {p99:6.1f} ms, {rate:7.1f} prompt tok/s")


def main() -> None:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder; else the synthetic shape")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--targets", type=float, nargs="*", default=[30.0, 60.0, 120.0], help="in milliseconds")
    parser.add_argument("--static", type=int, nargs="*", default=STATIC, help="step tokens to compare with")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one long prompt to the next")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each setting in each round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.model:
        asyncio.run(measure(ModelSpec(path=given.model, name=given.model.name), given))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = make_synthetic(given.shape, Path(folder) / given.shape)
        asyncio.run(measure(ModelSpec(path=path, name=given.shape), given))


if __name__ == "__main__":
    main()
