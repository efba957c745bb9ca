"""The cost of the accounting of request time: the engine with it against the same engine without, round by round."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from console.bench.progress import Show
from console.bench.text import table
from engine.backends.base import Backend, TimeLost
from engine.backends.scheduler import scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.backends.scheduler.step_times import StepTimes
from engine.config import ModelSpec
from engine.engine import Engine
from engine.models.deployment import Deployment
from engine.requests.causes import Cause, CauseWindow, TimeLedger, WaitClock, Why
from engine.requests.request import GenerateRequest, Request
from engine.worker_process.factory import create_backend
from tools.internal_benches.rounds import Rounds, Spread, Timing, run_round, running_engine

_FACTORY = "ERICLLM_BACKEND_FACTORY"


class _NoStepTimes(StepTimes):
    """The worker's accounting left out."""

    def submitted(self, sequence: Sequence) -> None:
        """Do nothing."""

    def admitted(self, sequence: Sequence) -> None:
        """Do nothing."""

    def preempted(self, sequence: Sequence) -> None:
        """Do nothing."""

    def removed(self, sequence: Sequence) -> None:
        """Do nothing."""

    def stepped(self, plan: BatchPlan, running: Iterable[Sequence], *, waiting: bool) -> None:
        """Do nothing."""

    def lost(self, request_id: str) -> TimeLost:
        """Return nothing."""
        return TimeLost()


class _NoLedger(TimeLedger):
    """The engine's accounting of one request left out."""

    def enter(self, now: float, clock: WaitClock) -> None:
        """Do nothing."""

    def dispatched(self, now: float, slow_s: float = 0.0) -> None:
        """Do nothing."""

    def got_tokens(self, now: float) -> None:
        """Do nothing."""

    def worker_reported(self, lost: TimeLost) -> None:
        """Do nothing."""

    def left(self, now: float, slow_s: float = 0.0, *, lost: bool = False) -> None:
        """Do nothing."""

    def read_to_end(self, waited_s: float) -> None:
        """Do nothing."""

    def why(self, now: float, slow_s: float = 0.0) -> Why:
        """Return nothing."""
        return Why()

    def count(self, now: float, slow_s: float = 0.0) -> dict[Cause, float]:
        """Return nothing."""
        return {}


class _NoWindow(CauseWindow):
    """The sums over all requests left out."""

    def add(self, seconds: Mapping[Cause, float], worker: str | None = None) -> None:
        """Do nothing."""

    def tick(self, workers: Collection[str]) -> None:
        """Do nothing."""


def backend_without_accounting(spec: ModelSpec) -> Backend:
    """Return the backend of a worker process that does no accounting."""
    scheduler.StepTimes = _NoStepTimes  # type: ignore[attr-defined]
    return create_backend(spec)


@contextmanager
def _workers_without_accounting() -> Iterator[None]:
    """Start workers that do no accounting while the context lasts."""
    os.environ[_FACTORY] = f"{__name__}:{backend_without_accounting.__name__}"
    try:
        yield
    finally:
        del os.environ[_FACTORY]


def _stop_accounting(engine: Engine) -> None:
    """Take the engine's side of the accounting out of an engine."""
    admission, admit = engine._admission, engine._admission.admit

    def admit_without(wanted: GenerateRequest) -> tuple[Request, Deployment]:
        request, deployment = admit(wanted)
        request.timeline.ledger = _NoLedger()
        return request, deployment

    admission.admit = admit_without  # type: ignore[method-assign]
    engine._tracker.causes = _NoWindow()


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two engines. worker_cpu_us, engine_cpu_us: microseconds of CPU per token, of its worker, and of the
    process of the engine and its clients."""

    tokens_per_s: Spread
    worker_cpu_us: Spread
    engine_cpu_us: Spread


class AccountingReport(msgspec.Struct, frozen=True, kw_only=True):
    """overhead, worker_cpu, engine_cpu: share of throughput, and of CPU per token, that the accounting costs, from
    pairs of neighbouring rounds."""

    model: str
    dtype: str
    threads: int
    concurrent: int
    rounds: int
    with_accounting: Side
    without: Side
    overhead: Spread
    worker_cpu: Spread
    engine_cpu: Spread


Round = tuple[Timing, float]
"""A round, and the seconds of CPU of the engine's process."""


