"""What the engine adds to a bare loop over the backend: dispatch, channel, text and streams, in time and in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from console.bench.bare_backend import BareLoop
from console.bench.engines import run_round, running
from console.bench.plan import Plan, Spread, Timing
from console.bench.progress import Show
from console.bench.queued_memory import WaitingReport, measure_waiting
from console.bench.text import table


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the bare loop and of the engine.

    overhead: the share of the bare loop's throughput that the engine costs, by pairs of neighbouring rounds.
    *_cpu_us: microseconds of CPU per token: of the bare loop, of the engine's worker, and of the process that the
    engine itself and its clients run in. Threads that spin at a barrier are counted in.
    """

    model: str
    dtype: str
    threads: int
    concurrent: int
    rounds: int
    bare: Spread
    engine: Spread
    overhead: Spread
    bare_cpu_us: Spread
    worker_cpu_us: Spread
    engine_cpu_us: Spread
    memory: WaitingReport


async def measure_overhead(plan: Plan, concurrent: int, waiting: int, show: Show) -> OverheadReport:
    """Run rounds of both, by turns, after one of each that does not count. Raises EngineError."""
    memory = await measure_waiting(plan, waiting, show)
    show("loading")
    timings: list[tuple[Timing, Timing, float]] = []
    async with (
        BareLoop(plan, concurrent) as bare,
        running(plan, workers=1, threads=plan.threads, max_prompts=concurrent, concurrent=concurrent) as engine,
    ):
        model = engine.snapshot().status.model
        assert model is not None
        for number in range(plan.rounds + 1):
            show(f"round {number} of {plan.rounds}" if number else "warming up")
            without = await bare.round(number)
            cpu_s = time.process_time()
            timings.append((without, await run_round(engine, plan, number, concurrent), time.process_time() - cpu_s))
    counted = timings[1:]
    return OverheadReport(
        model=plan.spec.name,
        dtype=model.dtype,
        threads=plan.threads,
        concurrent=concurrent,
        rounds=plan.rounds,
        bare=Spread.of(without.tokens_per_s for without, _, _ in counted),
        engine=Spread.of(with_.tokens_per_s for _, with_, _ in counted),
        overhead=Spread.of(1 - with_.tokens_per_s / without.tokens_per_s for without, with_, _ in counted),
        bare_cpu_us=Spread.of(without.cpu_us for without, _, _ in counted),
        worker_cpu_us=Spread.of(with_.cpu_us for _, with_, _ in counted),
        engine_cpu_us=Spread.of(1e6 * cpu_s / with_.tokens for _, with_, cpu_s in counted),
        memory=memory,
    )


def overhead_text(report: OverheadReport) -> str:
    """The report for a person."""
    rates = (("bare backend loop", report.bare), ("engine", report.engine))
    cpu = (
        ("CPU of the bare loop", report.bare_cpu_us),
        ("CPU of the engine's worker", report.worker_cpu_us),
        ("CPU of the engine's process", report.engine_cpu_us),
    )
    overhead, memory = report.overhead, report.memory
    rows = [
        *_rows(rates, "{:.0f}", " tok/s"),
        ["the engine costs", f"{overhead.median:.1%}", f"{overhead.least:.1%} to {overhead.most:.1%}"],
        *_rows(cpu, "{:.1f}", " us/token"),
    ]
    return "\n".join(
        (
            f"{report.model} ({report.dtype}), {report.concurrent} requests at once, {report.threads} threads, "
            f"{report.rounds} rounds of each",
            "",
            table(["", "median", "least to most"], rows),
            "",
            f"{memory.waiting} requests that wait, prompts of {memory.prompt_tokens} tokens: "
            f"{memory.traced_bytes / 1024:.1f} KiB each as Python counts, "
            f"{memory.rss_bytes / 1024:.1f} KiB each as the process grew",
        )
    )


def _rows(named: Iterable[tuple[str, Spread]], form: str, unit: str) -> list[list[str]]:
    return [
        [name, form.format(spread.median) + unit, f"{form.format(spread.least)} to {form.format(spread.most)}"]
        for name, spread in named
    ]
