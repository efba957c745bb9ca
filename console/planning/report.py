"""The report of a plan: a table and a sentence for each question."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from console.bench.text import table
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster
from engine.simulation.outcome import Miss, Summary
from engine.simulation.step_costs import MeasuredModel
from engine.simulation.what_if import DeathAnswer, FrontAnswer, Goal, WorkersAnswer

# Why requests do not count as served, in words with numbers.


def misses_text(summary: Summary, cluster: Cluster, slo: Slo) -> str:
    """One sentence with the most frequent reason first; "" where no request misses the goal."""
    missed = sum(summary.misses.values())
    if not missed:
        return ""
    reasons = ", ".join(f"{count} {_reason(miss, count, cluster, slo)}" for miss, count in summary.misses.items())
    return f"Of {summary.requests} requests {missed} miss it ({missed / summary.requests:.1%}): {reasons}."


def _reason(miss: Miss, count: int, cluster: Cluster, slo: Slo) -> str:
    """The reason, as the predicate of `count` requests."""
    one = count == 1
    match miss:
        case "too long":
            return f"{'has' if one else 'have'} a prompt longer than {_room(cluster)}"
        case "refused":
            return f"{'finds' if one else 'find'} the queue full (--max-queue {cluster.max_queue})"
        case "timeout":
            return f"{'is' if one else 'are'} not finished within --timeout {cluster.timeout_s:g} s"
        case "failed":
            return f"{'fails' if one else 'fail'} after repeated worker crashes"
        case "first token":
            return f"{'waits' if one else 'wait'} longer than {_ms(slo.ttft_s)} for the first token"
        case "other tokens":
            return f"{'gets its' if one else 'get their'} tokens more than {_ms(slo.itl_s)} apart"


def _room(cluster: Cluster) -> str:
    whose = "the context" if cluster.max_model_len <= cluster.kv_tokens else "a worker's KV cache"
    return f"{cluster.longest_prompt} tokens, the limit of {whose}"


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:g} ms"


_FEW = 100
"""Requests: a share of fewer of them says little."""
_MANY_LONGER = 0.05
_HEADER = ("requests/s", "tok/s", "TTFT p50", "TTFT p95", "ITL p95", "E2E p95", "in SLO", "workers busy", "front busy")


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All answers; None is what was not asked, and what needs as many workers as meet the goal where none do.

    cluster: as it was simulated, with the workers that it takes.  speed: of its cards against the measured one.
    longer_share: of requests, those of more tokens than were measured with.
    """

    measured: MeasuredModel
    cluster: Cluster
    speed: float = 1.0
    longer_share: float = 0.0
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
        parts.append(_workers_text(report.workers, report))
    if report.death is not None:
        parts.append(_death_text(report.death, report))
    if report.front is not None:
        parts.append(_front_text(report.front))
    return "\n\n".join(parts)


def _heading(report: PlanReport) -> str:
    measured, goal, cluster = report.measured, report.goal, report.cluster
    bounds = [
        f"{name} {seconds * 1e3:g} ms"
        for name, seconds in (("TTFT", goal.slo.ttft_s), ("ITL", goal.slo.itl_s))
        if seconds is not None
    ]
    bound = f"within {' and '.join(bounds)}" if bounds else "answered"
    faster = f" Planned cards: {report.speed:g} times as fast." if report.speed != 1 else ""
    lines = [
        f"{measured.model}, measured on {measured.machine} ({_configuration(measured)}). Error of predicted step "
        f"times: {measured.fit.error_median:.1%} median, {measured.fit.error_p95:.0%} p95.{faster}",
        f"Worker: max prompts {cluster.max_prompts}, {cluster.step_tokens} tokens per step, KV cache "
        f"{cluster.kv_tokens} tokens, context {cluster.max_model_len}. Queue: {cluster.max_queue}.",
        f"Load: {report.demand}. Goal: {goal.share:.0%} of requests {bound}.",
    ]
    return "\n".join([*lines, *_notes(report)])


def _configuration(measured: MeasuredModel) -> str:
    """How the measured model was loaded, as far as the file says."""
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}" if measured.device == "cpu" else ""
    weights = f"{measured.weights} weights" if measured.weights not in ("", "auto") else ""
    cache = f"{measured.cache_bits}-bit KV cache" if measured.cache_bits is not None else ""
    found = (measured.device, threads, measured.backend, measured.dtype, weights, cache)
    return ", ".join(each for each in found if each)


