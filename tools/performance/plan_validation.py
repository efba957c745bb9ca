"""The simulator of `ericllm plan` against the engine: the same requests to both, on this machine, within minutes.

python -m tools.performance.plan_validation MODEL --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

import msgspec

from console.bench.engine_target import all_ready
from console.bench.progress import Progress, Show
from console.bench.text import table
from console.planning.measuring import Design, LocalModel, MeasuredWorker, local_model
from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import WorkerFailed
from engine.requests.request import GenerateRequest
from engine.simulation.cluster import Cluster, FrontDoor
from engine.simulation.demand import Ask, Mix, OpenDemand, TraceDemand
from engine.simulation.lengths import uniform
from engine.simulation.outcome import Outcome, Percentiles
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts, StepSample, fit_steps, solve
from tools.command import exit_code
from tools.performance.timekeeper import VOCAB_SIZE, TimekeepingBackend

# Real runs and simulated ones of the same requests, side by side.


class Answer(msgspec.Struct, frozen=True):
    """A request: when it was due, had its first token, had its last one, and how many it had."""

    due_s: float
    first_s: float
    last_s: float
    tokens: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that are compared."""

    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p95_s: float
    e2e_p95_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        """Of all answers of a run."""
        seconds = max(each.last_s for each in answers) - min(each.due_s for each in answers)
        ttft = Percentiles.of(each.first_s - each.due_s for each in answers)
        return cls(
            output_tokens_per_s=sum(each.tokens for each in answers) / seconds,
            ttft_p50_s=ttft.p50,
            ttft_p95_s=ttft.p95,
            tpot_p95_s=Percentiles.of((each.last_s - each.first_s) / max(1, each.tokens - 1) for each in answers).p95,
            e2e_p95_s=Percentiles.of(each.last_s - each.due_s for each in answers).p95,
        )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load, and what the simulator made of the same requests.

    slowness: seconds in steps, really, against simulated ones: how much slower the machine was in the run than when
    steps were measured, before and after it.  at_speed: simulated with every step that much slower.
    """

    load: str
    rate_per_s: float
    fit_error: float
    slowness: float
    real: list[Answer]
    simulated: list[Answer]
    at_speed: list[Answer]


class Deviation(msgspec.Struct, frozen=True):
    """How far the simulator is from the engine, as a share of what that did: the median of all runs and their range."""

    median: float
    least: float
    most: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a load: medians over them, as machines slow down for seconds now and then.

    off, off_at_speed: by the names of Figures, the simulator against the engine in the same run.
    """

    load: str
    runs: int
    requests: int
    slowness: tuple[float, ...]
    real: Figures
    simulated: Figures
    at_speed: Figures
    off: dict[str, Deviation]
    off_at_speed: dict[str, Deviation]

    @classmethod
    def of(cls, load: str, runs: Sequence[Run]) -> Comparison:
        """Of the runs of this load, one at least."""
        own = [run for run in runs if run.load == load]
        real = [Figures.of(run.real) for run in own]
        simulated = [Figures.of(run.simulated) for run in own]
        at_speed = [Figures.of(run.at_speed) for run in own]
        return cls(
            load=load,
            runs=len(own),
            requests=sum(len(run.real) for run in own),
            slowness=tuple(round(run.slowness, 3) for run in own),
            real=_medians(real),
            simulated=_medians(simulated),
            at_speed=_medians(at_speed),
            off=_off(real, simulated),
            off_at_speed=_off(real, at_speed),
        )


def simulated_answers(outcome: Outcome) -> list[Answer]:
    return [Answer(each.ask.at_s, each.first_s or 0.0, each.ended_s, each.output_tokens) for each in outcome.served]


def _medians(runs: Sequence[Figures]) -> Figures:
    return Figures(**{name: median(getattr(run, name) for run in runs) for name in Figures.__struct_fields__})


def _off(real: Sequence[Figures], simulated: Sequence[Figures]) -> dict[str, Deviation]:
    found = {}
    for name in Figures.__struct_fields__:
        shares = [getattr(other, name) / getattr(one, name) - 1 for one, other in zip(real, simulated, strict=True)]
        found[name] = Deviation(median(shares), min(shares), max(shares))
    return found


