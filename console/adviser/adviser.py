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
    """settle_s: what it finds must hold so long; 0 for one that looks at a longer time itself.

    linger_s: what it found stays so long; at 0 it is looked for in every snapshot, so that its numbers are of that one.
    of_load: it judges the load, which is none where this program sends it to measure.
    """

    find: Callable[[Evidence], Iterator[Advice]]
    settle_s: float = 0.0
    linger_s: float = LINGER_S
    of_load: bool = True


RULES = (
    Rule(rules.preempted),
    Rule(rules.truncated),
    Rule(rules.queue, linger_s=0.0),
    Rule(rules.itl_over_slo, SETTLE_S),
    Rule(rules.device_hot, SETTLE_S, of_load=False),
    Rule(rules.slow_worker, of_load=False),
    Rule(rules.drafts_rejected),
    Rule(rules.memory_unused),
    Rule(rules.power_limit, SETTLE_S, of_load=False),
    Rule(rules.context_unused),
    Rule(rules.prefix_useless),
)
"""Most urgent first."""

_OWN_LOAD = Rule(rules.own_load, linger_s=0.0, of_load=False)
"""Stands for what rules find of a load of this program's own."""


@dataclass(slots=True)
class _Finding:
    """since: when it began to hold; seen: when it last did (times of snapshots). rank: of its rule."""

    rank: int
    advice: Advice
    rule: Rule
    since: float
    seen: float


class Adviser:
    """Keeps what no single snapshot has: counters a minute ago, and since when something holds.

    Time is the snapshots' own, so that it works on a replay too; where that goes back, or the snapshots are of another
    engine or model from now on, everything starts again.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._sampled_at = 0.0
        self._own_load_at = -math.inf
        self._began = 0.0
        self._model = ""
        self._counts: deque[tuple[float, Counts]] = deque()
        self._found: dict[Key, _Finding] = {}
        self._quiet_until: dict[Key, float] = {}

    def listen(self, snapshot: Snapshot) -> tuple[Advice, ...]:
        """Return the advice of now. Looks at all of a snapshot where the last such look is a second old."""
        self._follow(snapshot)
        is_due = not self._counts or snapshot.at - self._sampled_at >= _SAMPLE_S
        self._at = snapshot.at
        evidence = self._evidence(snapshot, sample=is_due)
        if evidence.own_load:
            self._own_load_at = snapshot.at
            self._found = {key: found for key, found in self._found.items() if not found.rule.of_load}
        hidden = False
        for rank, rule in enumerate(RULES):
            if not is_due and rule.linger_s:
                continue
            for advice in rule.find(evidence):
                if rule.of_load and self._is_of_own_load():
                    hidden = True
                else:
                    self._note(rank, rule, advice)
        for advice in _OWN_LOAD.find(evidence):
            if hidden or advice.key in self._found:  # then for as long as that load lasts
                self._note(len(RULES), _OWN_LOAD, advice)
        self._found = {key: found for key, found in self._found.items() if self._at - found.seen <= found.rule.linger_s}
        return self.advice

    def check(self, advice: Advice, snapshot: Snapshot) -> Advice | None:
        """Return what `advice` is in this snapshot, with its numbers; None where it no longer holds."""
        evidence = self._evidence(snapshot, sample=False)
        if evidence.own_load:
            self._own_load_at = snapshot.at
        for rule in RULES:
            if rule.of_load and self._is_of_own_load():
                continue
            same = (each for each in rule.find(evidence) if each.key == advice.key)
            if (now := next(same, None)) is not None:
                return now
        return None

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Findings that hold, most urgent first. Of several that would change a knob, the first alone."""
        turned: set[str] = set()
        shown = []
        for found in sorted(self._found.values(), key=lambda found: found.rank):
            advice = found.advice
            knob = advice.action.knob if isinstance(advice.action, Turn) else ""
            settled = found.seen - found.since >= found.rule.settle_s
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

    def _is_of_own_load(self) -> bool:
        """Return whether a load of this program's own is in what rules look at."""
        return self._at - self._own_load_at < WINDOW_S

    def _follow(self, snapshot: Snapshot) -> None:
        """Forget what does not hold for the engine and the model that these snapshots are of."""
        began, spec = snapshot.at - snapshot.uptime_s, snapshot.status.spec
        model = spec.name if spec is not None else ""
        another = abs(began - self._began) > _DRIFT_S
        if another:
            self._quiet_until.clear()
        if another or snapshot.at < self._at:
            self._own_load_at = -math.inf
        if another or model != self._model or snapshot.at < self._at:
            self._counts.clear()
            self._found.clear()
        self._began, self._model = began, model

    def _note(self, rank: int, rule: Rule, advice: Advice) -> None:
        before = self._found.get(advice.key)
        since = before.since if before is not None else self._at
        if before is not None and self._at - before.seen > _LAPSE_S and before.seen - before.since < rule.settle_s:
            since = self._at
        self._found[advice.key] = _Finding(rank, advice, rule, since, self._at)

    def _evidence(self, snapshot: Snapshot, *, sample: bool) -> Evidence:
        """Return what rules look at. sample: keep the counters of this snapshot for later ones."""
        now, counts = Counts.of(snapshot), self._counts
        if sample:
            self._sampled_at = snapshot.at
            while counts and (snapshot.at - counts[0][0] > WINDOW_S or now.behind(counts[-1][1])):
                counts.popleft()
            counts.append((snapshot.at, now))
        recent = now.since(counts[0][1]) if counts else Counts()
        return Evidence(snapshot, recent, frozenset(code for code, _ in self._found))
