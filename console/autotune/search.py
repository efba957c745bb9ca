"""Which setting to try next, and which is the best: a race over a coarse grid, then a climb in smaller steps. Pure.

1. Every setting of a coarse grid gets a short window. The best third goes on with another, until few are left
   (successive halving, Karnin, Koren and Somekh 2013).
2. From the best of them one knob is turned at a time, by two places and then by one, at last two coupled ones together;
   where a rival is better, the climb goes on from it (pattern search, Hooke and Jeeves 1961).
3. With the time that is left, neighbours of all that came close are tried, the most promising first.
4. Rivals are told apart by confidence bounds: the leader and the rival that may be best of all are measured again until
   none can be better by more than `INDIFFERENCE`, or has had `MOST_WINDOWS` (LUCB, Kalyanakrishnan et al. 2012).

What cannot win is never tried, or no more: what surely breaks the SLO, or lies surely below one that keeps it; what has
more prompts than a setting that surely breaks the ITL; what needs no less memory than one that did not fit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable

import msgspec

from console.autotune.record import Record, Sample, Slo
from console.autotune.space import Setting, Space

WINDOW_S = 4.0
"""A short window."""
SETTLE_S = 1.0
"""What is left out after a turn: requests that began before it."""
INDIFFERENCE = 0.02
MOST_WINDOWS = 5
AGAIN = 2
"""Times as long as the first are windows of settings that are measured again."""
KEPT = 1 / 3
"""Of the settings in a round of the coarse race, those that get to the next."""
FINALISTS = 3
PROMISING = 0.85
"""Of the leader's throughput, what a setting must promise for its neighbours to be tried."""
COARSE_SHARE = 0.4
"""Of the time, what the first round of the coarse grid may take."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A setting to be measured. cost_s: what is reckoned for it, the turn included."""

    setting: Setting
    seconds: float
    cost_s: float


Steps = Generator[Setting, None, None]