_SHOWN = (
    ("output_tokens_per_s", "tok/s", 1.0, "{:.0f}"),
    ("ttft_p50_s", "TTFT p50 ms", 1e3, "{:.0f}"),
    ("ttft_p95_s", "TTFT p95 ms", 1e3, "{:.0f}"),
    ("tpot_p95_s", "TPOT p95 ms", 1e3, "{:.1f}"),
    ("e2e_p95_s", "E2E p95 ms", 1e3, "{:.0f}"),
)


def compared(runs: Sequence[Run]) -> list[Comparison]:
    """The runs by load."""
    return [Comparison.of(load, runs) for load in dict.fromkeys(run.load for run in runs)]


def validation_text(found: Sequence[Comparison]) -> str:
    """Real and simulated numbers, medians over runs and in brackets from which run to which, with costs as measured
    around the runs; and, where steps were not as slow in them, at the speed of the runs themselves."""
    paced = any(slowness != 1.0 for each in found for slowness in each.slowness)
    rows = []
    for each in found:
        for name, title, unit, form in _SHOWN:
            cells = [form.format(unit * getattr(each.real, name))]
            others = [(each.simulated, each.off), (each.at_speed, each.off_at_speed)]
            for figures, off in others[: 1 + paced]:
                cells += [form.format(unit * getattr(figures, name)), _off_text(off[name])]
            rows.append([f"{each.load}: {title}", *cells])
    header = ["", "real", "simulated", "off", *(["at its speed", "off"] if paced else [])]
    return "\n".join((table(header, rows), "", *map(_note, found)))


def _off_text(off: Deviation) -> str:
    spread = f" ({off.least:+.0%} to {off.most:+.0%})" if off.least != off.most else ""
    return f"{off.median:+.1%}{spread}"


def _note(found: Comparison) -> str:
    slower = ", ".join(f"{slowness - 1:+.0%}" for slowness in found.slowness if slowness != 1.0)
    text = f"{found.load}: {found.requests} requests in {found.runs} runs"
    return f"{text}, steps slower in them by {slower}" if slower else text


# Requests to a real engine in this process, when they are due.


async def ask_engine(engine: Engine, vocab_size: int, asks: Sequence[Ask], *, seed: int = 0) -> list[Answer]:
    """Send the requests when they are due, to the engine, and read their answers. seed: of the prompts."""
    source = random.Random(f"{seed} {len(asks)} {asks[-1].at_s}")
    prompts = [source.choices(range(vocab_size), k=ask.prompt_tokens) for ask in asks]
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


# Costs of the engine's loop besides steps, found by putting small probes to the real engine and to the simulator.
#
# Steps are measured in a worker that has the machine to itself. In an engine, its messages wake another process on
# the same cores, and a request waits for that process to get one. How long, depends on the machine and on who else is
# there, so it is measured in the same minutes as the steps: by some answers with requests in their midst, and by twice
# as many answers as there are places, all asked for at once. None of these is a load that the simulator is judged by.
#
# No probe waits for an idle machine: cores that sleep wake up so slowly that a first token takes half as long again,
# and under load they do not sleep.

