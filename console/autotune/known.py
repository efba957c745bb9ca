"""What is known of settings by now: who leads, who may still win, who cannot, and what others promise. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import get_args

from console.autotune.estimates import noise_of
from console.autotune.record import Record, Sample, Slo
from console.autotune.space import KnobName, Setting

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
        """Whether it surely does not fit, breaks the SLO, or is slower than one that keeps it."""
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
        """What a setting would give if its SLO could be bought with as much throughput; 0 where that is too little."""
        leader = self.leader()
        promise = record.tokens_per_s.value / max(1.0, record.excess)
        return promise if not leader.keeps or promise >= leader.tokens_per_s.value * PROMISING else 0.0

    def unpromising(self, setting: Setting) -> bool:
        """Whether a setting that was not tried is far slower than the leader, if turning the knobs that they differ in
        does at best what it did from any other setting."""
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
