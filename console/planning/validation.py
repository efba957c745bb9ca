"""The simulator against the engine: the same requests to both, on this machine, within the same minutes."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from console.bench.engines import all_ready
from console.bench.plan import Plan, plan_for
from console.bench.progress import Show
from console.bench.table import table
from console.planning.measuring import MeasuredWorker
from console.planning.steps import Design
from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import WorkerFailed
from engine.request import GenerateRequest
from engine.simulation.cluster import Cluster, FrontDoor
from engine.simulation.demand import Ask, Lengths, Mix, OpenDemand, TraceDemand
from engine.simulation.fit import fit_steps
from engine.simulation.outcome import Outcome, Percentiles
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts, StepSample

LoadName = Literal["light", "near", "overload", "bursty"]
LOADS: dict[LoadName, tuple[float, float]] = {
    "light": (0.35, 1.0),
    "near": (0.8, 1.0),
    "overload": (1.4, 1.0),
    "bursty": (0.6, 3.0),
}
"""Each load's rate, as a share of what the worker can do, and the burstiness of its arrivals."""

MIX = Mix(prompt=Lengths(64, 192), output=Lengths(48, 112))
MAX_PROMPTS = 16
CONTEXT_TOKENS = 1024
FRONT = FrontDoor(request_s=250e-6, output_s=15e-6, slot_s=5e-6, shared=1.0)
"""Without HTTP, and on the cores of the worker."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p95_s: float
    e2e_p95_s: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load. scale: what the fitted costs were multiplied with for the speed of the machine around it."""

    load: str
    rate_per_s: float
    requests: int
    fit_error: float
    real: Figures
    simulated: Figures

    def off(self, name: str) -> float:
        """How far the simulator is off, as a share of what was real."""
        real: float = getattr(self.real, name)
        simulated: float = getattr(self.simulated, name)
        return simulated / real - 1


class Answer(msgspec.Struct, frozen=True):
    """A real request: when it was due, had its first token, had its last one, and how many it had."""

    due_s: float
    first_s: float
    last_s: float
    tokens: int


async def validate(
    model: str, loads: Sequence[LoadName], *, rounds: int, seconds: float, show: Show
) -> list[Comparison]:
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
            found = []
            before = await worker.steps(seconds)
            for number in range(rounds):
                for load in loads:
                    show(f"{load}, round {number + 1} of {rounds}")
                    run = await _run(engine, plan, worker, load, number, before, seconds)
                    found.append(run[0])
                    before = run[1]
            return found
    finally:
        await engine.close(drain_s=0)


async def _run(
    engine: Engine,
    plan: Plan,
    worker: MeasuredWorker,
    load: LoadName,
    number: int,
    before: list[StepSample],
    seconds: float,
) -> tuple[Comparison, list[StepSample]]:
    share, cv = LOADS[load]
    rate = share * capacity_per_s(fit_steps(before).costs)
    asks = list(OpenDemand(MIX, rate_per_s=rate, duration_s=seconds, cv=cv, seed=number).first())
    answers = await _really(engine, plan, asks)
    after = await worker.steps(seconds)
    fit = fit_steps([*before, *after])
    outcome = simulate(_cluster(fit.costs), TraceDemand(asks))
    comparison = Comparison(
        load=load,
        rate_per_s=rate,
        requests=len(asks),
        fit_error=fit.error_median,
        real=_figures(answers),
        simulated=_figures(_simulated(outcome)),
    )
    return comparison, after


def _cluster(costs: StepCosts) -> Cluster:
    return Cluster(
        costs=costs,
        max_prompts=MAX_PROMPTS,
        kv_tokens=MAX_PROMPTS * CONTEXT_TOKENS,
        max_model_len=2 * CONTEXT_TOKENS,
        max_queue=100_000,
        timeout_s=0.0,
        front=FRONT,
    )