_STREAMS, _STREAM_EVERY_S = 12, 0.25
_AMID = 3
_SINGLES, _SINGLE_EVERY_S, _LATER_EACH_S = 3, 0.03, 1.2e-4
"""Requests amid answers; each a little later in a step than the one before, or all would wait equally long for it."""
_CROWDS = 3
_PROMPT_TOKENS = 96
_ANSWER_TOKENS = 96
_ITERATIONS = 2
_NUDGES_S = (1e-3, 3e-4, 3e-5)
"""What each cost is made larger by to see what that does: about as large as they are, as with less it would matter at
which moments of a step requests happen to come."""


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. first_s: to the first token of a request amid answers.  token_s: from one token of those answers to the
    next.  crowd_s: until all of twice as many answers as there are places have ended, sent at once."""

    first_s: float
    token_s: float
    crowd_s: float

    @property
    def values(self) -> tuple[float, float, float]:
        """All of them."""
        return self.first_s, self.token_s, self.crowd_s


async def probe_engine(engine: Engine, vocab_size: int, places: int, seed: int) -> Probes:
    """Probe an engine that has nothing else to do. seed: of the prompts, another one each time."""
    alone = await ask_engine(engine, vocab_size, _streams(), seed=seed)
    crowds = [
        await ask_engine(engine, vocab_size, _crowd(places), seed=_CROWDS * seed + number) for number in range(_CROWDS)
    ]
    return _probes(alone, crowds)


def probe_simulated(cluster: Cluster) -> Probes:
    """The same, simulated."""
    alone, crowd = (
        simulated_answers(simulate(cluster, TraceDemand(asks))) for asks in (_streams(), _crowd(cluster.max_prompts))
    )
    return _probes(alone, [crowd])


def calibrated(cluster: Cluster, real: Sequence[Probes]) -> Cluster:
    """Return the cluster with the times of its loop that predict these probes best: until a request or a message gets
    through, and what a message and what is in it cost. The rest of its costs stay as they are. The simulator is not
    quite linear in them, so they are found by Gauss and Newton's method, and the first, passed twice, once more by
    itself."""
    took = [median(values) for values in zip(*(each.values for each in real), strict=True)]
    found = [0.0] * len(took)
    for _ in range(_ITERATIONS):
        predicted = probe_simulated(_with(cluster, *found)).values
        moved = [probe_simulated(_with(cluster, *_nudged(found, place))).values for place in range(len(found))]
        rows = [
            [(values[probe] - predicted[probe]) / nudge_s for values, nudge_s in zip(moved, _NUDGES_S, strict=True)]
            for probe in range(len(took))
        ]
        reached = [sum(slope * cost for slope, cost in zip(row, found, strict=True)) for row in rows]
        missing = [
            real_s - predicted_s + at_s for real_s, predicted_s, at_s in zip(took, predicted, reached, strict=True)
        ]
        found = solve(rows, missing, [1 / seconds**2 for seconds in took])
    for _ in range(_ITERATIONS):
        found[0] = max(0.0, found[0] + (took[0] - probe_simulated(_with(cluster, *found)).first_s) / 2)
    return _with(cluster, *found)


def _nudged(costs: Sequence[float], place: int) -> list[float]:
    return [cost + _NUDGES_S[place] * (number == place) for number, cost in enumerate(costs)]


def _with(cluster: Cluster, hop_s: float, message_s: float, output_s: float) -> Cluster:
    front = msgspec.structs.replace(cluster.front, message_s=message_s, output_s=output_s)
    return msgspec.structs.replace(cluster, hop_s=hop_s, front=front)


def _probes(alone: Sequence[Answer], crowds: Sequence[Sequence[Answer]]) -> Probes:
    return Probes(
        first_s=_middle(each.first_s - each.due_s for each in alone if each.tokens == 1),
        token_s=median((each.last_s - each.first_s) / (each.tokens - 1) for each in alone if each.tokens > 1),
        crowd_s=median(max(each.last_s for each in crowd) - crowd[0].due_s for crowd in crowds),
    )


def _middle(values: Iterable[float]) -> float:
    """The mean of the middle half."""
    found = sorted(values)
    return fmean(found[len(found) // 4 : -(len(found) // 4) or None])


def _streams() -> list[Ask]:
    """Some answers at once, time and again, and amid each lot other requests, of one token."""
    asks = []
    for number in range(_STREAMS):
        at_s = number * _STREAM_EVERY_S
        asks += [_ask(at_s, _ANSWER_TOKENS) for _ in range(_AMID)]
        for single in range(_SINGLES):
            later_s = (number * _SINGLES + single) * _LATER_EACH_S
            asks.append(_ask(at_s + (single + 1) * _SINGLE_EVERY_S + later_s, 1))
    return asks


def _crowd(places: int) -> list[Ask]:
    """Those of the second half begin as others end, each at another time."""
    return [_ask(0.0, _ANSWER_TOKENS // 3 * (1 + number % 3)) for number in range(2 * places)]


def _ask(at_s: float, output_tokens: int) -> Ask:
    return Ask(at_s=at_s, prompt_tokens=_PROMPT_TOKENS, output_tokens=output_tokens)


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
    local = local_model(model, threads=None)
    config = EngineConfig(max_prompts=MAX_PROMPTS, max_queue=100_000, timeout_s=0)
    design = Design(
        max_prompts=MAX_PROMPTS,
        step_tokens=config.step_tokens,
        page_tokens=config.page_tokens,
        longest_tokens=CONTEXT_TOKENS,
    )
    spec = msgspec.structs.replace(local.spec, threads=local.threads, kv_cache_tokens=MAX_PROMPTS * CONTEXT_TOKENS)
    engine = Engine(config)
    await engine.start()
    try:
        show("loading")
        await engine.load(spec)
        await all_ready(engine, 1)
        async with MeasuredWorker(model, design, local.threads) as worker:
            await _warm(engine, local, worker)
            found: list[Run] = []
            before = await _measured(engine, local, worker, seconds, 0)
            for number in range(rounds):
                for load in loads:
                    show(f"{load}, round {number + 1} of {rounds}")
                    share, length = LOADS[load]
                    rate = share * _capacity_per_s(before.cluster(), MIX)
                    asks = list(OpenDemand(MIX, rate_per_s=rate, duration_s=length * seconds, seed=number).first())
                    busy_s = await _busy_s(engine)
                    answers = await ask_engine(engine, local.vocab_size, asks)
                    busy_s = await _busy_s(engine) - busy_s
                    after = await _measured(engine, local, worker, seconds, len(found) + 1)
                    found.append(_compared(load, rate, asks, answers, before + after, busy_s))
                    before = after
            return found
    finally:
        await engine.close(drain_s=0)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of the machine in some minutes: steps, and the costs of the loop besides them."""

    steps: list[StepSample]
    probes: list[Probes]

    def __add__(self, other: _Measured) -> _Measured:
        return _Measured(self.steps + other.steps, self.probes + other.probes)

    def cluster(self) -> Cluster:
        """As it was then. The fit sets outliers apart, which slow a run all the same, so their seconds count in."""
        fit = fit_steps(self.steps)
        predicted_s = sum(fit.costs.seconds(sample.shape) for sample in self.steps)
        costs = fit.costs.slower(sum(sample.seconds for sample in self.steps) / predicted_s)
        return calibrated(_cluster(costs, fit.course), self.probes)


