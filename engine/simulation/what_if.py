"""What is asked of the simulator: how many workers, what when a node dies, where the front door saturates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from engine.errors import InvalidRequest
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster, Death
from engine.simulation.demand import Demand, SeriesDemand
from engine.simulation.outcome import Outcome, Summary, Window
from engine.simulation.recovery import more_of, recovered_s
from engine.simulation.simulation import simulate

DemandOf = Callable[[float], Demand]
"""The demand, so many times as strong."""

Show = Callable[[str], None]

MOST_WORKERS = 100_000
_MARGIN_STEPS = 4
_MOST_MARGIN = 2.0
_FRONT_LOADS = (0.5, 0.8, 0.95, 1.1)
_ALONE = 300
"""Requests that are looked at one by one, and up to twice as many."""
_DEVIATIONS = 3.0
_FULL = 0.99
"""A front door that is busy for such a share of the time is full."""
_MOST_GROWTH = 64

Why = Literal["requests", "front", "most"]
"""Why no number of workers meets a goal: requests miss it even alone, the front door is full, all were tried."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as served: a share of all requests within the SLO. window: of the simulation, what counts."""

    slo: Slo = Slo()
    share: float = 0.95
    window: Window = Window()

    def validate(self) -> Goal:
        """Itself, or InvalidRequest."""
        for param, value in (("slo_ttft", self.slo.ttft_s), ("slo_itl", self.slo.itl_s)):
            if value is not None and not value > 0:
                raise InvalidRequest(f"{param} is {value:g} s; it must be above 0", param=param)
        if not 0 < self.share <= 1:
            raise InvalidRequest(f"share is {self.share:g}; it must be above 0, and 1 at most", param="share")
        return self

    def met(self, summary: Summary) -> bool:
        """Whether it was."""
        return summary.requests > 0 and summary.kept_share >= self.share


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation: of so many workers, under so many times the demand."""

    workers: int
    demand: float
    summary: Summary


class WorkersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers it takes; None where none are enough, or `most` are not.

    why: what the matter is where none are.  alone: some requests of this demand one by one, which no cluster
    does better.
    margin: how much more demand they carry within the goal, as a share: 0.12 is 12%, found to a sixteenth; 1.0 is twice
    the demand or more; None where that was not asked.  trials: all that were simulated, by workers and demand.
    """

    workers: int | None
    most: int
    margin: float | None
    trials: tuple[Trial, ...]
    why: Why | None = None
    alone: Summary


class DeathAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the death of a node does: `calm` is the same without it.

    back_s: when its workers are there again.  last_s: when the last request comes.
    lost_workers: of it.  resumed: requests that went on elsewhere.  late, not_answered: requests beyond the SLO, and
    those that got no whole answer, more than in the calm.  recovered_s: from the death until requests fare as in the
    calm again; 0 where all do, None where they do not by the end.
    """

    at_s: float
    back_s: float
    last_s: float
    workers: int
    lost_workers: int
    calm: Summary
    died: Summary
    worst_ttft_s: float
    resumed: int
    late: int
    not_answered: int
    most_queued: int
    recovered_s: float | None


class FrontAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Where the one loop of API and engine is full. request_s: its CPU per request of this demand, stream included.

    requests_per_s, demand: where it is full, as a rate and as times the demand.  workers: of the cluster grown with it.
    trials: of clusters that grow with the demand.
    """

    request_s: float
    requests_per_s: float
    demand: float
    workers: int
    trials: tuple[Trial, ...]


def workers_needed(
    cluster: Cluster, demand: DemandOf, goal: Goal, *, most: int, margin: bool = True, show: Show
) -> WorkersAnswer:
    """The fewest workers that meet the goal: doubled from an estimate until they do, then by bisection, as more
    workers never serve worse. The search ends early where more of them cannot help. Raises InvalidRequest."""
    trials: dict[tuple[int, float], Trial] = {}
    show("simulating requests one by one")
    alone = _alone(cluster, demand(1.0), goal)

    def none(why: Why) -> WorkersAnswer:
        return WorkersAnswer(workers=None, most=most, margin=None, trials=_sorted(trials), why=why, alone=alone)

    def met(workers: int, strength: float = 1.0) -> bool:
        key = workers, strength
        if key not in trials:
            show(f"simulating {_counting(workers)}{f' under {strength:g} times the demand' if strength != 1 else ''}")
            sized = msgspec.structs.replace(cluster, workers=workers)
            summary = _counted(simulate(sized, demand(strength), goal.window), goal)
            trials[key] = Trial(workers=workers, demand=strength, summary=summary)
        return goal.met(trials[key].summary)

    if _surely_below(goal.share, alone):
        return none("requests")
    enough, short = min(most, 1), 0
    while not met(enough):
        short = enough
        if trials[enough, 1.0].summary.front_busy >= _FULL:
            return none("front")
        if enough >= most:
            return none("most")
        enough = min(most, max(2 * enough, _estimate(trials[enough, 1.0])))
    while enough - short > 1:
        middle = (enough + short) // 2
        enough, short = (middle, short) if met(middle) else (enough, middle)
    carried = _carried(lambda strength: met(enough, strength)) if margin else None
    return WorkersAnswer(workers=enough, most=most, margin=carried, trials=_sorted(trials), alone=alone)


