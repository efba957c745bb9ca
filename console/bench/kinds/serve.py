"""Latency and goodput at given request rates: requests arrive by the clock, as users of a service do."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from console.bench.kinds.base import BenchPart, Traced
from console.bench.measure import BenchContext, Values, columns, summarize
from console.bench.result import Column
from console.bench.target import Target
from console.bench.workload import Mix, PrefixMix, with_arrivals
from engine.errors import InvalidRequest
from engine.metrics.slo import Slo
from engine.simulation.lengths import fixed


class Serve(Traced, frozen=True, kw_only=True):
    """Open-loop arrivals at given rates."""

    name: ClassVar[str] = "serve"
    about: ClassVar[str] = "latency and goodput at given request rates: TTFT, TPOT, ITL, response"
    form: ClassVar = (
        *("rates", "requests", "prompt_tokens", "output_tokens", "trace"),
        *("slo_ttft", "slo_tpot", "repeats"),
    )
    keys: ClassVar = (Column(name="request_rate", title="asked", unit="req/s", digits=2),)
    columns: ClassVar = columns(
        "request_throughput",
        "output_throughput",
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "p99_tpot_ms",
        "p99_itl_ms",
        "p95_e2el_ms",
        "request_goodput",
        "slo_attainment",
    )
    quick: ClassVar = {"rates": (2.0, math.inf), "requests": 16, "output_tokens": fixed(32)}
    synonyms: ClassVar = {"slo_tpot": "slo_itl"}

    rates: Annotated[tuple[float, ...], Meta(description="requests per second; inf sends all at once")] = (
        1.0,
        4.0,
        math.inf,
    )
    requests: Annotated[int, Meta(ge=1, le=10**6, description="requests per rate")] = 100
    burstiness: Annotated[
        float, Meta(gt=0, le=1000, description="burstiness of arrivals (gamma shape); 1: Poisson")
    ] = 1.0
    prefix_tokens: Annotated[int, Meta(ge=0, le=10**6, description="tokens of a shared prefix")] = 0
    prefix_groups: Annotated[int, Meta(ge=1, le=10**6, description="number of shared prefixes")] = 1
    prefix_share: Annotated[float, Meta(ge=0, le=1, description="share of prompts with a shared prefix")] = 1.0
    max_concurrent: Annotated[int, Meta(ge=0, le=10**6, description="max concurrent requests; 0: no limit")] = 0
    slo_ttft: Annotated[float | None, Meta(title="max TTFT", description="TTFT target, for example 500ms")] = None
    slo_tpot: Annotated[float | None, Meta(title="max TPOT", description="TPOT target, for example 50ms")] = None
    slo_response: Annotated[float | None, Meta(description="response time target, for example 5s")] = None

    def mix(self, context: BenchContext) -> Mix:
        prefix = PrefixMix(tokens=self.prefix_tokens, groups=self.prefix_groups, share=self.prefix_share)
        return msgspec.structs.replace(super().mix(context), prefix=prefix if self.prefix_tokens else None)

    def check(self) -> None:
        super().check()
        if any(rate <= 0 for rate in self.rates):
            raise InvalidRequest("a rate must be above 0 requests per second, or inf", param="rates")

    @property
    def max_concurrent_requests(self) -> int:
        return self.max_concurrent or self.requests

    def parts(self, target: Target) -> list[BenchPart]:
        return [
            BenchPart(keys={"request_rate": _key(rate)}, requests=self.requests, least_s=self.requests / rate)
            for rate in self.rates
        ]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        rate = float(part.keys["request_rate"])
        sent = context.items(self.mix(context), self.requests)
        timed = with_arrivals(sent, rate=rate, burstiness=self.burstiness, seed=self.seed)
        slo = Slo(ttft_s=self.slo_ttft, itl_s=self.slo_tpot, e2e_s=self.slo_response)
        return summarize(await context.open_loop(timed, self.max_concurrent or None), slo)


def _key(rate: float) -> float | str:
    """JSON has no infinity; vLLM's bench writes "inf" too."""
    return "inf" if math.isinf(rate) else rate