async def measure_accounting(rounds: Rounds, concurrent: int, show: Show) -> AccountingReport:
    """Interleave rounds of both, after a warm-up of each; the one that goes first alternates. Raises EngineError."""
    show("loading")
    threads = rounds.model.threads
    options = {"workers": 1, "threads": threads, "max_prompts": concurrent, "concurrent": concurrent}
    with_, without = list[Round](), list[Round]()
    async with running_engine(rounds, **options) as accounting:
        with _workers_without_accounting():
            plain_engine = running_engine(rounds, **options)
            plain = await plain_engine.__aenter__()
        try:
            _stop_accounting(plain)
            model = accounting.snapshot().status.model
            assert model is not None
            for number in range(rounds.count + 1):
                show(f"round {number} of {rounds.count}" if number else "warming up")
                sides = [(accounting, with_), (plain, without)]
                for engine, measured in sides if number % 2 else reversed(sides):
                    cpu_s = time.process_time()
                    timing = await run_round(engine, rounds, number, concurrent)
                    measured.append((timing, time.process_time() - cpu_s))
            assert not plain.publish().workers[0].stats.limited, "its worker does the accounting all the same"
        finally:
            await plain_engine.__aexit__(None, None, None)
    pairs = list(zip(with_[1:], without[1:], strict=True))
    return AccountingReport(
        model=rounds.model.spec.name,
        dtype=model.dtype,
        threads=threads,
        concurrent=concurrent,
        rounds=rounds.count,
        with_accounting=_side(with_[1:]),
        without=_side(without[1:]),
        overhead=Spread.of(1 - mine.tokens_per_s / plain.tokens_per_s for (mine, _), (plain, _) in pairs),
        worker_cpu=Spread.of(mine.cpu_us / plain.cpu_us - 1 for (mine, _), (plain, _) in pairs),
        engine_cpu=Spread.of(_engine_us(mine) / _engine_us(plain) - 1 for mine, plain in pairs),
    )


def _side(rounds: list[Round]) -> Side:
    return Side(
        tokens_per_s=Spread.of(timing.tokens_per_s for timing, _ in rounds),
        worker_cpu_us=Spread.of(timing.cpu_us for timing, _ in rounds),
        engine_cpu_us=Spread.of(map(_engine_us, rounds)),
    )


def _engine_us(round_: Round) -> float:
    timing, cpu_s = round_
    return 1e6 * cpu_s / timing.tokens


def accounting_text(report: AccountingReport) -> str:
    """The report as text."""
    mine, plain = report.with_accounting, report.without
    rows = [
        ["tokens per second", *_cells(mine.tokens_per_s, plain.tokens_per_s, report.overhead, "{:.0f}")],
        ["CPU of the worker, us/token", *_cells(mine.worker_cpu_us, plain.worker_cpu_us, report.worker_cpu, "{:.1f}")],
        ["CPU of the engine, us/token", *_cells(mine.engine_cpu_us, plain.engine_cpu_us, report.engine_cpu, "{:.1f}")],
    ]
    return "\n".join(
        (
            f"{report.model} ({report.dtype}), {report.concurrent} concurrent requests, {report.threads} threads, "
            f"{report.rounds} rounds of each",
            "",
            table(["median", "with accounting", "without", "cost, median of pairs", "least to most"], rows),
        )
    )


def _cells(mine: Spread, plain: Spread, cost: Spread, form: str) -> list[str]:
    return [
        form.format(mine.median),
        form.format(plain.median),
        f"{cost.median:+.1%}",
        f"{cost.least:+.1%} to {cost.most:+.1%}",
    ]
