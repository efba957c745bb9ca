"""The simulator against the engine: the same requests to both, on this machine, within the same minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.bench.engines import all_ready
from console.bench.plan import Plan, plan_for
from console.bench.progress import Show
from console.planning.calibrating import Probes, calibrated, probe_engine
from console.planning.comparing import Answer, Run, simulated_answers
from console.planning.measuring import MeasuredWorker
from console.planning.real_runs import ask_engine
from console.planning.steps import Design
from console.planning.timekeeper import VOCAB_SIZE, TimekeepingBackend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.simulation.cluster import Cluster, FrontDoor
from engine.simulation.demand import Ask, Mix, OpenDemand, TraceDemand
from engine.simulation.fit import fit_steps
from engine.simulation.lengths import uniform
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts, StepSample

LoadName = Literal["light", "busy", "overload"]
LOADS: dict[LoadName, tuple[float, float]] = {"light": (0.35, 1.0), "busy": (0.6, 1.0), "overload": (3.0, 0.3)}
"""Each load's rate, as a share of what the worker can do, and for how much of the time of a run requests come: an
overload is short, as its queue takes three times as long to be worked off."""

MIX = Mix(prompt=uniform(64, 192), output=uniform(24, 56))
MAX_PROMPTS = 16
CONTEXT_TOKENS = 1024
_COUNTED_S = 1.5
FRONT = FrontDoor(request_s=250e-6, output_s=15e-6, slot_s=5e-6, shared=1.0)
"""Without HTTP, and on the cores of the worker."""


async def validate(model: str, loads: Sequence[LoadName], *, rounds: int, seconds: float, show: Show) -> list[Run]:
    """Each load `rounds` times for `seconds`, steps measured before and after each run. Raises EngineError."""
    plan = plan_for(model, threads=None, rounds=rounds)
    config = EngineConfig(max_prompts=MAX_PROMPTS, max_queue=100_000, timeout_s=0)
    design = Design(
        max_prompts=MAX_PROMPTS,
        step_tokens=config.step_tokens,
        page_tokens=config.page_tokens,
        longest_tokens=CONTEXT_TOKENS,
    )
    spec = msgspec.structs.replace(plan.spec, threads=plan.threads, kv_cache_tokens=MAX_PROMPTS * CONTEXT_TOKENS)
    engine = Engine(config)
    await engine.start()
    try:
        show("loading")
        await engine.load(spec)
        await all_ready(engine, 1)
        async with MeasuredWorker(model, design, plan.threads) as worker:
            await _warm(engine, plan, worker)
            found: list[Run] = []
            before = await _measured(engine, plan, worker, seconds, 0)
            for number in range(rounds):
                for load in loads:
                    show(f"{load}, round {number + 1} of {rounds}")
                    share, length = LOADS[load]
                    rate = share * _capacity_per_s(before.cluster(), MIX)
                    asks = list(OpenDemand(MIX, rate_per_s=rate, duration_s=length * seconds, seed=number).first())
                    busy_s = await _busy_s(engine)
                    answers = await ask_engine(engine, plan.vocab_size, asks)
                    busy_s = await _busy_s(engine) - busy_s
                    after = await _measured(engine, plan, worker, seconds, len(found) + 1)
                    found.append(_compared(load, rate, asks, answers, before + after, busy_s))
                    before = after
            return found
    finally:
        await engine.close(drain_s=0)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is known of the machine in some minutes: steps, and what the loop costs beside them."""

    steps: list[StepSample]
    probes: list[Probes]

    def __add__(self, other: _Measured) -> _Measured:
        return _Measured(self.steps + other.steps, self.probes + other.probes)

    def cluster(self) -> Cluster:
        """As it was then. The fit sets outliers apart, which slow a run all the same, so their seconds count in."""
        fit = fit_steps(self.steps)
        told_s = sum(fit.costs.seconds(sample.shape) for sample in self.steps)
        costs = fit.costs.slower(sum(sample.seconds for sample in self.steps) / told_s)
        return calibrated(_cluster(costs, fit.course), self.probes)


async def _measured(engine: Engine, plan: Plan, worker: MeasuredWorker, seconds: float, seed: int) -> _Measured:
    steps = await worker.steps(seconds)
    return _Measured(steps, [await probe_engine(engine, plan.vocab_size, MAX_PROMPTS, seed)])


