"""What the engine's loop costs beside steps, found by putting small probes to the real engine and to the simulator.

Steps are measured in a worker that has the machine to itself. In an engine, what it tells wakes another process on the
same cores, and a request waits for that process to get one. How long, depends on the machine and on who else is there,
so it is measured in the same minutes as the steps: by some answers with requests in their midst, and by twice as many
answers as there are places, all asked for at once. None of these is a load that the simulator is judged by.

No probe waits for an idle machine: cores that sleep wake up so slowly that a first token takes half as long again, and
under load they do not sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from console.planning.comparing import Answer, simulated_answers
from console.planning.real_runs import ask_engine
from engine.engine import Engine
from engine.simulation.cluster import Cluster
from engine.simulation.demand import Ask, TraceDemand
from engine.simulation.least_squares import solve
from engine.simulation.simulation import simulate

_STREAMS, _STREAM_EVERY_S = 12, 0.25
_AMID = 3
_SINGLES, _SINGLE_EVERY_S, _LATER_EACH_S = 3, 0.03, 1.2e-4
"""Amid so many answers; each a little later in a step than the one before, or all would wait equally long for it."""
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
    """The cluster with the times of its loop that tell these probes best: until a request or a message gets through,
    and what a message and what is in it cost. The rest of its costs stay as they are. The simulator is not quite linear
    in them, so they are found by Gauss and Newton's method, and the first, passed twice, once more by itself."""
    took = [median(values) for values in zip(*(each.values for each in real), strict=True)]
    found = [0.0] * len(took)
    for _ in range(_ITERATIONS):
        told = probe_simulated(_with(cluster, *found)).values
        moved = [probe_simulated(_with(cluster, *_nudged(found, place))).values for place in range(len(found))]
        rows = [
            [(values[probe] - told[probe]) / nudge_s for values, nudge_s in zip(moved, _NUDGES_S, strict=True)]
            for probe in range(len(took))
        ]
        reached = [sum(slope * cost for slope, cost in zip(row, found, strict=True)) for row in rows]
        missing = [real_s - said_s + at_s for real_s, said_s, at_s in zip(took, told, reached, strict=True)]
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
