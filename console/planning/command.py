"""`ericllm plan`: from flags to answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from console.bench.progress import Progress, Show
from console.output import write
from console.planning.asking import Asking, asking_of
from console.planning.flags import LOADING, parse
from console.planning.report import PlanReport, plan_text
from console.planning.unused import questions, refuse_unused
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.outcome import Slo
from engine.simulation.questions import DeathAnswer, Goal, front_door_limit, node_death, workers_needed
from engine.simulation.step_costs import MeasuredModel

_SETTLING = 0.5
"""Of the duration: for how long requests go on to come after a dead node is back."""


def plan(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0. Raises EngineError for what cannot be measured or simulated."""
    given = parse(argv, parser)
    refuse_unused(given)
    progress = Progress(sys.stderr)
    try:
        if given.validate is not None:
            text = _validated(given, progress.show)
        else:
            report = _answered(given, progress.show)
            text = _json(report) if given.as_json else plan_text(report)
    finally:
        progress.end()
    write(text, as_json=given.as_json)
    return 0


def _validated(given: argparse.Namespace, show: Show) -> str:
    from console.planning.comparing import compared, validation_text
    from console.planning.validation import LOADS, validate, validate_kept

    loads = tuple(LOADS)
    kept = compared(asyncio.run(validate_kept(given.model, loads, seconds=30.0, show=show)))
    found = compared(asyncio.run(validate(given.model, loads, rounds=given.validate, seconds=10.0, show=show)))
    if given.as_json:
        return _json({"timekeepers": kept, "model": found})
    return f"Workers that only keep time\n\n{validation_text(kept)}\n\n{given.model}\n\n{validation_text(found)}"


def _answered(given: argparse.Namespace, show: Show) -> PlanReport:
    asking, asked = asking_of(given), questions(given)
    goal = Goal(slo=Slo(ttft_s=given.slo_ttft, itl_s=given.slo_itl), share=given.share, window=asking.window).validate()
    death = _death(given, asking)
    measured = _measured(given, show)
    cluster = _cluster(given, measured).validate()
    workers, sized = None, cluster
    if given.workers is None:
        margin = "cards" in asked and not asking.traced
        workers = workers_needed(cluster, asking.demand, goal, most=given.most_workers, margin=margin, show=show)
        sized = msgspec.structs.replace(cluster, workers=workers.workers or 1)
    possible = workers is None or workers.workers is not None
    return PlanReport(
        measured=measured,
        cluster=sized,
        speed=given.speed,
        cards_per_worker=given.cards_per_worker,
        demand=asking.words,
        longer_share=asking.longer_share(measured.context_tokens),
        goal=goal,
        workers=workers,
        death=_what_dies(sized, asking, goal, death, show) if "death" in asked and possible else None,
        front=front_door_limit(sized, asking.demand, goal, show) if "front" in asked and possible else None,
    )


def _measured(given: argparse.Namespace, show: Show) -> MeasuredModel:
    if given.costs is not None and not given.measure:
        return MeasuredModel.read(given.costs)
    from console.planning.measuring import measure

    config = EngineConfig()
    measured = asyncio.run(
        measure(
            given.model,
            threads=given.threads,
            max_prompts=given.max_prompts or config.max_prompts,
            step_tokens=given.step_tokens or config.step_tokens,
            changes={name: getattr(given, name) for name in LOADING if name in given.named},
            seconds=given.seconds,
            show=show,
        )
    )
    if given.costs is not None:
        measured.write(given.costs)
    return measured


def _cluster(given: argparse.Namespace, measured: MeasuredModel) -> Cluster:
    """As the flags say; what they do not say is as it was measured, or the engine's default."""
    front = {"request_s": given.front_request, "output_s": given.front_token, "slot_s": given.front_slot}
    named = {
        "max_prompts": given.max_prompts or measured.max_prompts or None,
        "max_queue": given.max_queue,
        "timeout_s": given.timeout,
        "workers": given.workers,
    }
    return Cluster(
        costs=measured.costs.slower(1 / given.speed),
        course=measured.fit.course,
        kv_tokens=given.kv_tokens or measured.kv_tokens,
        max_model_len=measured.max_model_len,
        step_tokens=given.step_tokens or measured.step_tokens,
        page_tokens=measured.page_tokens,
        workers_per_node=given.workers_per_node,
        hop_s=given.hop,
        front=FrontDoor(**{name: cost for name, cost in front.items() if cost is not None}),
        **{name: value for name, value in named.items() if value is not None},
    )


def _death(given: argparse.Namespace, asking: Asking) -> Death:
    at_s = asking.duration_s / 2 if given.die_at is None else given.die_at
    if asking.traced and at_s > asking.duration_s:
        raise InvalidRequest(
            f"--die-at is {at_s:g} s, and the last request of the trace comes at {asking.duration_s:g} s",
            param="die_at",
        )
    return Death(at_s=at_s, node=0, detected_s=given.detect, restart_s=given.restart)


def _what_dies(sized: Cluster, asking: Asking, goal: Goal, death: Death, show: Show) -> DeathAnswer:
    """With requests until well after the node is back, where there can be more of them."""
    longer = asking.lasting(death.back_s + _SETTLING * asking.duration_s)
    return node_death(sized, longer.demand, msgspec.structs.replace(goal, window=longer.window), death, show)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