def _notes(report: PlanReport) -> Iterator[str]:
    """Notes on extrapolation and on small samples."""
    measured, cluster = report.measured, report.cluster
    if not measured.max_prompts:
        yield "Note: the file has no measured concurrency; measure again."
    elif cluster.max_prompts > measured.max_prompts:
        yield (
            f"Note: measured up to {measured.max_prompts} concurrent answers; up to {cluster.max_prompts} are "
            f"extrapolated. Measure with --max-prompts {cluster.max_prompts}."
        )
    if cluster.step_tokens > measured.step_tokens:
        yield f"Note: measured steps of up to {measured.step_tokens} tokens; larger ones are extrapolated."
    if report.longer_share > _MANY_LONGER:
        yield (
            f"Note: measured contexts of up to {measured.context_tokens} tokens; {report.longer_share:.0%} "
            "of requests have longer ones, whose costs are extrapolated."
        )
    counted = min((summary.requests for summary in _counted(report)), default=_FEW)
    if counted < _FEW:
        yield f"Note: only {counted} requests were counted, so shares are imprecise. Use a longer --duration."


def _counted(report: PlanReport) -> Iterator[Summary]:
    if report.workers is not None:
        yield from (trial.summary for trial in report.workers.trials if trial.demand == 1)
    if report.death is not None:
        yield report.death.calm


def _workers_text(answer: WorkersAnswer, report: PlanReport) -> str:
    trials = [trial for trial in answer.trials if trial.demand == 1]
    if answer.workers is None:
        sentence = _none_text(answer, report)
    else:
        margin = ""
        if answer.margin is not None:
            least = "at least " if answer.margin >= 1 else ""
            margin = f"; headroom {least}{answer.margin:.0%}"
        sentence = f"Needs {_cards(answer.workers, report.cards_per_worker)}{margin}."
    alone = ["one by one", "", "", *_row(answer.alone)[2:-2], "", ""]  # rates of single requests mean nothing
    rows = [alone, *([str(each.workers), *_row(each.summary)] for each in trials)]
    return f"{sentence}\n\n{table(['workers', *_HEADER], rows)}"


def _none_text(answer: WorkersAnswer, report: PlanReport) -> str:
    """Why no number of workers meets the goal, and for what requests miss it."""
    shown = answer.trials[-1].summary if answer.trials else answer.alone
    reason = {
        "requests": "No number of workers meets the goal: requests miss it even one by one.",
        "front": (
            f"More workers do not meet the goal: the front end is full, {shown.front_busy:.0%} busy and up to "
            f"{_time(shown.front_behind_s)} behind with {answer.trials[-1].workers if answer.trials else 0} workers."
        ),
        "most": f"{answer.most} workers, the limit of --most-workers, do not meet the goal.",
    }[answer.why or "most"]
    left = " For the other questions set --workers."
    return f"{reason} {misses_text(shown, report.cluster, report.goal.slo)}{left}"


def _death_text(answer: DeathAnswer, report: PlanReport) -> str:
    calm, slo = answer.calm, report.goal.slo
    sentences = [
        f"A node with {answer.lost_workers} of {answer.workers} workers fails at {answer.at_s:g} s and is back at "
        f"{answer.back_s:g} s: max TTFT {_time(answer.worst_ttft_s)} (without the failure {_time(calm.ttft_s.most)}), "
        f"{answer.late} more requests late, {answer.not_answered} more not answered, {answer.resumed} resumed on "
        f"other workers, max {answer.most_queued} queued; {_recovered(answer)}."
    ]
    if answer.last_s < answer.back_s:
        sentences.append(f"The last request arrives at {answer.last_s:g} s; later effects are not simulated.")
    if report.workers is None and not report.goal.is_met(calm):
        missed = misses_text(calm, report.cluster, slo)
        sentences.append(f"The goal is not met even without the failure. {missed}")
    elif died_missed := misses_text(answer.died, report.cluster, slo):
        sentences.append(f"With the failure: {died_missed[0].lower()}{died_missed[1:]}")
    rows = [["no failure", *_row(calm)], ["failure", *_row(answer.died)]]
    return f"{' '.join(sentences)}\n\n{table(['', *_HEADER], rows)}"


def _recovered(answer: DeathAnswer) -> str:
    if answer.recovered_s is None:
        return f"requests are still late at the end, {answer.last_s - answer.at_s:.0f} s later"
    return f"requests are late for {answer.recovered_s:.0f} s"


def _front_text(answer: FrontAnswer) -> str:
    sentence = (
        f"The front end is full at {answer.requests_per_s:.3g} requests/s, {answer.demand:.3g} times this load, "
        f"with about {answer.workers} workers: {answer.request_s * 1e3:.2f} ms of CPU per request."
    )
    rows = [[f"{trial.demand:.3g}x, {trial.workers} workers", *_row(trial.summary)] for trial in answer.trials]
    return f"{sentence}\n\n{table(['load', *_HEADER], rows)}"


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