def capacity_per_s(costs: StepCosts) -> float:
    """Requests of MIX per second that a worker answers when it always has enough of them."""
    asks = [msgspec.structs.replace(ask, at_s=0.0) for ask in OpenDemand(MIX, rate_per_s=100, duration_s=3.0).first()]
    return len(asks) / simulate(_cluster(costs), TraceDemand(asks)).seconds


async def _warm(engine: Engine, plan: Plan, worker: MeasuredWorker) -> None:
    """The first steps of a process are slower."""
    await worker.steps(0)
    await _really(engine, plan, [Ask(at_s=0.0, prompt_tokens=100, output_tokens=40) for _ in range(MAX_PROMPTS)])


async def _really(engine: Engine, plan: Plan, asks: Sequence[Ask]) -> list[Answer]:
    """Send the requests when they are due, to the engine, and read their answers."""
    source = random.Random(f"{len(asks)} {asks[-1].at_s}")
    prompts = [source.choices(range(plan.vocab_size), k=ask.prompt_tokens) for ask in asks]
    began_s = asyncio.get_running_loop().time()
    return await asyncio.gather(
        *(_answer(engine, ask, prompt, began_s) for ask, prompt in zip(asks, prompts, strict=True))
    )


async def _answer(engine: Engine, ask: Ask, prompt: list[int], began_s: float) -> Answer:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(began_s + ask.at_s - clock())
    params = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True, seed=0)
    first_s, tokens = 0.0, 0
    async for delta in engine.submit(GenerateRequest(prompt_ids=prompt, params=params, source="bench")):
        if delta.token_ids and not tokens:
            first_s = clock()
        tokens = delta.output_tokens
        if delta.finish not in (None, "length"):
            raise WorkerFailed(delta.error.message if delta.error else f"an answer ended with {delta.finish}")
    return Answer(ask.at_s, first_s - began_s, clock() - began_s, tokens)


def _simulated(outcome: Outcome) -> list[Answer]:
    return [Answer(each.ask.at_s, each.first_s or 0.0, each.ended_s, each.output_tokens) for each in outcome.served]


def _figures(answers: Sequence[Answer]) -> Figures:
    seconds = max(each.last_s for each in answers) - min(each.due_s for each in answers)
    ttft = Percentiles.of(each.first_s - each.due_s for each in answers)
    return Figures(
        output_tokens_per_s=sum(each.tokens for each in answers) / seconds,
        ttft_p50_s=ttft.p50,
        ttft_p95_s=ttft.p95,
        tpot_p95_s=Percentiles.of((each.last_s - each.first_s) / max(1, each.tokens - 1) for each in answers).p95,
        e2e_p95_s=Percentiles.of(each.last_s - each.due_s for each in answers).p95,
    )


_SHOWN = (
    ("output_tokens_per_s", "tok/s", 1.0, "{:.0f}"),
    ("ttft_p50_s", "TTFT p50 ms", 1e3, "{:.0f}"),
    ("ttft_p95_s", "TTFT p95 ms", 1e3, "{:.0f}"),
    ("tpot_p95_s", "TPOT p95 ms", 1e3, "{:.1f}"),
    ("e2e_p95_s", "E2E p95 ms", 1e3, "{:.0f}"),
)


def validation_text(found: Sequence[Comparison]) -> str:
    """Medians over the rounds of each load: real, simulated, and by how much the simulator is off."""
    rows = []
    for load in dict.fromkeys(each.load for each in found):
        runs = [each for each in found if each.load == load]
        for name, title, unit, form in _SHOWN:
            real = statistics.median(getattr(each.real, name) for each in runs)
            simulated = statistics.median(getattr(each.simulated, name) for each in runs)
            offs = sorted(each.off(name) for each in runs)
            spread = f"{offs[0]:+.0%} to {offs[-1]:+.0%}"
            numbers = (form.format(unit * real), form.format(unit * simulated))
            rows.append([f"{load}: {title}", *numbers, f"{statistics.median(offs):+.1%}", spread])
    return table(["", "real", "simulated", "off", "least to most"], rows)
