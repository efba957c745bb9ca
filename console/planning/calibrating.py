"""What the engine's loop costs beside steps, found by putting small probes to the real engine and to the simulator.

Steps are measured in a worker that has the machine to itself. In an engine, what it tells wakes another process on the
same cores, and a request waits for that process to get one. How long, depends on the machine and on who else is there,
so it is measured in the same minutes as the steps: by answers with a request in the middle of each, and by as many
answers as there are places. None of these is a load that the simulator is judged by.

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
_SINGLES, _SINGLE_EVERY_S, _LATER_EACH_S = 3, 0.03, 1.2e-4
"""Within an answer; each a little later in its step than the one before, or all would wait equally long for its end."""
_CROWDS = 3
_PROMPT_TOKENS = 96
_ANSWER_TOKENS = 96
_NUDGES_S = (1e-3, 3e-4, 3e-5)
"""What each cost is made larger by to see what that does: about as large as they are, since the simulator is not quite
linear in them: messages come at another moment of a step when they cost more."""


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. first_s: to the first token of a request in the middle of an answer.  token_s: from one token of that
    answer to the next.  crowd_s: until all of as many answers as there are places have ended, sent at once."""

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
    and what a message and what is in it cost. The rest of its costs stay as they are."""
    bare = _with(cluster, 0.0, 0.0, 0.0)
    nudged = [_with(cluster, *(_NUDGES_S[place] * (place == each) for place in range(3))) for each in range(3)]
    told, moved = probe_simulated(bare).values, [probe_simulated(each).values for each in nudged]
    found = [median(values) for values in zip(*(each.values for each in real), strict=True)]
    rows = [
        [(values[place] - told[place]) / nudge_s for values, nudge_s in zip(moved, _NUDGES_S, strict=True)]
        for place in range(3)
    ]
    missing = [took - said for took, said in zip(found, told, strict=True)]
    return _with(cluster, *solve(rows, missing, [1 / took**2 for took in found]))


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
    """Answers one after the other, and in each of them other requests, of one token."""
    asks = []
    for number in range(_STREAMS):
        at_s = number * _STREAM_EVERY_S
        asks.append(_ask(at_s, _ANSWER_TOKENS))
        for single in range(_SINGLES):
            later_s = (number * _SINGLES + single) * _LATER_EACH_S
            asks.append(_ask(at_s + (single + 1) * _SINGLE_EVERY_S + later_s, 1))
    return asks


def _crowd(places: int) -> list[Ask]:
    return [_ask(0.0, _ANSWER_TOKENS) for _ in range(places)]


def _ask(at_s: float, output_tokens: int) -> Ask:
    return Ask(at_s=at_s, prompt_tokens=_PROMPT_TOKENS, output_tokens=output_tokens)
