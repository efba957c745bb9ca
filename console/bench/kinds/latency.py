"""Latency of single requests: nine prompts after a warm-up, 200 tokens each, as in a study of 2023."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import BenchPart, OutputTokens, Plan, PromptTokens
from console.bench.measure import BenchContext, Values, columns, summarize
from console.bench.result import Column, Published
from console.bench.target import Target
from console.bench.workload import Mix
from engine.simulation.lengths import fixed

_SOURCE = "a latency study of 2023: llama-2-7b, batch 1, 200 tokens"


def _published(who: str, device: str, tokens_per_s: float) -> Published:
    return Published(who=who, device=device, source=_SOURCE, values={"tokens_per_s": tokens_per_s})


class Latency(Plan, frozen=True, kw_only=True):
    """Batch 1."""

    name: ClassVar[str] = "latency"
    about: ClassVar[str] = "latency of a single request: prompts one after the other"
    form: ClassVar = ("prompts", "prompt_tokens", "output_tokens", "repeats")
    keys: ClassVar = (Column(name="prompts", title="prompts", digits=0),)
    columns: ClassVar = (
        Column(name="tokens_per_s", title="mean", unit="tok/s", better="higher"),
        Column(name="answer_s", title="mean time", unit="s", digits=2, better="lower"),
        Column(name="answer_tokens", title="mean tokens", digits=0),
        *columns("mean_ttft_ms", "median_itl_ms", "p99_itl_ms"),
    )
    published: ClassVar = (
        _published("ExLlama", "A6000", 77.0),
        _published("CTranslate2, int8", "A6000", 62.6),
        _published("CTranslate2, fp16", "A6000", 44.8),
        _published("vLLM", "A100", 41.5),
        _published("HF transformers", "A6000", 24.6),
        _published("TGI", "A6000", 21.1),
    )
    quick: ClassVar = {"prompts": 3, "output_tokens": fixed(50)}

    prompts: Annotated[int, Meta(ge=1, le=10**6, description="requests, one after the other")] = 9
    prompt_tokens: PromptTokens = fixed(32)
    output_tokens: OutputTokens = fixed(200)

    def mix(self, context: BenchContext) -> Mix:
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens)

    @property
    def max_concurrent_requests(self) -> int:
        return 1

    def parts(self, target: Target) -> list[BenchPart]:
        return [BenchPart(keys={"prompts": self.prompts}, requests=self.prompts)]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        """Plan: means over the requests, time to the first token included."""
        run = await context.closed_loop([iter(context.items(self.mix(context), self.prompts))])
        done = run.answered
        return {
            "tokens_per_s": sum(record.output_tokens / record.e2e_s for record in done) / len(done),
            "answer_s": sum(record.e2e_s for record in done) / len(done),
            "answer_tokens": sum(record.output_tokens for record in done) / len(done),
            **summarize(run),
        }
