"""Real runs and simulated ones of the same requests, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from console.bench.table import table
from engine.simulation.outcome import Outcome, Percentiles


class Answer(msgspec.Struct, frozen=True):
    """A request: when it was due, had its first token, had its last one, and how many it had."""

    due_s: float
    first_s: float
    last_s: float
    tokens: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

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


class Off(msgspec.Struct, frozen=True):
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
    off: dict[str, Off]
    off_at_speed: dict[str, Off]

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


def _off(real: Sequence[Figures], simulated: Sequence[Figures]) -> dict[str, Off]:
    found = {}
    for name in Figures.__struct_fields__:
        shares = [getattr(said, name) / getattr(was, name) - 1 for was, said in zip(real, simulated, strict=True)]
        found[name] = Off(median(shares), min(shares), max(shares))
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


def _off_text(off: Off) -> str:
    spread = f" ({off.least:+.0%} to {off.most:+.0%})" if off.least != off.most else ""
    return f"{off.median:+.1%}{spread}"


def _note(found: Comparison) -> str:
    slower = ", ".join(f"{slowness - 1:+.0%}" for slowness in found.slowness if slowness != 1.0)
    told = f"{found.load}: {found.requests} requests in {found.runs} runs"
    return f"{told}, steps slower in them by {slower}" if slower else told
