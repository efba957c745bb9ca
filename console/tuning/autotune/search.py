"""Which setting to try next, and which is the best: a coarse grid, a climb from its best, rounds among a few. Pure.

1. Coarse: every setting of a coarse grid gets a short window.
2. Fine: the neighbours of the best are tried, then those of the next best that is near it, and so on from whatever
   leads by then. A setting that leads is measured again before its neighbours are looked at.
3. Final: the few that may be the best are measured again by turns, in windows twice as long, until one is left or each
   has had `MAX_WINDOWS`. The last of the time is for that.

What cannot win is never tried: what needs no less memory than a setting that did not fit; what has more prompts than a
setting that surely breaks the ITL; and, where going there is dear, what turning the dear knobs elsewhere does not
promise to be near the best.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable

import msgspec

from console.tuning.autotune.record import Record, Sample
from console.tuning.autotune.space import Setting, Space
from engine.metrics.slo import Slo

WINDOW_S = 4.0
"""A short window."""
SETTLE_S = 1.0
"""What is left out after a turn: requests that began before it."""
AGAIN = 2
"""Times as long as the first are windows of settings that are measured again."""
MAX_WINDOWS = 5
"""Windows of a setting, at most."""
FINALISTS = 3
INDIFFERENCE = 0.02
NEAR = 0.85
"""Of the leader's throughput, what a setting must promise for its neighbours to be tried, or for a dear turn to it."""
COARSE_SHARE = 0.4
"""Of the time, what the coarse grid may take."""
FINAL_SHARE = 0.25
"""Of the time, the part that is reserved for measuring the best again."""
MIN_COARSE = 3


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
        self.settle_s = settle_s
        self._window_s = window_s
        self._draw = random.Random(seed)
        self._samples: dict[Setting, list[Sample]] = {}
        self._records: dict[Setting, Record] = {}
        self._refused: list[Setting] = []
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
            if not self._affordable(setting):
                self._steps.close()
                return None
            self._proposed = Trial(setting=setting, seconds=self._seconds(setting), cost_s=self._cost_s(setting))
        return self._proposed

    def observe(self, trial: Trial, sample: Sample, spent_s: float | None = None) -> Record:
        """A trial gave this. spent_s: what it took in all, as reckoned if None."""
        samples = self._samples.setdefault(trial.setting, [])
        samples.append(sample)
        record = self._records[trial.setting] = Record.of(trial.setting, samples, self.slo)
        self._over(trial, trial.cost_s if spent_s is None else spent_s)
        self._at = trial.setting
        return record

    def refuse(self, trial: Trial, spent_s: float = 0.0) -> None:
        """A trial could not be made: there is not the memory. Nothing that needs as much is tried."""
        self._refused.append(trial.setting)
        self._records.pop(trial.setting, None)
        self._samples.pop(trial.setting, None)
        self._over(trial, spent_s)

    def best(self) -> Record | None:
        """The setting to be used: of those that keep the SLO the one whose throughput is surest to be high, with more
        goodput where two are alike; where none keeps it, the one that comes closest."""
        keeping = [record for record in self.records if record.keeps]
        if keeping:
            surest = max(each.tokens_per_s.low for each in keeping)
            alike = [each for each in keeping if each.tokens_per_s.low >= surest * (1 - INDIFFERENCE / 4)]
            return max(alike, key=lambda each: (each.verdict == "kept", each.goodput_per_s, each.tokens_per_s.low))
        return min(self.records, key=lambda each: each.excess, default=None)

    @property
    def records(self) -> tuple[Record, ...]:
        """All that was tried, in the order of first trials."""
        return tuple(self._records.values())

    # -- how it goes --------------------------------------------------------------------------------------------------

    def _strategy(self) -> Steps:
        limit = max(MIN_COARSE, int(COARSE_SHARE * self.budget_s / (self._window_s + self.settle_s)))
        for setting in self.space.coarse(limit, self._draw):
            if not self._hopeless(setting):
                yield setting
        self.stage = "fine"
        yield from self._climb()
        self.stage = "final"
        yield from self._decide()

    def _climb(self) -> Steps:
        """Look around the leader, then around the most promising of those near it: where two knobs must be turned for
        either to be of use, the way to the best leads past one that breaks the SLO."""
        looked_around: set[Setting] = set()
        while self._records and self.spent_s < (1 - FINAL_SHARE) * self.budget_s:
            leader = self._leader()
            if leader.windows == 1:
                yield leader.setting
                continue
            near = [each for each in self._near(leader) if each.setting not in looked_around]
            if not near:
                return
            at = max(near, key=lambda each: (each is leader, _promise(each))).setting
            looked_around.add(at)
            far = self.space.moves(at, 2) if at == leader.setting else []
            yield from self._look_at([*far, *self.space.moves(at, 1), *self.space.diagonal_moves(at)])

    def _look_at(self, settings: Iterable[Setting]) -> Steps:
        """Those of them that are not known yet, might win and are worth their turn."""
        for setting in settings:
            if not self._records:
                return
            dear = self.space.turn_s(self._at, setting) > self._window_s
            if (
                setting not in self._records
                and not self._hopeless(setting)
                and not (dear and self._unpromising(setting))
            ):
                yield setting

    def _decide(self) -> Steps:
        """Measure the finalists again, the one with the least time first."""
        while self._records:
            leader, finalists = self._leader(), self._finalists()
            if finalists == [leader] and leader.verdict != "unsure":
                return
            open_to = [each for each in finalists if each.windows < MAX_WINDOWS and self._affordable(each.setting)]
            if not open_to:
                return
            yield min(open_to, key=lambda each: each.seconds + self.space.turn_s(self._at, each.setting)).setting

    # -- what is known ------------------------------------------------------------------------------------------------

    def _leader(self) -> Record:
        """The best by what was measured, be that sure or not. There must be one."""
        return max(self.records, key=lambda each: (each.keeps, each.value if each.keeps else -each.excess))

    def _near(self, leader: Record) -> list[Record]:
        """The leader, and those that promise nearly as much; all that answered where even the leader breaks the SLO."""
        least = NEAR * leader.tokens_per_s.value if leader.keeps else 0.0
        return [each for each in self.records if each is leader or (not each.failed and _promise(each) >= least)]

    def _finalists(self) -> list[Record]:
        """The leader and the best of those that may be as good."""
        leader = self._leader()
        least = leader.tokens_per_s.value * (1 - INDIFFERENCE)
        rivals = [
            each
            for each in self.records
            if each is leader
            or (each.tokens_per_s.high >= least and not each.failed and (each.verdict != "broken" or not leader.keeps))
        ]
        return sorted(rivals, key=lambda each: (each is not leader, -each.value))[:FINALISTS]

    def _hopeless(self, setting: Setting) -> bool:
        """Return whether it surely does not fit, or breaks the ITL."""
        return any(setting.asks_no_less_memory_than(each) for each in self._refused) or any(
            self._breaks_itl_too(setting, each) for each in self.records
        )

    def _breaks_itl_too(self, setting: Setting, broken: Record) -> bool:
        """More prompts in a step make it no shorter."""
        limit, itl = self.slo.itl_s, broken.itl_s
        if limit is None or itl is None or itl.low <= limit or setting.max_prompts < broken.setting.max_prompts:
            return False
        return setting == broken.setting.with_value("max_prompts", setting.max_prompts)

    def _unpromising(self, setting: Setting) -> bool:
        """Return whether it is dear to go to, and the dear knobs in which it differs from the leader made every setting
        far slower where they were turned so."""
        if self.space.turn_s(self._at, setting) <= self._window_s:
            return False
        leader = self._leader().setting
        dear = [knob.name for knob in self.space.knobs if knob.turn_s > self._window_s]
        turned = {name: setting.value(name) for name in dear if setting.value(name) != leader.value(name)}
        ratios = [
            there.tokens_per_s.value / here.tokens_per_s.value
            for here in self.records
            if all(here.setting.value(name) == leader.value(name) for name in turned)
            and (there := self._records.get(msgspec.structs.replace(here.setting, **turned))) is not None
            and here.tokens_per_s.value > 0
        ]
        return bool(turned and ratios) and max(ratios) < NEAR

    # -- what it takes ------------------------------------------------------------------------------------------------

    def _seconds(self, setting: Setting) -> float:
        return self._window_s * (AGAIN if setting in self._records else 1)

    def _cost_s(self, setting: Setting) -> float:
        return self._seconds(setting) + self.settle_s + self.space.turn_s(self._at, setting)

    def _affordable(self, setting: Setting) -> bool:
        return self.spent_s + self._cost_s(setting) <= self.budget_s

    def _over(self, trial: Trial, spent_s: float) -> None:
        assert trial is self._proposed, "results are of the last proposal"
        self._proposed = None
        self.spent_s += spent_s


def _promise(record: Record) -> float:
    """Return the rate of a setting if its SLO could be bought with as much throughput."""
    return record.tokens_per_s.value / max(1.0, record.excess)
