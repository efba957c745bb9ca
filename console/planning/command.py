"""`ericllm plan`: from flags to answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from console.bench.progress import Progress, Show
from console.planning.flags import ASKED, parse
from console.planning.report import PlanReport, plan_text
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.demand import ClosedDemand, Demand, Mix, OpenDemand, TraceDemand
from engine.simulation.lengths import Length
from engine.simulation.outcome import Slo, Window
from engine.simulation.questions import DemandOf, Goal, front_door_limit, node_death, workers_needed
from engine.simulation.step_costs import MeasuredModel

_USERS = 100
_WARM_UP = 0.25
"""Of the duration: users come, workers fill, and nothing counts yet."""


def plan(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0. Raises EngineError for what cannot be measured or simulated."""
    given = parse(argv, parser)
    progress = Progress(sys.stderr)
    try:
        if given.validate:
            text = _validated(given, progress.show)
        else:
            report = _answered(given, progress.show)
            text = _json(report) if given.as_json else plan_text(report)
    finally:
        progress.end()
    sys.stdout.write(f"{text}\n")
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
    demand, demand_words = _demand(given)
    goal = Goal(
        slo=Slo(ttft_s=given.slo_ttft, itl_s=given.slo_itl),
        share=given.share,
        window=Window(since_s=_WARM_UP * given.duration, until_s=given.duration),
    ).validate()
    demand(1.0)  # what is wrong with it is said before anything is measured
    measured = _measured(given, show)
    cluster = _cluster(given, measured).validate()
    asked = given.ask or ASKED
    workers, sized = None, cluster
    if given.workers is None:
        workers = workers_needed(
            cluster, demand, goal, most=given.most_workers, margin="cards" in asked and not given.trace, show=show
        )
        sized = msgspec.structs.replace(cluster, workers=workers.workers or workers.most)
    return PlanReport(
        measured=measured,
        cluster=sized,
        cards_per_worker=given.cards_per_worker,
        demand=demand_words,
        goal=goal,
        workers=workers,
        death=node_death(sized, demand, goal, _death(given), show) if "death" in asked else None,
        front=front_door_limit(sized, demand, goal, show) if "front" in asked and not given.trace else None,
    )


def _measured(given: argparse.Namespace, show: Show) -> MeasuredModel:
    if given.costs is not None and not given.measure:
        return MeasuredModel.read(given.costs)
    from console.planning.measuring import measure

    prompts = given.max_prompts or EngineConfig().max_prompts
    measured = asyncio.run(
        measure(given.model, threads=given.threads, max_prompts=prompts, seconds=given.seconds, show=show)
    )
    if given.costs is not None:
        measured.write(given.costs)
    return measured


def _demand(given: argparse.Namespace) -> tuple[DemandOf, str]:
    """The demand by its strength, and in words."""
    if sum(each is not None for each in (given.users, given.rate, given.trace)) > 1:
        raise InvalidRequest("--users, --rate and --trace are three ways to say who asks; give one", param="users")
    if given.trace is not None:
        trace = TraceDemand.read(given.trace, duration_s=given.duration)
        return lambda strength: trace, f"the requests of {given.trace}"
    if given.shared > 1:
        raise InvalidRequest(f"--shared is {given.shared:g}; it is a share, 1 at most", param="shared")
    mix = Mix(
        prompt=Length.parse(given.prompt, "prompt"),
        output=Length.parse(given.output, "output"),
        shared=given.shared,
        groups=given.prefixes,
        shared_tokens=given.shared_tokens if given.shared else 0,
    )
    tokens = f"prompts of {mix.prompt.expected:g} and answers of {mix.output.expected:g} tokens"
    if given.rate is not None:
        return _by_rate(given, mix), f"{given.rate:g} requests/s, {tokens}"
    users = given.users or _USERS
    return _by_users(given, mix, users), f"{users} users who think for {given.think:g} s, {tokens}"


def _by_rate(given: argparse.Namespace, mix: Mix) -> DemandOf:
    def demand(strength: float) -> Demand:
        return OpenDemand(
            mix,
            rate_per_s=strength * given.rate,
            duration_s=given.duration,
            cv=given.burstiness,
            seed=given.seed,
        )

    return demand


def _by_users(given: argparse.Namespace, mix: Mix, users: int) -> DemandOf:
    def demand(strength: float) -> Demand:
        return ClosedDemand(
            mix,
            users=max(1, round(strength * users)),
            think_s=given.think,
            duration_s=given.duration,
            ramp_s=_WARM_UP * given.duration,
            seed=given.seed,
        )

    return demand


def _cluster(given: argparse.Namespace, measured: MeasuredModel) -> Cluster:
    """As the flags say; what they do not say is as it was measured, or the engine's default."""
    front = {"request_s": given.front_request, "output_s": given.front_token, "slot_s": given.front_slot}
    named = {
        "max_prompts": given.max_prompts,
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


def _death(given: argparse.Namespace) -> Death:
    at_s = given.duration / 2 if given.die_at is None else given.die_at
    return Death(at_s=at_s, node=0, detected_s=given.detect, restart_s=given.restart)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
