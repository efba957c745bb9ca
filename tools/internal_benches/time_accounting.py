"""The cost of the accounting of request time: the engine with it against the same engine without, round by round, and
the accounting alone, which the noise of a machine hides in the former."""

from __future__ import annotations

import collections.abc as abc
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from console.bench.progress import Show
from console.bench.text import table
from engine.backends.base import Backend, TimeLost
from engine.backends.scheduler import scheduler
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.backends.scheduler.step_times import StepTimes
from engine.config import ModelSpec
from engine.engine import Engine
from engine.models.deployment import Deployment
from engine.requests.causes import Cause, CauseWindow, TimeLedger, WaitClock, Why
from engine.requests.request import GenerateRequest, Request
from engine.worker_process.factory import create_backend
from tools.internal_benches.rounds import PROMPT_TOKENS, Rounds, Spread, Timing, run_round, running_engine

_FACTORY = "ERICLLM_BACKEND_FACTORY"
_SWITCH = "ERICLLM_BENCH_ACCOUNTING"


Times = abc.Callable[[abc.Callable[[], float]], StepTimes]
"""Makes the step times of a scheduler with a clock."""


@dataclass(slots=True)
class _Switch:
    """on: whether requests are accounted for."""

    on: bool = True

    def read(self) -> bool:
        """Return whether the accounting is on."""
        return self.on