async def _measured(engine: Engine, local: LocalModel, worker: MeasuredWorker, seconds: float, seed: int) -> _Measured:
    steps = await worker.steps(seconds)
    return _Measured(steps, [await probe_engine(engine, local.vocab_size, MAX_PROMPTS, seed)])


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


async def _warm(engine: Engine, local: LocalModel, worker: MeasuredWorker) -> None:
    """The first steps of a process are slower."""
    await worker.steps(0)
    await ask_engine(
        engine, local.vocab_size, [Ask(at_s=0.0, prompt_tokens=100, output_tokens=40) for _ in range(MAX_PROMPTS)]
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
    local = local_model(model, threads=1)
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
        await engine.load(local.spec)
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


def main() -> int:
    """Run both comparisons and print their tables."""
    parser = argparse.ArgumentParser(description="Compare the simulator with real runs, under three loads.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each load (default 5)")
    arguments = parser.parse_args()
    return exit_code(lambda: _compare(arguments.model, arguments.rounds))


def _compare(model: str, rounds: int) -> None:
    progress, loads = Progress(sys.stderr), tuple(LOADS)
    try:
        timed = compared(asyncio.run(validate_kept(model, loads, seconds=30.0, show=progress.show)))
        real = compared(asyncio.run(validate(model, loads, rounds=rounds, seconds=10.0, show=progress.show)))
    finally:
        progress.end()
    print(f"Workers that only keep time\n\n{validation_text(timed)}\n\n{model}\n\n{validation_text(real)}")


if __name__ == "__main__":
    sys.exit(main())
