"""Which setting to try next, and which is the best: a race over a coarse grid, then a climb in smaller steps. Pure.

1. Every setting of a coarse grid gets a short window. Where there is the time, the best third goes on with another,
   until few are left (successive halving, Karnin, Koren and Somekh 2013).
2. From the best of them one knob is turned at a time, by two places and then by one, at last two coupled ones together;
   where a rival is better, the climb goes on from it (pattern search, Hooke and Jeeves 1961). A setting that is not
   known is looked at before one of two that are alike is measured again.
3. With the time that is left, neighbours of all that came close are tried, the most promising first.
4. Rivals are separated by confidence bounds: the leader and the rival that may be best of all are measured again, by
   turns, until none can be better by more than `INDIFFERENCE`, or has had `MAX_WINDOWS` (LUCB, Kalyanakrishnan et al.
   2012). The last of the time is for that.

What cannot win is never tried, or no more: what surely breaks the SLO, or lies surely below one that keeps it; what has
more prompts than a setting that surely breaks the ITL; what needs no less memory than one that did not fit; and, where
going there is dear, what turning the same knobs elsewhere does not promise to be near the best.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Generator, Iterable
from typing import get_args

import msgspec

from console.tuning.autotune.record import Record, Sample, noise_of
from console.tuning.autotune.space import KnobName, Setting, Space
from engine.metrics.slo import Slo

# What is known of settings by now: who leads, who may still win, who cannot, and what others promise. Pure.

INDIFFERENCE = 0.02
PROMISING = 0.85
"""Of the leader's throughput, what a setting must promise for its neighbours to be tried, or for a dear turn to it."""


class Known:
    """Samples of settings, records made of them, and settings that did not fit."""

    def __init__(self, slo: Slo) -> None:
        self.records: dict[Setting, Record] = {}
        self._slo = slo
        self._samples: dict[Setting, list[Sample]] = {}
        self._refused: list[Setting] = []

    def observe(self, setting: Setting, sample: Sample) -> Record:
        """A window of a setting. It says something of the noise too, which every record is judged by."""
        self._samples.setdefault(setting, []).append(sample)
        noise = noise_of([each.rates for each in samples] for samples in self._samples.values())
        for each in (setting, *self.records):
            self.records[each] = Record.of(each, self._samples[each], self._slo, noise)
        return self.records[setting]

    def refuse(self, setting: Setting) -> None:
        """There is not the memory for it."""
        self._refused.append(setting)
        self.records.pop(setting, None)
        self._samples.pop(setting, None)

    def best(self) -> Record | None:
        """The setting to be used: of those that keep the SLO the one whose throughput is surest to be high, with more
        goodput where two are alike; where none keeps it, the one that comes closest."""
        keeping = [record for record in self.records.values() if record.keeps]
        if keeping:
            surest = max(each.tokens_per_s.low for each in keeping)
            alike = [each for each in keeping if each.tokens_per_s.low >= surest * (1 - INDIFFERENCE / 4)]
            return max(alike, key=lambda each: (each.verdict == "kept", each.goodput_per_s, each.tokens_per_s.low))
        return min(self.records.values(), key=lambda each: each.excess, default=None)

    def leader(self) -> Record:
        """The best by what was measured, be that sure or not. There must be one."""
        return max(self.records.values(), key=lambda each: (each.keeps, each.value if each.keeps else -each.excess))

    def running(self, settings: Iterable[Setting]) -> list[Setting]:
        """Those that were measured and could still win, the most valuable first."""
        leader = self.leader().setting if self.records else None
        found = [each for each in settings if each in self.records and (each == leader or not self.hopeless(each))]
        return sorted(found, key=lambda each: -self.records[each].value)

    def rivals(self, settings: Collection[Setting]) -> list[Record]:
        """Those of the settings that may be better than the leader by more than is indifferent."""
        leader = self.leader()
        return [
            record
            for each in settings
            if (record := self.records.get(each)) is not None
            and record is not leader
            and not self.hopeless(each)
            and record.tokens_per_s.high > leader.tokens_per_s.low * (1 + INDIFFERENCE)
        ]

    def hopeless(self, setting: Setting) -> bool:
        """Return whether it surely does not fit, breaks the SLO, or is slower than one that keeps it."""
        if any(setting.asks_no_less_memory_than(each) for each in self._refused):
            return True
        leader = self.leader() if self.records else None
        if leader is None or setting == leader.setting:
            return False
        record = self.records.get(setting)
        if record is None:
            return any(self._breaks_itl_too(setting, each) for each in self.records.values())
        surely_slower = record.tokens_per_s.high < leader.tokens_per_s.low and leader.verdict == "kept"
        return surely_slower or (record.verdict == "broken" and leader.keeps)

    def promise(self, record: Record) -> float:
        """Return the rate of a setting if its SLO could be bought with as much throughput; 0 where that is too
        little."""
        leader = self.leader()
        promise = record.tokens_per_s.value / max(1.0, record.excess)
        return promise if not leader.keeps or promise >= leader.tokens_per_s.value * PROMISING else 0.0

    def unpromising(self, setting: Setting) -> bool:
        """Return whether a setting that was not tried is far slower than the leader, if turning the knobs that they
        differ in does at best what it did from any other setting."""
        leader = self.leader()
        turned = [name for name in _KNOBS if setting.value(name) != leader.setting.value(name)]
        ratios = [
            there.tokens_per_s.value / here.tokens_per_s.value
            for here in self.records.values()
            if _alike(here.setting, leader.setting, turned)
            and (there := self.records.get(_with(here.setting, setting, turned))) is not None
            and here.tokens_per_s.value > 0
        ]
        return bool(ratios) and max(ratios) < PROMISING

    def _breaks_itl_too(self, setting: Setting, broken: Record) -> bool:
        """More prompts in a step make it no shorter."""
        limit, itl = self._slo.itl_s, broken.itl_s
        if limit is None or itl is None or itl.low <= limit or setting.max_prompts < broken.setting.max_prompts:
            return False
        return setting == broken.setting.with_value("max_prompts", setting.max_prompts)


