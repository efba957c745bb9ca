"""Hit rate of the prefix cache, and its effect on the time to the first token."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import BenchPart, Concurrent, OutputTokens, Plan, enough
from console.bench.measure import BenchContext, Run, Values, columns, summarize
from console.bench.result import Column
from console.bench.target import Target
from console.bench.workload import Mix, PrefixMix
from engine.simulation.lengths import Length, fixed

_SHARED, _OWN = "shared", "own"
_NO_TWO_ALIKE = 1 << 62
"""A number of prefixes of which no two prompts draw the same."""


class Prefix(Plan, frozen=True, kw_only=True):
    """The same lengths twice: prefixes shared by groups of prompts, and a prefix of its own for each prompt."""

    name: ClassVar[str] = "prefix"
    about: ClassVar[str] = (
        "prefix cache: hit rate and TTFT of prompts with shared prefixes, compared with prompts without"
    )
    form: ClassVar = ("requests", "concurrent", "prefix_tokens", "prefix_groups", "prompt_tokens", "repeats")
    keys: ClassVar = (Column(name="prefix", title="prefix"),)
    columns: ClassVar = (
        Column(name="hit_rate", title="hit rate", unit="%", better="higher"),
        Column(name="ideal_hit_rate", title="max hit rate", unit="%"),
        *columns("request_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "p95_e2el_ms"),
    )
    quick: ClassVar = {"requests": 16, "prefix_tokens": 128, "concurrent": 2}

    requests: Annotated[int, Meta(ge=1, le=10**6, description="requests of each kind")] = 64
    concurrent: Concurrent = 8
    prefix_tokens: Annotated[int, Meta(ge=1, le=10**6, title="shared tokens", description="tokens of a prefix")] = 512
    prefix_groups: Annotated[int, Meta(ge=1, le=10**6, title="prefixes", description="number of shared prefixes")] = 4
    prefix_share: Annotated[float, Meta(ge=0, le=1, description="share of the prompts with a shared prefix")] = 1.0
    prompt_tokens: Annotated[Length, Meta(description="tokens of a prompt after its prefix")] = fixed(64)
    output_tokens: OutputTokens = fixed(16)

    def mix(self, context: BenchContext) -> Mix:
        """Plan: of shared ones."""
        return self._mix(self.prefix_groups)

    def _mix(self, groups: int) -> Mix:
        prefix = PrefixMix(tokens=self.prefix_tokens, groups=groups, share=self.prefix_share)
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens, prefix=prefix)

    def check(self) -> None:
        enough(self.requests, self.concurrent)

    @property
    def max_concurrent_requests(self) -> int:
        return self.concurrent

    def parts(self, target: Target) -> list[BenchPart]:
        return [BenchPart(keys={"prefix": kind}, requests=self.requests) for kind in (_OWN, _SHARED)]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        own = part.keys["prefix"] == _OWN
        sent = context.items(self._mix(_NO_TWO_ALIKE if own else self.prefix_groups), self.requests)
        queue = iter(sent)
        run = await context.closed_loop([queue] * self.concurrent)
        tokens = sum(item.prompt.tokens for item in sent)
        groups = [item.group for item in sent if item.group is not None]
        again = (len(groups) - len(set(groups))) * self.prefix_tokens
        return {
            "hit_rate": _hit_rate(run),
            "ideal_hit_rate": 0.0 if own else 100 * again / tokens,
            **summarize(run),
        }


def _hit_rate(run: Run) -> float | None:
    """Share of the prompts' tokens that the target says it found in its cache; None where it does not say."""
    counted = [record for record in run.answered if record.cached_tokens is not None]
    asked = sum(record.prompt_tokens for record in counted)
    return 100 * sum(record.cached_tokens or 0 for record in counted) / asked if asked else None