def _counting(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def _alone(cluster: Cluster, demand: Demand, goal: Goal) -> Summary:
    """How requests of a demand fare one by one, with every common prefix in the cache."""
    asks = list(demand.first())
    some = (
        msgspec.structs.replace(ask, prompt_tokens=ask.prompt_tokens - ask.shared_tokens, group=-1, shared_tokens=0)
        for ask in asks[:: max(1, len(asks) // _ALONE)]
    )
    one = msgspec.structs.replace(cluster, workers=1, deaths=())
    return simulate(one, SeriesDemand(some)).summary(goal.slo)


def _surely_below(share: float, found: Summary) -> bool:
    """Whether requests of which these are a sample keep the SLO in less than such a share of cases (Wilson's bound)."""
    if not found.requests:
        return False
    spread = _DEVIATIONS**2 / found.requests
    kept = found.kept_share
    most = kept + spread / 2 + _DEVIATIONS * math.sqrt(kept * (1 - kept) / found.requests + spread / found.requests / 4)
    return most / (1 + spread) < share


def _counted(outcome: Outcome, goal: Goal) -> Summary:
    """The numbers of what is counted. Raises InvalidRequest where that is nothing."""
    summary = outcome.summary(goal.slo)
    if not summary.requests:
        since_s, until_s = goal.window.since_s, goal.window.until_s
        raise InvalidRequest(
            f"no request comes between {since_s:g} and {until_s:g} s of the simulation, which alone count; "
            "a longer duration has some",
            param="duration",
        )
    return summary


def _estimate(trial: Trial) -> int:
    """Workers that the demand takes if each answers as many requests per second as in a trial that was too small; a
    little less, as a search that begins too high costs more than one that begins too low."""
    summary = trial.summary
    growth = 0.8 * summary.offered_per_s / max(summary.requests_per_s, 1e-9)
    return math.floor(trial.workers * min(growth, _MOST_GROWTH))


def _carried(met: Callable[[float], bool]) -> float:
    """How much more demand is met, found by bisection."""
    if met(_MOST_MARGIN):
        return _MOST_MARGIN - 1
    carries, fails = 1.0, _MOST_MARGIN
    for _ in range(_MARGIN_STEPS):
        middle = (carries + fails) / 2
        carries, fails = (middle, fails) if met(middle) else (carries, middle)
    return carries - 1


def _sorted(trials: dict[tuple[int, float], Trial]) -> tuple[Trial, ...]:
    return tuple(trials[key] for key in sorted(trials))


def node_death(cluster: Cluster, demand: DemandOf, goal: Goal, death: Death, show: Show) -> DeathAnswer:
    """Simulate the cluster with and without the death. Raises InvalidRequest."""
    show(f"simulating {_counting(cluster.workers)} in the calm")
    calm = simulate(msgspec.structs.replace(cluster, deaths=()), demand(1.0), goal.window)
    show(f"simulating the death of node {death.node}")
    died = simulate(msgspec.structs.replace(cluster, deaths=(death,)), demand(1.0), goal.window)
    since = [each for each in died.served if each.ended_s >= death.at_s]
    return DeathAnswer(
        at_s=death.at_s,
        back_s=death.back_s,
        last_s=max(each.ask.at_s for each in died.served),
        workers=cluster.workers,
        lost_workers=len(cluster.of_node(death.node)),
        calm=_counted(calm, goal),
        died=_counted(died, goal),
        worst_ttft_s=max((each.ttft_s for each in since if each.ttft_s is not None), default=0.0),
        resumed=sum(each.lost > 0 and each.fate == "answered" for each in died.served),
        late=more_of(calm, died, lambda each: each.fate == "answered" and not each.keeps(goal.slo)),
        not_answered=more_of(calm, died, lambda each: each.fate != "answered"),
        most_queued=max((each.queued for each in died.moments if each.at_s >= death.at_s), default=0),
        recovered_s=recovered_s(calm, died, goal.slo, death.at_s),
    )


def front_door_limit(cluster: Cluster, demand: DemandOf, goal: Goal, show: Show) -> FrontAnswer:
    """Where the front door is full if the cluster grows with the demand, each worker as busy as now.
    Raises InvalidRequest."""
    show("simulating the front door")
    today = simulate(cluster, demand(1.0), goal.window)
    summary = _counted(today, goal)
    offered = summary.requests / summary.seconds
    request_s = today.front_busy / offered
    times = _strength_of_a_full_loop(request_s * offered, cluster.front.slot_s * cluster.workers * offered)
    trials = []
    for load in _FRONT_LOADS:
        workers = max(1, min(MOST_WORKERS, math.ceil(cluster.workers * times * load)))
        show(f"simulating the front door at {load:.0%} with {workers} workers")
        sized = msgspec.structs.replace(cluster, workers=workers, max_queue=10**6, deaths=())
        summary = simulate(sized, demand(times * load), goal.window).summary(goal.slo)
        trials.append(Trial(workers=workers, demand=times * load, summary=summary))
    return FrontAnswer(
        request_s=1 / (times * offered),
        requests_per_s=times * offered,
        demand=times,
        workers=math.ceil(cluster.workers * times),
        trials=tuple(trials),
    )


def _strength_of_a_full_loop(busy: float, placing: float) -> float:
    """Times the demand that fill the loop, of which the demand takes `busy`, `placing` of it to look at all workers,
    of which there are the more the stronger it is: busy * t + placing * t * (t - 1) = 1."""
    rest = busy - placing
    return 2 / max(rest + math.sqrt(rest * rest + 4 * placing), 1e-9)