_KNOBS: tuple[KnobName, ...] = get_args(KnobName)


def _alike(one: Setting, other: Setting, knobs: Iterable[KnobName]) -> bool:
    return all(one.value(name) == other.value(name) for name in knobs)


def _with(setting: Setting, values: Setting, knobs: Iterable[KnobName]) -> Setting:
    for name in knobs:
        setting = setting.with_value(name, values.value(name))
    return setting


WINDOW_S = 4.0
"""A short window."""
SETTLE_S = 1.0
"""What is left out after a turn: requests that began before it."""
FEW_WINDOWS, MAX_WINDOWS = 2, 5
"""Windows of a setting while better ones may be untried, and in the end."""
AGAIN = 2
"""Times as long as the first are windows of settings that are measured again."""
KEPT = 1 / 3
"""Of the settings in a round of the coarse race, those that get to the next."""
FINALISTS = 3
COARSE_SHARE = 0.4
"""Of the time, what the first round of the coarse grid may take."""
RACE_SHARE = 0.35
"""Of the time that is left, what another round of the race may take."""
FINAL_SHARE = 0.25
"""Of the time, the part that is reserved for separating the leaders."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A setting to be measured. cost_s: what is reckoned for it, the turn included."""

    setting: Setting
    seconds: float
    cost_s: float


Steps = Generator[Setting, None, None]