def _compared(
    load: LoadName,
    rate: float,
    asks: Sequence[Ask],
    answers: list[Answer],
    measured: _Measured,
    busy_s: float,
) -> Run:
    """Simulate what was really run, with what was measured around it."""
    cluster = measured.cluster()
    outcome = simulate(cluster, TraceDemand(asks))
    slowness = busy_s / (outcome.utilisation[0] * outcome.seconds)
    slower = msgspec.structs.replace(cluster, costs=cluster.costs.slower(slowness))
    return Run(
        load=load,
        rate_per_s=rate,
        fit_error=fit_steps(measured.steps).error_median,
        slowness=slowness,
        real=answers,
        simulated=simulated_answers(outcome),
        at_speed=simulated_answers(simulate(slower, TraceDemand(asks))),
    )


async def _busy_s(engine: Engine) -> float:
    """Seconds that the worker was in steps so far, which the engine counts together once a second."""
    await asyncio.sleep(_COUNTED_S)
    return engine.snapshot().insight.session.busy_s


def _cluster(costs: StepCosts, course: tuple[float, ...]) -> Cluster:
    return Cluster(
        costs=costs,
        course=course,
        max_prompts=MAX_PROMPTS,
        kv_tokens=MAX_PROMPTS * CONTEXT_TOKENS,
        max_model_len=2 * CONTEXT_TOKENS,
        max_queue=100_000,
        timeout_s=0.0,
        front=FRONT,
    )


def _capacity_per_s(cluster: Cluster, mix: Mix) -> float:
    """Requests of this mix per second that the cluster answers when it always has enough of them."""
    asks = [msgspec.structs.replace(ask, at_s=0.0) for ask in OpenDemand(mix, rate_per_s=100, duration_s=3.0).first()]
    return len(asks) / simulate(cluster, TraceDemand(asks)).seconds


async def _warm(engine: Engine, plan: Plan, worker: MeasuredWorker) -> None:
    """The first steps of a process are slower."""
    await worker.steps(0)
    await ask_engine(
        engine, plan.vocab_size, [Ask(at_s=0.0, prompt_tokens=100, output_tokens=40) for _ in range(MAX_PROMPTS)]
    )


KEPT = Cluster(
    costs=StepCosts(fixed_s=0.02, decode_s=4e-4, context_token_s=1e-6, prompt_token_s=1e-4),
    workers=2,
    max_prompts=8,
    kv_tokens=8192,
    max_model_len=2048,
    max_queue=100_000,
    timeout_s=0.0,
    front=msgspec.structs.replace(FRONT, shared=0.0),
)
"""Workers like a card with a 7B model, whose steps take their time by sleeping."""
KEPT_MIX = Mix(prompt=uniform(100, 300), output=uniform(10, 40))


async def validate_kept(model: str, loads: Sequence[LoadName], *, seconds: float, show: Show) -> list[Run]:
    """Real workers that only keep time, under each load for `seconds`. model: whose tokenizer they take."""
    plan = plan_for(model, threads=1, rounds=1)
    config = EngineConfig(
        num_workers=KEPT.workers,
        max_prompts=KEPT.max_prompts,
        max_queue=KEPT.max_queue,
        timeout_s=0,
        worker_host="thread",
    )
    engine = Engine(config, backend_factory=TimekeepingBackend.factory(KEPT))
    await engine.start()
    try:
        await engine.load(plan.spec)
        await all_ready(engine, KEPT.workers)
        found = []
        capacity = _capacity_per_s(KEPT, KEPT_MIX)
        for load in loads:
            show(f"workers that keep time: {load}")
            share, length = LOADS[load]
            demand = OpenDemand(KEPT_MIX, rate_per_s=share * capacity, duration_s=length * seconds, seed=1)
            asks = list(demand.first())
            answers = await ask_engine(engine, VOCAB_SIZE, asks)
            outcome = simulated_answers(simulate(KEPT, TraceDemand(asks)))
            found.append(
                Run(
                    load=load,
                    rate_per_s=share * capacity,
                    fit_error=0.0,
                    slowness=1.0,
                    real=answers,
                    simulated=outcome,
                    at_speed=outcome,
                )
            )
        return found
    finally:
        await engine.close(drain_s=0)
