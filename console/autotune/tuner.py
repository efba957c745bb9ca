"""A search drives a rig: one trial after the other until nothing more is to be learnt, or time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from console.autotune.record import Record, pareto
from console.autotune.rig import Rig
from console.autotune.search import Search, Trial
from console.autotune.space import Setting
from console.links.tuning import Tried
from engine.errors import EngineClosed, EngineError, InsufficientMemory
from engine.tasks import uninterrupted

_log = logging.getLogger("console")


class Tuner:
    """One run. on_change: after every trial, and when another begins."""

    def __init__(
        self,
        search: Search,
        rig: Rig,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.search = search
        self.now: Setting | None = None
        self.windows = 0
        self.refused = 0
        self._rig = rig
        self._on_change = on_change
        self._clock = clock
        self._began = clock()

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    async def run(self, *, apply: bool) -> Record | None:
        """Search, then go to the best setting if `apply`, else back to where it began, also where it is cancelled.

        Raises EngineError where the engine fails; it is put back then, too.
        """
        before = self.search.space.start
        try:
            while (trial := self.search.propose()) is not None:
                await self._try(trial)
            best = self.search.best()
            if apply and best is not None:
                await uninterrupted(self._leave_at(best.setting))
                return best
        except BaseException:
            await uninterrupted(self._leave_at(before))
            raise
        await uninterrupted(self._leave_at(before))
        return best

    async def _try(self, trial: Trial) -> None:
        began = self._clock()
        self.now = trial.setting
        self._on_change()
        try:
            await self._rig.use(trial.setting)
        except InsufficientMemory as error:
            _log.info("autotune: %s does not fit: %s", trial.setting, error.message)
            self.refused += 1
            self.search.refuse(trial, self._clock() - began)
        else:
            sample = await self._rig.measure(trial.seconds, self.search.settle_s)
            self.windows += 1
            self.search.observe(trial, sample, self._clock() - began)
        self._on_change()

    async def _leave_at(self, setting: Setting) -> None:
        self.now = None
        self._on_change()
        await self._rig.rest()
        try:
            await self._rig.use(setting)
        except EngineClosed:
            return  # nothing is left to be put back
        except EngineError as error:
            _log.error("autotune: the engine could not be put to %s: %s", setting, error.message)


def tried_of(search: Search) -> tuple[Tried, ...]:
    """All settings that were measured, the fastest first."""
    best, front = search.best(), {each.setting for each in pareto(search.records)}
    records = sorted(search.records, key=lambda each: -each.tokens_per_s.value)
    return tuple(
        _tried(each, front=each.setting in front, best=best is not None and each.setting == best.setting)
        for each in records
    )


def _tried(record: Record, *, front: bool, best: bool) -> Tried:
    rate = record.tokens_per_s
    return Tried(
        setting=record.setting,
        tokens_per_s=rate.value,
        low=rate.low,
        high=rate.high if rate.high != float("inf") else None,
        ttft_s=record.ttft_s.value if record.ttft_s is not None else None,
        itl_s=record.itl_s.value if record.itl_s is not None else None,
        goodput_per_s=record.goodput_per_s,
        verdict=record.verdict,
        windows=record.windows,
        front=front,
        best=best,
    )
