"""Pauses of streams while a long prompt is prefilled."""

from __future__ import annotations

import itertools
from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import BenchPart, Plan
from console.bench.measure import BenchContext, Record, Values
from console.bench.result import Column
from console.bench.target import EngineHere, Target, TargetFailed
from console.bench.workload import Mix
from engine.metrics.distributions import percentiles
from engine.simulation.lengths import Length, fixed

_SETTLE_TOKENS = 8
"""Tokens of every stream before the long prompt arrives, and again after its prefill."""


class Long(Plan, frozen=True, kw_only=True):
    """One prompt of 8192 tokens, or of the model's context, during 16 streams."""

    name: ClassVar[str] = "long"
    about: ClassVar[str] = "gaps of streams while one long prompt is prefilled"
    form: ClassVar = ("streams", "long_tokens", "prompt_tokens", "repeats")
    keys: ClassVar = (
        Column(name="streams", title="streams", digits=0),
        Column(name="long_tokens", title="long prompt", unit="tokens", digits=0),
    )
    columns: ClassVar = (
        Column(name="longest_gap_ms", title="longest gap", unit="ms", better="lower"),
        Column(name="p99_gap_ms", title="gap p99 during", unit="ms", better="lower"),
        Column(name="median_gap_ms", title="gap p50 during", unit="ms", better="lower"),
        Column(name="alone_longest_gap_ms", title="longest before", unit="ms", better="lower"),
        Column(name="alone_median_gap_ms", title="p50 before", unit="ms", better="lower"),
        Column(name="long_ttft_ms", title="TTFT of the long prompt", unit="ms", better="lower"),
    )
    quick: ClassVar = {"streams": 4, "long_tokens": 1024}

    streams: Annotated[int, Meta(ge=1, le=10**5, description="concurrent streams")] = 16
    long_tokens: Annotated[
        int,
        Meta(ge=16, le=10**6, title="long prompt", description="tokens of the long prompt, up to the context"),
    ] = 8192
    prompt_tokens: Annotated[Length, Meta(description="tokens of the streams' prompts")] = fixed(32)
    stream_tokens: Annotated[
        int, Meta(ge=2 * _SETTLE_TOKENS, le=10**6, description="max tokens of a stream's answer")
    ] = 1024

    def mix(self, context: BenchContext) -> Mix:
        """Plan: of the streams."""
        return Mix(prompt=self.prompt_tokens, output=fixed(self._stream_tokens(context.target)))

    def _stream_tokens(self, target: Target) -> int:
        limit, prompt = target.max_model_len, self.prompt_tokens.most or 0
        return self.stream_tokens if limit is None else max(1, min(self.stream_tokens, limit - prompt))

    def _long_tokens(self, target: Target) -> int:
        limit = target.max_model_len
        return self.long_tokens if limit is None else max(1, min(self.long_tokens, limit - _SETTLE_TOKENS))

    @property
    def max_concurrent_requests(self) -> int:
        return self.streams

    def parts(self, target: Target) -> list[BenchPart]:
        keys = {"streams": self.streams, "long_tokens": self._long_tokens(target)}
        return [BenchPart(keys=dict(keys), requests=1)]

    async def warm(self, context: BenchContext) -> None:
        """Plan: with a short request."""
        await context.closed_loop(
            [iter(context.items(Mix(prompt=self.prompt_tokens, output=fixed(_SETTLE_TOKENS)), 1))]
        )

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        """Plan: with a slot for the long prompt among the streams."""
        if isinstance(context.target, EngineHere):
            workers, max_prompts = context.target.knobs
            if workers * max_prompts <= self.streams:
                await context.target.set_knobs(workers=workers, max_prompts=self.streams // workers + 1)
        tokens = int(part.keys["long_tokens"])
        [late] = context.items(Mix(prompt=fixed(tokens), output=fixed(_SETTLE_TOKENS)), 1, also="long")
        if tokens < self.long_tokens:
            context.note(f"The long prompt has {tokens} tokens, the limit of the model.")
        endless = context.endless(self.mix(context), self.streams)
        streams, long = await context.during_streams(endless, late, settle_tokens=_SETTLE_TOKENS)
        if long.error:
            raise TargetFailed(long.error)
        return gaps(streams, long)


def gaps(streams: list[Record], long: Record) -> Values:
    """Gaps between tokens of the streams: during the prefill of the long prompt, and before it."""
    began_s, read_s = long.sent_s, long.sent_s + (long.ttft_s or long.end_s)
    before: list[float] = []
    meanwhile: list[float] = []
    for record in streams:
        at = [record.sent_s + when for when in record.times_s]
        for start, end in itertools.pairwise(at):
            if end <= began_s:
                before.append(1000 * (end - start))
            elif start < read_s:
                meanwhile.append(1000 * (end - start))
    median_ms, p99_ms = percentiles(meanwhile, 0.50, 0.99, interpolate=True)
    (alone_median_ms,) = percentiles(before, 0.50, interpolate=True)
    return {
        "longest_gap_ms": max(meanwhile, default=None),
        "p99_gap_ms": p99_ms,
        "median_gap_ms": median_ms,
        "alone_longest_gap_ms": max(before, default=None),
        "alone_median_gap_ms": alone_median_ms,
        "long_ttft_ms": None if long.ttft_s is None else 1000 * long.ttft_s,
    }