class Search:
    """Call `propose`, try that, pass the result to `observe` or `refuse`, until nothing is proposed any more.

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
        self._evidence = Known(slo)
        self._at = space.start
        self._steps = self._strategy()
        self._proposed: Trial | None = None

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def propose(self) -> Trial | None:
        """Return the next trial; None when there is nothing more to learn, or no time. The same until its result is
        in."""
        if self._proposed is None:
            setting = next(self._steps, None)
            if setting is None:
                return None
            seconds = self._window_s * (AGAIN if setting in self._evidence.records else 1)
            cost_s = seconds + self.settle_s + self.space.turn_s(self._at, setting)
            if self.spent_s + cost_s > self.budget_s:
                self._steps.close()
                return None
            self._proposed = Trial(setting=setting, seconds=seconds, cost_s=cost_s)
        return self._proposed

    def observe(self, trial: Trial, sample: Sample, spent_s: float | None = None) -> Record:
        """A trial gave this. spent_s: what it took in all, as reckoned if None."""
        record = self._evidence.observe(trial.setting, sample)
        self._over(trial, trial.cost_s if spent_s is None else spent_s)
        self._at = trial.setting
        return record

    def refuse(self, trial: Trial, spent_s: float = 0.0) -> None:
        """A trial could not be made: there is not the memory. Nothing that needs as much is tried."""
        self._evidence.refuse(trial.setting)
        self._over(trial, spent_s)

    def best(self) -> Record | None:
        """See Known.best."""
        return self._evidence.best()

    @property
    def records(self) -> tuple[Record, ...]:
        """All that was tried, in the order of first trials."""
        return tuple(self._evidence.records.values())

    # -- how it goes --------------------------------------------------------------------------------------------------

    def _strategy(self) -> Steps:
        yield from self._coarse_race()
        if not self._evidence.records:
            return
        self.stage = "fine"
        for moves in (self._moves(2), self._moves(1), self.space.diagonal_moves):
            yield from self._climb(moves)
        self.stage = "wide"
        yield from self._widen()
        self.stage = "final"
        yield from self._contest(self._evidence.records.keys(), MAX_WINDOWS)

    def _coarse_race(self) -> Steps:
        trial_s = self._window_s + self.settle_s
        limit = max(FINALISTS, int(COARSE_SHARE * self.budget_s / trial_s))
        settings = self.space.coarse(limit, self._draw)
        for setting in settings:
            if not self._evidence.hopeless(setting):
                yield setting
        while len(running := self._evidence.running(settings)) > FINALISTS:
            settings = running[: max(FINALISTS, math.ceil(len(running) * KEPT))]
            ordered = self.space.in_order(settings, self._at)
            if self._again_s(ordered) > RACE_SHARE * (self.budget_s - self.spent_s):
                return
            yield from ordered
            if len(settings) <= FINALISTS:
                return

    def _climb(self, moves: Callable[[Setting], list[Setting]]) -> Steps:
        """Go on from the leader as long as a move from there makes another one lead."""
        while self._evidence.records:
            leader = self._evidence.leader().setting
            rivals = moves(leader)
            yield from self._look_at(rivals)
            if self._evidence.leader().setting == leader:
                yield from self._contest([leader, *rivals], FEW_WINDOWS)
                if self._evidence.leader().setting == leader:
                    return

    def _widen(self) -> Steps:
        """Look around settings that came close, best first: where two knobs must be turned for either to be of use, the
        way to the best leads past one that breaks the SLO."""
        evidence = self._evidence
        looked_around: set[Setting] = set()
        while True:
            near = [
                each
                for each in evidence.records.values()
                if evidence.promise(each) and each.setting not in looked_around
            ]
            if not near:
                return
            at = max(near, key=evidence.promise).setting
            looked_around.add(at)
            yield from self._look_at([*self.space.moves(at, 1), *self.space.diagonal_moves(at)])
            if self.spent_s > (1 - FINAL_SHARE) * self.budget_s:
                yield from self._contest(evidence.records.keys(), MAX_WINDOWS)

    def _look_at(self, settings: Iterable[Setting]) -> Steps:
        """Those of them that are not known yet, might win and are worth their turn."""
        evidence = self._evidence
        for setting in settings:
            if setting in evidence.records or evidence.hopeless(setting):
                continue
            dear = self.space.turn_s(self._at, setting) > self._window_s
            if not (dear and evidence.unpromising(setting)):
                yield setting

    def _contest(self, settings: Collection[Setting], most: int) -> Steps:
        """Measure again whom it matters for, until the leader of all is sure enough, or has had `most` windows."""
        among = list(settings)
        while self._evidence.records:
            leader, rivals = self._evidence.leader(), self._evidence.rivals(among)
            if leader.verdict != "unsure" and not rivals:
                return
            ahead = max(rivals, key=lambda each: each.tokens_per_s.high, default=leader)
            pair = [each for each in (leader, ahead) if each.windows < most and self._affordable(each.setting)]
            if not pair:
                among = [each for each in among if each != ahead.setting]
                if ahead is leader:
                    return
                continue
            yield min(pair, key=self._lag_s).setting

    def _moves(self, by: int) -> Callable[[Setting], list[Setting]]:
        return lambda setting: self.space.moves(setting, by)

    # -- what it takes ------------------------------------------------------------------------------------------------

    def _lag_s(self, record: Record) -> float:
        """Return the time spent on a setting, plus the cost of going back to it: of two, the lesser is measured
        next."""
        return record.seconds + self.space.turn_s(self._at, record.setting)

    def _again_s(self, settings: Iterable[Setting]) -> float:
        """Return the time to measure these again, one after the other."""
        at, total_s = self._at, 0.0
        for setting in settings:
            total_s += self.space.turn_s(at, setting) + self.settle_s + AGAIN * self._window_s
            at = setting
        return total_s

    def _affordable(self, setting: Setting) -> bool:
        return self.spent_s + self._again_s([setting]) <= self.budget_s

    def _over(self, trial: Trial, spent_s: float) -> None:
        assert trial is self._proposed, "results are of the last proposal"
        self._proposed = None
        self.spent_s += spent_s
