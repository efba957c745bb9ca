"""Numbers out of records, under the names that vLLM's serving bench gives them, so that results compare.

TTFT: to the first token.  TPOT: a request's time after its first token, per further token.  ITL: between two chunks of
a stream; of an engine in this process between two tokens, as its worker made them.  E2EL: to the last token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import msgspec

from console.bench.measure import Record, Run
from console.bench.result import Column
from engine.metrics.distributions import percentiles
from engine.metrics.slo import Slo

Values = dict[str, float | None]
_PERCENTILES = (90, 95, 99)
_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "response"}


def tpot_s(record: Record) -> float | None:
    """Seconds per token after the first; 0 for an answer of one token, None where none output_tokens."""
    if record.ttft_s is None:
        return None
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1) if record.output_tokens > 1 else 0.0


def summarize(run: Run, slo: Slo | None = None) -> Values:
    """All numbers of a run; None where no request has one."""
    slo, done, seconds = slo or Slo(), run.answered, run.seconds
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    within_slo = sum(_is_met(slo, record) for record in done)
    chunks = sum(len(record.chunks) for record in done)
    return {
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "duration": seconds,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": within_slo / seconds if slo.is_set else None,
        "slo_attainment": 100 * within_slo / len(run.records) if slo.is_set and run.records else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        **_times("ttft", (record.ttft_s for record in done)),
        **_times("tpot", (tpot_s(record) for record in done if record.output_tokens > 1)),
        **_times("itl", (gap for record in done for gap in record.gaps_s)),
        **_times("e2el", (record.e2e_s for record in done)),
    }


def _is_met(slo: Slo, record: Record) -> bool:
    """Return whether an answer kept the SLO; one without a token keeps no limit on the times between them."""
    itl_s = tpot_s(record)
    return not record.error and slo.is_met(record.ttft_s, math.inf if itl_s is None else itl_s, record.e2e_s)


def _times(name: str, seconds: Iterable[float | None]) -> Values:
    """Mean, median, deviation and percentiles in milliseconds."""
    numbers = [1000 * each for each in seconds if each is not None]
    found: Values = {
        f"mean_{name}_ms": statistics.fmean(numbers) if numbers else None,
        f"median_{name}_ms": statistics.median(numbers) if numbers else None,
        f"std_{name}_ms": statistics.pstdev(numbers) if numbers else None,
    }
    values = percentiles(numbers, *(percent / 100 for percent in _PERCENTILES), interpolate=True)
    found.update({f"p{percent}_{name}_ms": value for percent, value in zip(_PERCENTILES, values, strict=True)})
    return found


def columns(*shown: str) -> tuple[Column, ...]:
    """Columns of `summarize`; the table shows the named ones."""
    return tuple(msgspec.structs.replace(column, shown=column.name in shown) for column in (*_COUNTS, *_time_columns()))


_COUNTS = (
    Column(name="completed", title="answered", digits=0),
    Column(name="failed", title="failed", digits=0, better="lower"),
    Column(name="duration", title="took", unit="s"),
    Column(name="total_input_tokens", title="prompt tokens", digits=0),
    Column(name="total_output_tokens", title="tokens", digits=0),
    Column(name="request_throughput", title="requests", unit="req/s", digits=2, better="higher"),
    Column(name="request_goodput", title="goodput", unit="req/s", digits=2, better="higher"),
    Column(name="slo_attainment", title="within SLO", unit="%", better="higher"),
    Column(name="output_throughput", title="output", unit="tok/s", better="higher"),
    Column(name="total_token_throughput", title="in and out", unit="tok/s", better="higher"),
    Column(name="tokens_per_chunk", title="tokens per chunk", digits=2),
)


def _time_columns() -> Iterable[Column]:
    kinds = {"mean": "mean", "median": "p50", "std": "deviation"} | {f"p{each}": f"p{each}" for each in _PERCENTILES}
    for name, title in _TIMES.items():
        for kind, statistic in kinds.items():
            yield Column(name=f"{kind}_{name}_ms", title=f"{title} {statistic}", unit="ms", better="lower")
