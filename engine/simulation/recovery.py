"""What a death did to requests: how many more fared badly than in the calm, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.metrics.slo import Slo
from engine.simulation.outcome import Outcome, Served

_NEARLY_ALL = 0.95
_LAST = 0.25
"""Of the time from the death to the last request: what is looked at to say whether requests fare as before."""
_SETTLED = 0.05
"""The share of them that is late may be larger than in the calm by so much."""


def more_of(calm: Outcome, died: Outcome, of: Callable[[Served], bool]) -> int:
    """How many more of such requests there are with the death than without. By number, as users who wait longer ask
    later, and so not the same."""
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
    kept = [each.keeps(slo) for each in outcome.served if since_s <= each.ask.at_s <= until_s]
    return 1 - sum(kept) / len(kept) if kept else 0.0