class Search:
    """Ask `propose`, try that, tell `observe` or `refuse` what came of it, until nothing is proposed any more.

    budget_s: time for all trials together.
    """

    def __init__(
        self,
        space: Space,
        slo: Slo,
        *,
        budget_s: float,
        window_s: float = WINDOW_S,
        settle_s: float = SETTLE_S,
        seed: int = 0,
    ) -> None:
        self.space = space
        self.slo = slo
        self.budget_s = budget_s
        self.spent_s = 0.0
        self.stage = "coarse"
        self._window_s = window_s
        self.settle_s = settle_s
        self._draw = random.Random(seed)
        self._samples: dict[Setting, list[Sample]] = {}
        self._records: dict[Setting, Record] = {}
        self._refused: list[Setting] = []
        self._at = space.start
        self._steps = self._strategy()
        self._proposed: Trial | None = None

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def propose(self) -> Trial | None:
        """What to try next; None when there is nothing more to learn, or no time. The same until it is told of."""
        if self._proposed is None:
            setting = next(self._steps, None)
            if setting is None:
                return None
            seconds = self._window_s * (AGAIN if setting in self._records else 1)
            cost_s = seconds + self.settle_s + self.space.turn_s(self._at, setting)
            if self.spent_s + cost_s > self.budget_s:
                self._steps.close()
                return None
            self._proposed = Trial(setting=setting, seconds=seconds, cost_s=cost_s)
        return self._proposed

    def observe(self, trial: Trial, sample: Sample, spent_s: float | None = None) -> Record:
        """A trial gave this. spent_s: what it took in all, as reckoned if None."""
        samples = self._samples.setdefault(trial.setting, [])
        samples.append(sample)
        self._records[trial.setting] = record = Record.of(trial.setting, samples, self.slo)
        self._over(trial, trial.cost_s if spent_s is None else spent_s)
        self._at = trial.setting
        return record

    def refuse(self, trial: Trial, spent_s: float = 0.0) -> None:
        """A trial could not be made: there is not the memory. Nothing that needs as much is tried."""
        self._refused.append(trial.setting)
        self._records.pop(trial.setting, None)
        self._over(trial, spent_s)

    def best(self) -> Record | None:
        """The setting to be used: of those that keep the SLO the one whose throughput is surest to be high, with more
        goodput where two are alike; where none keeps it, the one that comes closest."""
        keeping = [record for record in self._records.values() if record.keeps]
        if keeping:
            surest = max(each.tokens_per_s.low for each in keeping)
            alike = [each for each in keeping if each.tokens_per_s.low >= surest * (1 - INDIFFERENCE / 4)]
            return max(alike, key=lambda each: (each.verdict == "kept", each.goodput_per_s, each.tokens_per_s.low))
        return min(self._records.values(), key=lambda each: each.excess, default=None)

    @property
    def records(self) -> tuple[Record, ...]:
        """All that was tried, in the order of first trials."""
        return tuple(self._records.values())

    # -- how it goes --------------------------------------------------------------------------------------------------

    def _strategy(self) -> Steps:
        yield from self._coarse_race()
        if not self._records:
            return
        self.stage = "fine"
        for moves in (self._moves(2), self._moves(1), self.space.diagonal_moves):
            yield from self._climb(moves)
        self.stage = "wide"
        yield from self._widen()
        self.stage = "final"
        yield from self._contest(list(self._records))

    def _coarse_race(self) -> Steps:
        trial_s = self._window_s + self.settle_s
        limit = max(FINALISTS, int(COARSE_SHARE * self.budget_s / trial_s))
        settings = self.space.coarse(limit, self._draw)
        for setting in settings:
            if not self._hopeless(setting):
                yield setting
        while len(running := self._running(settings)) > FINALISTS:
            running.sort(key=lambda each: -self._records[each].value)
            settings = running[: max(FINALISTS, math.ceil(len(running) * KEPT))]
            for setting in self.space.in_order(settings):
                yield setting
            if len(settings) <= FINALISTS:
                return

    def _climb(self, moves: Callable[[Setting], list[Setting]]) -> Steps:
        """Go on from the leader as long as a move from there makes another one lead."""
        while self._records:
            leader = self._leader()
            rivals = [each for each in moves(leader.setting) if not self._hopeless(each)]
            for rival in rivals:
                if rival not in self._records and not self._hopeless(rival):
                    yield rival
            yield from self._contest([leader.setting, *rivals])
            if self._leader().setting == leader.setting:
                return

    def _widen(self) -> Steps:
        """Look around settings that came close, best first: where two knobs must be turned for either to be of use, the
        way to the best leads past one that breaks the SLO."""
        looked_around: set[Setting] = set()
        while True:
            near = [
                each for each in self._records.values() if self._promise(each) and each.setting not in looked_around
            ]
            if not near:
                return
            at = max(near, key=self._promise).setting
            looked_around.add(at)
            for rival in (*self.space.moves(at, 1), *self.space.diagonal_moves(at)):
                if rival not in self._records and not self._hopeless(rival):
                    yield rival
            yield from self._contest(list(self._records))

    def _promise(self, record: Record) -> float:
        """What a setting would give if its SLO could be bought with as much throughput; 0 where that is too little."""
        leader = self._leader()
        promise = record.tokens_per_s.value / max(1.0, record.excess)
        return promise if not leader.keeps or promise >= leader.tokens_per_s.value * PROMISING else 0.0

    def _contest(self, settings: Iterable[Setting]) -> Steps:
        """Measure again whom it matters for, until the leader of all is sure enough."""
        among = list(settings)
        while self._records:
            leader = self._leader()
            rivals = [self._records[each] for each in among if self._could_beat(each, leader)]
            if leader.verdict != "unsure" and not rivals:
                return
            ahead = max(rivals, key=lambda each: each.tokens_per_s.high, default=leader)
            pair = [each for each in (leader, ahead) if each.windows < MOST_WINDOWS]
            if not pair:
                among = [each for each in among if each != ahead.setting]
                if ahead is leader:
                    return
                continue
            yield min(pair, key=self._lag_s).setting

    def _lag_s(self, record: Record) -> float:
        """What was spent on a setting, and what going back to it costs: of two, the lesser is measured next."""
        return record.seconds + self.space.turn_s(self._at, record.setting)

    def _moves(self, by: int) -> Callable[[Setting], list[Setting]]:
        return lambda setting: self.space.moves(setting, by)

    # -- what is known ------------------------------------------------------------------------------------------------

    def _leader(self) -> Record:
        """The best by what was measured, be that sure or not."""
        return max(self._records.values(), key=lambda each: (each.keeps, each.value if each.keeps else -each.excess))

    def _running(self, settings: Iterable[Setting]) -> list[Setting]:
        """Those that were measured and could still win."""
        leader = self._leader() if self._records else None
        return [
            each
            for each in settings
            if leader is not None and each in self._records and (each == leader.setting or not self._hopeless(each))
        ]

    def _could_beat(self, setting: Setting, leader: Record) -> bool:
        record = self._records.get(setting)
        if record is None or record is leader or self._hopeless(setting):
            return False
        return record.tokens_per_s.high > leader.tokens_per_s.low * (1 + INDIFFERENCE)

    def _hopeless(self, setting: Setting) -> bool:
        """Whether it surely does not fit, breaks the SLO, or is slower than one that keeps it."""
        if any(setting.asks_no_less_memory_than(each) for each in self._refused):
            return True
        leader = self._leader() if self._records else None
        if leader is None or setting == leader.setting:
            return False
        record = self._records.get(setting)
        if record is None:
            return any(self._breaks_itl_too(setting, each) for each in self._records.values())
        surely_slower = record.tokens_per_s.high < leader.tokens_per_s.low and leader.verdict == "kept"
        return surely_slower or (record.verdict == "broken" and leader.keeps)

    def _breaks_itl_too(self, setting: Setting, broken: Record) -> bool:
        """More prompts in a step make it no shorter."""
        limit, itl = self.slo.itl_s, broken.itl_s
        if limit is None or itl is None or itl.low <= limit or setting.max_prompts < broken.setting.max_prompts:
            return False
        return setting == broken.setting.with_value("max_prompts", setting.max_prompts)

    def _over(self, trial: Trial, spent_s: float) -> None:
        assert trial is self._proposed, "only what was proposed last can be told of"
        self._proposed = None
        self.spent_s += spent_s
