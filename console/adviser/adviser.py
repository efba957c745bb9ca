"""Adviser: listens to snapshots and says what holds long enough to be worth a line."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from console.adviser import rules
from console.adviser.advice import Advice, Code, Turn
from console.adviser.evidence import Counts, Evidence
from console.adviser.thresholds import HUSH_S, LINGER_S, SETTLE_S, WINDOW_S
from engine.snapshot import Snapshot

Key = tuple[Code, str]

_SAMPLE_S = 1.0
_LAPSE_S = 2.5
_DRIFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Rule:
    """settle_s: what it finds must hold so long; 0 for one that looks at a longer time itself."""

    find: Callable[[Evidence], Iterator[Advice]]
    settle_s: float = 0.0


RULES = (
    Rule(rules.preempted),
    Rule(rules.truncated),
    Rule(rules.queue),
    Rule(rules.itl_over_slo, SETTLE_S),
    Rule(rules.device_hot, SETTLE_S),
    Rule(rules.slow_worker),
    Rule(rules.drafts_rejected),
    Rule(rules.memory_unused),
    Rule(rules.power_limit, SETTLE_S),
    Rule(rules.context_unused),
    Rule(rules.prefix_useless),
)
"""Most urgent first."""


@dataclass(slots=True)
class _Finding:
    """since: when it began to hold; seen: when it last did (times of snapshots). rank: of its rule."""

    rank: int
    advice: Advice
    settle_s: float
    since: float
    seen: float


class Adviser:
    """Keeps what no single snapshot has: counters a minute ago, and since when something holds.

    Time is the snapshots' own, so that it works on a replay too; where that goes back, or the snapshots are of another
    engine or model from now on, everything starts again.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._began = 0.0
        self._model = ""
        self._counts: deque[tuple[float, Counts]] = deque()
        self._found: dict[Key, _Finding] = {}
        self._quiet_until: dict[Key, float] = {}

    def listen(self, snapshot: Snapshot) -> tuple[Advice, ...]:
        """Return the advice of now. Looks at a snapshot where the last one it looked at is a second old."""
        self._follow(snapshot)
        if self._counts and snapshot.at - self._at < _SAMPLE_S:
            return self.advice
        self._at = snapshot.at
        evidence = Evidence(snapshot, self._recent(snapshot))
        for rank, rule in enumerate(RULES):
            for advice in rule.find(evidence):
                self._note(rank, rule, advice)
        self._found = {key: found for key, found in self._found.items() if self._at - found.seen <= LINGER_S}
        return self.advice

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Findings that hold, most urgent first. Of several that would change a knob, the first alone."""
        turned: set[str] = set()
        shown = []
        for found in sorted(self._found.values(), key=lambda found: found.rank):
            advice = found.advice
            knob = advice.action.knob if isinstance(advice.action, Turn) else ""
            settled = found.seen - found.since >= found.settle_s
            if not settled or self._at < self._quiet_until.get(advice.key, 0.0) or knob in turned:
                continue
            turned |= {knob} - {""}
            shown.append(advice)
        return tuple(shown)

    def follow(self, advice: Advice) -> None:
        """Note that an operator did it; it keeps quiet until its effect can be seen."""
        self._quiet_until[advice.key] = self._at + HUSH_S

    def dismiss(self, advice: Advice) -> None:
        """Say it no more, as long as it is this engine that is listened to."""
        self._quiet_until[advice.key] = math.inf

    def _follow(self, snapshot: Snapshot) -> None:
        """Forget what does not hold for the engine and the model that these snapshots are of."""
        began, spec = snapshot.at - snapshot.uptime_s, snapshot.status.spec
        model = spec.name if spec is not None else ""
        another = abs(began - self._began) > _DRIFT_S
        if another:
            self._quiet_until.clear()
        if another or model != self._model or snapshot.at < self._at:
            self._counts.clear()
            self._found.clear()
        self._began, self._model = began, model

    def _note(self, rank: int, rule: Rule, advice: Advice) -> None:
        before = self._found.get(advice.key)
        since = before.since if before is not None else self._at
        if before is not None and self._at - before.seen > _LAPSE_S and before.seen - before.since < before.settle_s:
            since = self._at
        self._found[advice.key] = _Finding(rank, advice, rule.settle_s, since, self._at)

    def _recent(self, snapshot: Snapshot) -> Counts:
        """Return the growth of counters since the oldest snapshot of the window; one that went back has started
        again."""
        now, counts = Counts.of(snapshot), self._counts
        while counts and (self._at - counts[0][0] > WINDOW_S or now.behind(counts[-1][1])):
            counts.popleft()
        counts.append((self._at, now))
        return now.since(counts[0][1])