class _SharedSwitch:
    """Two bytes in a file that a worker process and this one share: the switch, and its last reading."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2)

    def set(self, *, on: bool) -> None:
        """Switch the accounting of a worker on or off."""
        self._bytes[0] = int(on)

    def read(self) -> bool:
        """Return whether the accounting is on."""
        self._bytes[1] = self._bytes[0]
        return self._bytes[0] == 1

    @property
    def last_reading(self) -> bool:
        """Return what the worker read last."""
        return self._bytes[1] == 1


class _SwitchedStepTimes(StepTimes):
    """The worker's accounting, for the sequences that were submitted while the switch was on."""

    def __init__(self, clock: abc.Callable[[], float], switch: _Switch | _SharedSwitch) -> None:
        super().__init__(clock)
        self._switch, self._on = switch, True

    def submitted(self, sequence: Sequence) -> None:
        """Read the switch, once per request."""
        self._on = self._switch.read()
        if self._on:
            super().submitted(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """Do nothing where it is off."""
        if self._on:
            super().admitted(sequence)

    def preempted(self, sequence: Sequence) -> None:
        """Do nothing where it is off."""
        if self._on:
            super().preempted(sequence)

    def removed(self, sequence: Sequence) -> None:
        """Do nothing where it is off."""
        if self._on:
            super().removed(sequence)

    def stepped(self, plan: BatchPlan, running: abc.Sequence[Sequence], *, waiting: bool) -> float:
        """Do nothing where it is off."""
        return super().stepped(plan, running, waiting=waiting) if self._on else 0.0

    def lost(self, request_id: str) -> TimeLost:
        """Return nothing where it is off."""
        return super().lost(request_id) if self._on else TimeLost()


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

    def tick(self, workers: abc.Collection[str]) -> None:
        """Do nothing."""


def backend_with_a_switch(spec: ModelSpec) -> Backend:
    """Return the backend of a worker process whose accounting can be switched off."""
    switch = _SharedSwitch(Path(os.environ[_SWITCH]))
    _use_times(partial(_SwitchedStepTimes, switch=switch))
    return create_backend(spec)


def _use_times(times: Times) -> None:
    """Have schedulers made from now on use these step times."""
    vars(scheduler)["StepTimes"] = times


@contextmanager
def _switched_workers() -> Iterator[_SharedSwitch]:
    """Start workers whose accounting can be switched off while the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "switch")
        path.write_bytes(b"\1\1")
        os.environ[_FACTORY] = f"{__name__}:{backend_with_a_switch.__name__}"
        os.environ[_SWITCH] = str(path)
        try:
            yield _SharedSwitch(path)
        finally:
            del os.environ[_FACTORY], os.environ[_SWITCH]


class _EngineSide:
    """The engine's side of the accounting, which can be taken out between rounds."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._admit = engine, engine._admission.admit
        self._causes = engine._tracker.causes

    def switch(self, *, on: bool) -> None:
        """Put the accounting in or take it out. No request runs."""
        self._engine._tracker.causes = self._causes if on else _NoWindow()
        self._engine._admission.admit = self._admit if on else self._admit_without  # type: ignore[method-assign]

    def _admit_without(self, wanted: GenerateRequest) -> tuple[Request, Deployment]:
        request, deployment = self._admit(wanted)
        request.timeline.ledger = _NoLedger()
        return request, deployment


# The accounting alone: a scheduler that computes nothing, and the calls that an engine makes for a request.

_ALONE = 15
_ANSWER_TOKENS = 128
_STEPS_A_SECOND = 64


def _us_per_step(times: Times, concurrent: int) -> float:
    """CPU of a step with as many answers; each second what every request lost is read, as a worker does."""
    _use_times(times)
    try:
        steps = scheduler.Scheduler(
            PagePool(32 * concurrent, 16),
            max_prompts=concurrent,
            step_tokens=512,
            max_model_len=512,
            clock=time.monotonic,
        )
    finally:
        _use_times(StepTimes)
    sequences = [Sequence(str(number), [1] * PROMPT_TOKENS, PROMPT_TOKENS) for number in range(concurrent)]
    began_s = time.process_time()
    for sequence in sequences:
        steps.submit(sequence)
    for number in range(_ANSWER_TOKENS):
        plan = steps.plan()
        steps.commit(plan, [[1] for _ in plan.sampled_sequences])
        for sequence in sequences if number % _STEPS_A_SECOND == 0 else ():
            steps.times.lost(sequence.id)
    return 1e6 * (time.process_time() - began_s) / _ANSWER_TOKENS


def _us_per_request(make: type[TimeLedger], window: CauseWindow, count: int = 200) -> float:
    """CPU of the calls for a request that is answered in two seconds, a token at a time."""
    clock, lost = WaitClock(0.0), TimeLost(seconds={"prompts": 0.1})
    began_s = time.process_time()
    for _ in range(count):
        ledger = make()
        ledger.enter(0.0, clock)
        ledger.dispatched(1.0)
        window.add(ledger.count(1.0))
        for token in range(_ANSWER_TOKENS):
            ledger.got_tokens(1.0 + token / _STEPS_A_SECOND)
        for second in (2.0, 3.0):
            ledger.worker_reported(lost)
            window.add(ledger.count(second), "w0")
        ledger.left(3.0)
        window.add(ledger.count(3.0), "w0")
        ledger.read_to_end(0.1)
        window.add(ledger.count(3.1))
    return 1e6 * (time.process_time() - began_s) / count


def _alone_us(concurrent: int) -> tuple[float, float]:
    """Return microseconds of CPU that the accounting takes in a step and for a request, medians of pairs."""
    off = partial(_SwitchedStepTimes, switch=_Switch(on=False))
    steps = [_us_per_step(StepTimes, concurrent) - _us_per_step(off, concurrent) for _ in range(_ALONE)]
    requests = [
        _us_per_request(TimeLedger, CauseWindow()) - _us_per_request(_NoLedger, _NoWindow()) for _ in range(_ALONE)
    ]
    return median(steps), median(requests)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two engines. worker_cpu_us, engine_cpu_us: microseconds of CPU per token, of its worker, and of the
    process of the engine and its clients."""

    tokens_per_s: Spread
    worker_cpu_us: Spread
    engine_cpu_us: Spread


class AccountingReport(msgspec.Struct, frozen=True, kw_only=True):
    """overhead, worker_cpu, engine_cpu: share of throughput, and of CPU per token, that the accounting costs, from
    pairs of neighbouring rounds.  step_us, request_us: of CPU, of the accounting alone, in a step with `concurrent`
    answers and for a request with 128 tokens.  cpu_share: of the CPU per token of worker and engine together.
    """

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
    step_us: float
    request_us: float
    cpu_share: float


Round = tuple[Timing, float]
"""A round, and the seconds of CPU of the engine's process."""


async def measure_accounting(rounds: Rounds, concurrent: int, show: Show) -> AccountingReport:
    """Interleave rounds of both in one engine and one worker, after a warm-up of each; the one that goes first
    alternates. Raises EngineError."""
    show("the accounting alone")
    step_us, request_us = _alone_us(concurrent)
    show("loading")
    threads = rounds.model.threads
    with_, without = list[Round](), list[Round]()
    with _switched_workers() as switch:
        async with running_engine(
            rounds, workers=1, threads=threads, max_prompts=concurrent, concurrent=concurrent
        ) as engine:
            model = engine.snapshot().status.model
            assert model is not None
            side = _EngineSide(engine)
            for number in range(rounds.count + 1):
                show(f"round {number} of {rounds.count}" if number else "warming up")
                variants = [(True, with_), (False, without)]
                for on, measured in variants if number % 2 else reversed(variants):
                    switch.set(on=on)
                    side.switch(on=on)
                    cpu_s = time.process_time()
                    timing = await run_round(engine, rounds, number, concurrent)
                    measured.append((timing, time.process_time() - cpu_s))
                    assert switch.last_reading == on, "the worker does not read the switch"
    pairs = list(zip(with_[1:], without[1:], strict=True))
    plain_side = _side(without[1:])
    token_us = step_us / concurrent + request_us / _ANSWER_TOKENS
    return AccountingReport(
        model=rounds.model.spec.name,
        dtype=model.dtype,
        threads=threads,
        concurrent=concurrent,
        rounds=rounds.count,
        with_accounting=_side(with_[1:]),
        without=plain_side,
        overhead=Spread.of(1 - mine.tokens_per_s / plain.tokens_per_s for (mine, _), (plain, _) in pairs),
        worker_cpu=Spread.of(mine.cpu_us / plain.cpu_us - 1 for (mine, _), (plain, _) in pairs),
        engine_cpu=Spread.of(_engine_us(mine) / _engine_us(plain) - 1 for mine, plain in pairs),
        step_us=step_us,
        request_us=request_us,
        cpu_share=token_us / (plain_side.worker_cpu_us.median + plain_side.engine_cpu_us.median),
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
            table(["median", "with accounting", "without", "cost, median of pairs", "95% interval"], rows),
            "",
            f"The accounting alone: {report.step_us:.1f} us of CPU per step, {report.request_us:.1f} us per request of "
            f"{_ANSWER_TOKENS} tokens: {report.cpu_share:.2%} of the CPU per token",
        )
    )


def _cells(mine: Spread, plain: Spread, cost: Spread, form: str) -> list[str]:
    return [
        form.format(mine.median),
        form.format(plain.median),
        f"{cost.median:+.1%}",
        f"{cost.low:+.1%} to {cost.high:+.1%}",
    ]
