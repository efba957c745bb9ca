"""What a plan says to a person: a table and a sentence for each question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from console.bench.table import table
from engine.simulation.cluster import Cluster
from engine.simulation.outcome import Summary
from engine.simulation.questions import DeathAnswer, FrontAnswer, Goal, Trial, WorkersAnswer
from engine.simulation.step_costs import MeasuredModel

_HEADER = ("requests/s", "tok/s", "TTFT p50", "TTFT p95", "ITL p95", "E2E p95", "in SLO", "workers busy", "front busy")


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All answers; what was not asked is None. cluster: as it was simulated, with the workers that it takes."""

    measured: MeasuredModel
    cluster: Cluster
    cards_per_worker: int
    demand: str
    goal: Goal
    workers: WorkersAnswer | None
    death: DeathAnswer | None
    front: FrontAnswer | None


def plan_text(report: PlanReport) -> str:
    """The report for a person."""
    parts = [_heading(report)]
    if report.workers is not None:
        parts.append(_workers_text(report.workers, report.cards_per_worker))
    if report.death is not None:
        parts.append(_death_text(report.death))
    if report.front is not None:
        parts.append(_front_text(report.front))
    return "\n\n".join(parts)


def _heading(report: PlanReport) -> str:
    measured, goal = report.measured, report.goal
    bounds = [
        f"{name} {seconds * 1e3:g} ms"
        for name, seconds in (("TTFT", goal.slo.ttft_s), ("ITL", goal.slo.itl_s))
        if seconds is not None
    ]
    held = " and ".join(bounds) if bounds else "being answered at all"
    return (
        f"{measured.model} as measured on {measured.machine} ({measured.device}): the costs tell a step to "
        f"{measured.fit.error_median:.1%} (median; 95% of steps to {measured.fit.error_p95:.0%}).\n"
        f"Demand: {report.demand}. Goal: {goal.share:.0%} of requests within {held}."
    )


def _workers_text(answer: WorkersAnswer, cards: int) -> str:
    trials = [trial for trial in answer.trials if trial.demand == 1]
    if answer.workers is None:
        sentence = f"{answer.most} workers, the most that were tried, do not meet the goal."
    else:
        margin = ""
        if answer.margin is not None:
            least = "at least " if answer.margin >= 1 else ""
            margin = f"; they carry {least}{answer.margin:.0%} more demand within the goal"
        sentence = f"It takes {_cards(answer.workers, cards)}{margin}."
    return f"{sentence}\n\n{_trials(trials, 'workers', lambda trial: str(trial.workers))}"


def _death_text(answer: DeathAnswer) -> str:
    died = answer.died
    sentence = (
        f"A node with {answer.lost_workers} of {answer.workers} workers dies after {answer.at_s:g} s: the worst TTFT "
        f"is then {_time(answer.worst_ttft_s)} (the worst in the calm {_time(answer.calm.ttft_s.most)}), "
        f"{answer.late} requests are late that would not be, {answer.not_answered} are not answered, "
        f"{answer.resumed} go on elsewhere, up to {answer.most_queued} wait, and requests are late for "
        f"{answer.recovered_s:.0f} s."
    )
    rows = [["no death", *_row(answer.calm)], ["a death", *_row(died)]]
    return f"{sentence}\n\n{table(['', *_HEADER], rows)}"


def _front_text(answer: FrontAnswer) -> str:
    sentence = (
        f"The front door is full at {answer.requests_per_s:.3g} requests/s, {answer.demand:.3g} times this demand, "
        f"which takes about {answer.workers} workers: a request costs it {answer.request_s * 1e3:.2f} ms of CPU."
    )
    shown = _trials(answer.trials, "demand", lambda trial: f"{trial.demand:.3g}x, {trial.workers} workers")
    return f"{sentence}\n\n{shown}"


def _trials(trials: Sequence[Trial], title: str, name: Callable[[Trial], str]) -> str:
    return table([title, *_HEADER], [[name(trial), *_row(trial.summary)] for trial in trials])


def _row(summary: Summary) -> list[str]:
    return [
        f"{summary.requests_per_s:.3g}",
        f"{summary.output_tokens_per_s:.0f}",
        _time(summary.ttft_s.p50),
        _time(summary.ttft_s.p95),
        _time(summary.tpot_s.p95),
        _time(summary.e2e_s.p95),
        f"{summary.kept_share:.1%}",
        f"{summary.utilisation:.0%}",
        f"{summary.front_busy:.0%}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms"


def _cards(workers: int, cards: int) -> str:
    one = "worker" if workers == 1 else "workers"
    total = workers * cards
    return f"{workers} {one} ({total} {'card' if total == 1 else 'cards'})"
