"""What the engine's loop costs beside steps, found by putting small probes to the real engine and to the simulator.

Steps are measured in a worker that has the machine to itself. In an engine, what it tells wakes another process on the
same cores, and a request waits for that process to get one. How long, depends on the machine and on who else is there,
so it is measured in the same minutes as the steps: by requests alone, by answers alone, and by as many answers as there
are places. None of these is a load that the simulator is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from console.planning.comparing import Answer, simulated_answers
from console.planning.real_runs import ask_engine
from engine.engine import Engine
from engine.simulation.cluster import Cluster
from engine.simulation.demand import Ask, TraceDemand
from engine.simulation.least_squares import solve
from engine.simulation.simulation import simulate

_SINGLES, _SINGLE_EVERY_S = 12, 0.08
_STREAMS, _STREAM_EVERY_S = 3, 0.8
_CROWDS = 3
_PROMPT_TOKENS = 96
_ANSWER_TOKENS = 96
_NUDGE_S = 1e-4
"""What a cost is made larger by to see what that does; the simulator is as good as linear in so little."""


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. first_s: to the first token of a request alone.  token_s: from one token to the next
    of an answer alone.  crowd_s: until all of as many answers as there are places have ended, sent at once."""

    first_s: float
    token_s: float
    crowd_s: float

    @property
    def values(self) -> tuple[float, float, float]:
        """All of them."""
        return self.first_s, self.token_s, self.crowd_s


async def probe_engine(engine: Engine, vocab_size: int, places: int, seed: int) -> Probes:
    """Probe an engine that has nothing else to do. seed: of the prompts, another one each time."""
    singles = await ask_engine(engine, vocab_size, _singles(), seed=seed)
    streams = await ask_engine(engine, vocab_size, _streams(), seed=seed)
    crowds = [
        await ask_engine(engine, vocab_size, _crowd(places), seed=_CROWDS * seed + number) for number in range(_CROWDS)
    ]
    return _probes(singles, streams, crowds)


def probe_simulated(cluster: Cluster) -> Probes:
    """The same, simulated."""
    singles, streams, crowd = (
        simulated_answers(simulate(cluster, TraceDemand(asks)))
        for asks in (_singles(), _streams(), _crowd(cluster.max_prompts))
    )
    return _probes(singles, streams, [crowd])


def calibrated(cluster: Cluster, real: Sequence[Probes]) -> Cluster:
    """The cluster with the times of its loop that tell these probes best: until a request or a message gets through,
    and what a message and what is in it cost. The rest of its costs stay as they are."""
    bare = _with(cluster, 0.0, 0.0, 0.0)
    nudged = [_with(cluster, *(_NUDGE_S if place == each else 0.0 for place in range(3))) for each in range(3)]
    told, moved = probe_simulated(bare).values, [probe_simulated(each).values for each in nudged]
    found = [median(values) for values in zip(*(each.values for each in real), strict=True)]
    rows = [[(values[place] - told[place]) / _NUDGE_S for values in moved] for place in range(3)]
    missing = [took - said for took, said in zip(found, told, strict=True)]
    return _with(cluster, *solve(rows, missing, [1 / took**2 for took in found]))


def _with(cluster: Cluster, hop_s: float, message_s: float, output_s: float) -> Cluster:
    front = msgspec.structs.replace(cluster.front, message_s=message_s, output_s=output_s)
    return msgspec.structs.replace(cluster, hop_s=hop_s, front=front)


def _probes(singles: Sequence[Answer], streams: Sequence[Answer], crowds: Sequence[Sequence[Answer]]) -> Probes:
    return Probes(
        first_s=median(each.first_s - each.due_s for each in singles),
        token_s=median((each.last_s - each.first_s) / (each.tokens - 1) for each in streams),
        crowd_s=median(max(each.last_s for each in crowd) - crowd[0].due_s for crowd in crowds),
    )


def _singles() -> list[Ask]:
    return [_ask(number * _SINGLE_EVERY_S, 1) for number in range(_SINGLES)]


def _streams() -> list[Ask]:
    return [_ask(number * _STREAM_EVERY_S, _ANSWER_TOKENS) for number in range(_STREAMS)]


def _crowd(places: int) -> list[Ask]:
    return [_ask(0.0, _ANSWER_TOKENS) for _ in range(places)]


def _ask(at_s: float, output_tokens: int) -> Ask:
    return Ask(at_s=at_s, prompt_tokens=_PROMPT_TOKENS, output_tokens=output_tokens)
