"""Questions to the simulator: how many workers it takes, a node's death, where the front end saturates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from engine.errors import InvalidRequest
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster, Death
from engine.simulation.demand import Demand, SeriesDemand, ShorterDemand
from engine.simulation.outcome import Outcome, Served, Summary, Window
from engine.simulation.simulation import simulate

# What a death did to requests: how many more fared badly than in the calm, and until when.

_NEARLY_ALL = 0.95
_LAST = 0.25
"""Of the time from the death to the last request: what is looked at to say whether requests fare as before."""
_SETTLED = 0.05
"""The share of them that is late may be larger than in the calm by so much."""


def more_of(calm: Outcome, died: Outcome, of: Callable[[Served], bool]) -> int:
    """Return how many more of such requests there are with the death than without. By number, as users who wait longer
    ask later, and so not the same."""
    return max(0, sum(map(of, died.served)) - sum(map(of, calm.served)))


def recovered_s(calm: Outcome, died: Outcome, slo: Slo, died_s: float) -> float | None:
    """Seconds from the death until nearly all of those had come that are beyond the SLO more than in the calm; 0 where
    there are none, None where such requests still come at the end."""
    last_s = max((each.ask.at_s for each in died.served), default=died_s)
    late_s = last_s - _LAST * (last_s - died_s)
    if _late_share(died, slo, late_s, last_s) > _late_share(calm, slo, late_s, last_s) + _SETTLED:
        return None
    changes: Counter[float] = Counter()
    for outcome, sign in ((died, +1), (calm, -1)):
        for each in outcome.served:
            changes[each.ask.at_s] += sign * (not each.keeps(slo))
    excess, total = [], 0
    for at_s in sorted(changes):
        total += changes[at_s]
        excess.append((total, at_s))
    if total <= 0:
        return 0.0
    most = max(each for each, _ in excess)
    reached_s = next(at_s for total, at_s in excess if total >= _NEARLY_ALL * most)
    return max(0.0, reached_s - died_s)


def _late_share(outcome: Outcome, slo: Slo, since_s: float, until_s: float) -> float:
    within = [each.keeps(slo) for each in outcome.served if since_s <= each.ask.at_s <= until_s]
    return 1 - sum(within) / len(within) if within else 0.0


DemandOf = Callable[[float], Demand]
"""The demand, multiplied by a factor."""

Case = tuple[Cluster, Demand, Window]
"""Arguments of `simulate`."""
RunCases = Callable[[Sequence[Case]], Sequence[Outcome]]
"""Simulates cases that do not depend on each other."""

Show = Callable[[str], None]

MAX_WORKERS = 100_000
MARGINS = (1.1, 1.25, 1.5, 2.0)
"""Times the demand that are tried on the workers that were found, as far as they meet the goal."""
FRONT_LOADS = (0.9, 1.1)
"""Loads of the front end that are simulated, as shares of what it can do."""
_MIN_NEAR_FULL_S = 10.0
_ALONE = 300
"""Requests that are looked at one by one, and up to twice as many."""
_DEVIATIONS = 3.0
_FULL = 0.99
"""A front end that is busy for such a share of the time is full."""
_MAX_GROWTH = 64
_FIRST_STEP = 16
"""A search begins with two sizes that are a sixteenth of the estimate apart."""

Why = Literal["requests", "front", "most"]
"""Why no number of workers meets a goal: requests miss it even alone, the front end is full, all were tried."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A share of all requests within the SLO. window: the part of the simulation that counts."""

    slo: Slo = Slo()
    share: float = 0.95
    window: Window = Window()

    def validate(self) -> Goal:
        """Itself, or InvalidRequest."""
        for param, value in (("slo_ttft", self.slo.ttft_s), ("slo_itl", self.slo.itl_s)):
            if value is not None and not value > 0:
                raise InvalidRequest(f"{param} is {value:g} s; it must be above 0", param=param)
        if not 0 < self.share <= 1:
            raise InvalidRequest(f"share is {self.share:g}; it must be above 0, max 1", param="share")
        return self

    def is_met(self, summary: Summary) -> bool:
        """Return whether it was met."""
        return summary.requests > 0 and summary.kept_share >= self.share


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation of `workers` workers under `demand` times the demand."""

    workers: int
    demand: float
    summary: Summary


class WorkersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers it takes; None where none are enough, or `most` are not.

    why: what the matter is where none are.  alone: some requests of this demand one by one, which no cluster
    does better.
    margin: how much more demand they carry within the goal, as a share: the largest of MARGINS that they do, less 1;
    1.0 is twice the demand or more; None where that was not asked.  trials: all that were simulated, by workers and
    demand.
    """

    workers: int | None
    most: int
    margin: float | None
    trials: tuple[Trial, ...]
    why: Why | None = None
    alone: Summary


class DeathAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of a node's death: `calm` is the same without it.

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


def in_turn(cases: Sequence[Case]) -> Sequence[Outcome]:
    """Simulate the cases one after the other, in this process."""
    return [simulate(*case) for case in cases]


def workers_needed(
    cluster: Cluster,
    demand: DemandOf,
    goal: Goal,
    *,
    most: int,
    margin: bool = True,
    show: Show,
    run: RunCases = in_turn,
    alone: Summary | None = None,
) -> WorkersAnswer:
    """The fewest workers that meet the goal, as more workers never serve worse. One worker says how many it takes
    about; from there two sizes at a time are simulated, further away until the answer is between them, then closer. The
    search ends early where more workers cannot help. alone: its `alone_summary`, if that was made already. Raises
    InvalidRequest."""
    trials: list[Trial] = []
    if alone is None:
        show("simulating requests one by one")
        alone = alone_summary(cluster, demand(1.0), goal)

    def none(why: Why) -> WorkersAnswer:
        return WorkersAnswer(workers=None, most=most, margin=None, trials=_sorted(trials), why=why, alone=alone)

    def tried(sizes: Sequence[int], strengths: Sequence[float]) -> list[Trial]:
        pairs = [(workers, strength) for workers in sizes for strength in strengths]
        outcomes = run(
            [
                (msgspec.structs.replace(cluster, workers=workers), demand(times), goal.window)
                for workers, times in pairs
            ]
        )
        found = [
            Trial(workers=workers, demand=times, summary=_counted(outcome, goal))
            for (workers, times), outcome in zip(pairs, outcomes, strict=True)
        ]
        trials.extend(found)
        return found

    if _surely_below(goal.share, alone):
        return none("requests")
    short, enough = 0, most + 1
    guess, step = 1, 0
    while enough - short > 1:
        sizes = sorted({min(max(size, short + 1), enough - 1) for size in (guess - step, guess)})
        show(f"simulating {_counting(*sizes)}")
        found = tried(sizes, (1.0,))
        passing = [each.workers for each in found if goal.is_met(each.summary)]
        enough = min(passing, default=enough)
        short = max((size for size in sizes if size < enough), default=short)
        if not passing and found[-1].summary.front_busy >= _FULL:
            return none("front")
        if not step:
            guess = _estimate(found[0], alone, demand(1.0))
            step = max(1, guess // _FIRST_STEP)
        elif passing and short in sizes:
            step = max(1, (enough - short) // 3)
            guess = short + 2 * step
        else:
            guess = enough - step if passing else max(short + 2 * step, _estimate(found[-1], alone, demand(1.0)))
            step *= 2
    if enough > most:
        return none("most")
    carried = None
    if margin:
        carried = 0.0
        for strengths in (MARGINS[:2], MARGINS[2:]):
            show(f"simulating {_counting(enough)} under {strengths[0]:g} and {strengths[-1]:g} times the demand")
            carried_demands = [each.demand for each in tried((enough,), strengths) if goal.is_met(each.summary)]
            carried = max((each - 1 for each in carried_demands), default=carried)
            if len(carried_demands) < len(strengths):
                break
    return WorkersAnswer(workers=enough, most=most, margin=carried, trials=_sorted(trials), alone=alone)


def _counting(*sizes: int) -> str:
    return f"{' and '.join(map(str, sizes))} worker{'s' if sizes[-1] > 1 else ''}"


def alone_summary(cluster: Cluster, demand: Demand, goal: Goal) -> Summary:
    """Return how requests of a demand fare one by one, with every common prefix in the cache."""
    asks = list(demand.first())
    some = (
        msgspec.structs.replace(ask, prompt_tokens=ask.prompt_tokens - ask.shared_tokens, group=-1, shared_tokens=0)
        for ask in asks[:: max(1, len(asks) // _ALONE)]
    )
    one = msgspec.structs.replace(cluster, workers=1, deaths=())
    return simulate(one, SeriesDemand(some)).summary(goal.slo)


def _surely_below(share: float, found: Summary) -> bool:
    """Return whether requests of which these are a sample keep the SLO in less than `share` of cases (Wilson)."""
    if not found.requests:
        return False
    spread = _DEVIATIONS**2 / found.requests
    within = found.kept_share
    most = (
        within
        + spread / 2
        + _DEVIATIONS * math.sqrt(within * (1 - within) / found.requests + spread / found.requests / 4)
    )
    return most / (1 + spread) < share


def _counted(outcome: Outcome, goal: Goal) -> Summary:
    """The numbers of what is counted. Raises InvalidRequest where that is nothing."""
    summary = outcome.summary(goal.slo)
    if not summary.requests:
        since_s, until_s = goal.window.since_s, goal.window.until_s
        raise InvalidRequest(
            f"no request comes between {since_s:g} and {until_s:g} s of the simulation, the measured part; "
            "use a longer duration",
            param="duration",
        )
    return summary


def _estimate(trial: Trial, alone: Summary, demand: Demand) -> int:
    """Workers that the demand takes if each answers as many requests per second as in a trial that was too small, and
    answers grow as slowly as there."""
    slower = trial.summary.tpot_s.mean / alone.tpot_s.mean if alone.tpot_s.mean else 1.0
    growth = demand.offered_per_s(slower * alone.e2e_s.mean) / max(trial.summary.requests_per_s, 1e-9)
    return round(trial.workers * min(growth, _MAX_GROWTH))


def _sorted(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    return tuple(sorted(trials, key=lambda each: (each.workers, each.demand)))


def node_death(
    cluster: Cluster, demand: DemandOf, goal: Goal, death: Death, show: Show, run: RunCases = in_turn
) -> DeathAnswer:
    """Simulate the cluster with and without the death. Raises InvalidRequest."""
    show(f"simulating {_counting(cluster.workers)} with and without the death of node {death.node}")
    variants = [msgspec.structs.replace(cluster, deaths=deaths) for deaths in ((), (death,))]
    calm, died = run([(variant, demand(1.0), goal.window) for variant in variants])
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


def front_door_limit(
    cluster: Cluster, demand: DemandOf, goal: Goal, show: Show, run: RunCases = in_turn, today: Summary | None = None
) -> FrontAnswer:
    """Where the front end is full if the cluster grows with the demand, each worker as busy as now. today: of this
    cluster under this demand, if it was simulated already. Raises InvalidRequest."""
    if today is None:
        show("simulating the front end")
        today = _counted(run([(cluster, demand(1.0), goal.window)])[0], goal)
    offered = today.requests / today.seconds
    request_s = today.front_busy / offered
    times = _strength_of_a_full_loop(request_s * offered, cluster.front.slot_s * cluster.workers * offered)
    sizes = [max(1, min(MAX_WORKERS, math.ceil(cluster.workers * times * load))) for load in FRONT_LOADS]
    show(f"simulating the front end close to full, with {sizes[0]} and {sizes[-1]} workers")
    window = near_full_window(goal.window, today.seconds, times)
    cases = [
        (
            msgspec.structs.replace(cluster, workers=size, max_queue=10**6, deaths=()),
            ShorterDemand(demand(times * load), window.until_s),
            window,
        )
        for size, load in zip(sizes, FRONT_LOADS, strict=True)
    ]
    trials = [
        Trial(workers=size, demand=times * load, summary=outcome.summary(goal.slo))
        for size, load, outcome in zip(sizes, FRONT_LOADS, run(cases), strict=True)
    ]
    return FrontAnswer(
        request_s=1 / (times * offered),
        requests_per_s=times * offered,
        demand=times,
        workers=math.ceil(cluster.workers * times),
        trials=tuple(trials),
    )


def near_full_window(window: Window, seconds: float, times: float) -> Window:
    """Return what counts of `times` the demand: as many requests as in `seconds` of the window today, or
    _MIN_NEAR_FULL_S of them."""
    until_s = window.since_s + max(_MIN_NEAR_FULL_S, seconds / times)
    return Window(since_s=window.since_s, until_s=min(window.until_s, until_s))


def _strength_of_a_full_loop(busy: float, placing: float) -> float:
    """Times the demand that fill the loop, of which the demand takes `busy`, `placing` of it to look at all workers,
    of which there are the more the stronger it is: busy * t + placing * t * (t - 1) = 1."""
    rest = busy - placing
    return 2 / max(rest + math.sqrt(rest * rest + 4 * placing), 1e-9)
