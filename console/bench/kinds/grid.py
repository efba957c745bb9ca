"""Throughput by number of workers and max_prompts: every pair, on the running engine."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import (
    BenchPart,
    Concurrent,
    OutputTokens,
    Plan,
    PromptTokens,
    SkipPart,
    at_least_one,
    enough,
)
from console.bench.measure import BenchContext, Values, columns, summarize
from console.bench.result import Column, Key, Published
from console.bench.target import Target
from console.bench.workload import Mix
from engine.errors import InsufficientMemory
from engine.simulation.lengths import fixed


def _published(model: str, workers: int, max_prompts: int, tokens_per_s: float) -> Published:
    keys: dict[str, Key] = {"workers": workers, "max_prompts": max_prompts}
    return Published(
        who=f"EricLLM, {model}",
        device="RTX 3090",
        source="EricLLM's README",
        keys=keys,
        values={"output_throughput": tokens_per_s},
    )


class Grid(Plan, frozen=True, kw_only=True):
    """Workers times max_prompts. Both are changed live, without a restart between two rows."""

    name: ClassVar[str] = "grid"
    about: ClassVar[str] = "throughput by workers and max prompts, which are changed and restored"
    form: ClassVar = (
        *("workers", "max_prompts", "concurrent", "requests"),
        *("prompt_tokens", "output_tokens", "repeats"),
    )
    keys: ClassVar = (
        Column(name="workers", title="workers", digits=0),
        Column(name="max_prompts", title="max prompts", digits=0),
    )
    columns: ClassVar = columns("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_e2el_ms")
    published: ClassVar = (
        _published("Mistral-7B 8.0bpw", 2, 16, 238.0),
        _published("TinyLlama", 3, 8, 422.0),
    )
    no_server: ClassVar = "This benchmark changes engine settings, which a server does not allow"
    quick: ClassVar = {"workers": (1, 2), "max_prompts": (4, 8), "concurrent": 8, "requests": 16}

    workers: Annotated[tuple[int, ...], Meta(description="numbers of workers")] = (1, 2, 3)
    max_prompts: Annotated[tuple[int, ...], Meta(description="max prompts of a worker")] = (4, 8, 16)
    concurrent: Concurrent = 32
    requests: Annotated[int, Meta(ge=1, le=10**6, description="requests per setting")] = 128
    prompt_tokens: PromptTokens = fixed(128)
    output_tokens: OutputTokens = fixed(128)

    def mix(self, context: BenchContext) -> Mix:
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens)

    def check(self) -> None:
        at_least_one("workers", self.workers)
        at_least_one("max_prompts", self.max_prompts)
        enough(self.requests, self.concurrent)

    @property
    def max_concurrent_requests(self) -> int:
        return self.concurrent

    def parts(self, target: Target) -> list[BenchPart]:
        return [
            BenchPart(keys={"workers": workers, "max_prompts": max_prompts}, requests=self.requests)
            for workers in self.workers
            for max_prompts in self.max_prompts
        ]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        """Plan: after a request for each slot, so that no worker is measured while it warms up."""
        workers, max_prompts = int(part.keys["workers"]), int(part.keys["max_prompts"])
        try:
            await context.engine.set_knobs(workers=workers, max_prompts=max_prompts)
        except InsufficientMemory as error:
            raise SkipPart(f"{part.title} was not measured: {error.message}") from error
        first = context.items(self.mix(context), workers, also="warm")
        await context.closed_loop([iter([item]) for item in first])
        sent = iter(context.items(self.mix(context), self.requests))
        return summarize(await context.closed_loop([sent] * self.concurrent))
