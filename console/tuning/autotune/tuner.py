"""A search drives a rig: one trial after the other until nothing more is to be learnt, or time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from console.link.tuning import Failed, Tried
from console.tuning.autotune.record import Record, Sample, pareto
from console.tuning.autotune.rig import KnobsChanged, Rig
from console.tuning.autotune.search import Search, Trial
from console.tuning.autotune.space import Setting
from engine.errors import (
    EngineClosed,
    EngineError,
    InsufficientMemory,
    ModelNotFound,
    NoModelLoaded,
    WorkerFailed,
)
from engine.system.tasks import run_uninterrupted

LONGER = 2.0
"""Times as long is the next window, where nothing was answered in the first."""
BEGIN_SHARE = 0.4
"""Of the time, what windows of the first setting may take until something is answered."""
MAX_ATTEMPTS = 6
_GONE = (EngineClosed, NoModelLoaded, ModelNotFound)
_log = logging.getLogger("console")


class Tuner:
    """One run. on_change: after every trial, and when another begins.

    before: where the engine is put back to, the search's start if None.  restart: the same search with windows of that
    many seconds, for models that answer too slowly for those of `search`; None does without.
    failed: settings that could not be measured, `refused` of them for want of memory.  notes: what else happened.
    unapplied, not_put_back: why the engine could not be put to the best setting, or back; "" where it could.
    """

    def __init__(
        self,
        search: Search,
        rig: Rig,
        *,
        before: Setting | None = None,
        restart: Callable[[float], Search] | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.search = search
        self.now: Setting | None = None
        self.windows = 0
        self.refused = 0
        self.failed: list[Failed] = []
        self.notes: list[str] = []
        self.applied = False
        self.unapplied = ""
        self.not_put_back = ""
        self._before = before or search.space.start
        self._rig = rig
        self._restart = restart
        self._on_change = on_change
        self._clock = clock
        self._began = clock()
        self._attempts = 0

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    async def run(self, *, apply: bool) -> Record | None:
        """Search, then go to the best setting if `apply` and it keeps the SLO, else back to where it began, also where
        it is cancelled. What was measured is in `search`, however it ends.

        A setting that fails or gives nothing is out of the race. Raises EngineError where the engine is gone, or the
        first setting never answers.
        """
        try:
            while self.elapsed_s < self.search.budget_s and (trial := self.search.propose()) is not None:
                await self._try(trial)
            best = best_of(self.search)
            if apply and best is not None and best.keeps:
                await run_uninterrupted(self._apply(best.setting))
        except BaseException:
            await run_uninterrupted(self._put_back())
            raise
        if not self.applied:
            await run_uninterrupted(self._put_back())
        return best

    # -- one trial ----------------------------------------------------------------------------------------------------

    async def _try(self, trial: Trial) -> None:
        record = _record_of(self.search, trial.setting)
        if record is not None and record.failed:
            self.search.observe(trial, Sample.of_failure(record.failed, trial.seconds), 0.0)
            return
        began = self._clock()
        self.now = trial.setting
        self._on_change()
        try:
            sample = await self._measured(trial)
        except KnobsChanged as turned:
            self.notes.append(f"{turned.sentence}: run discarded, setting restored")
        except _GONE:
            raise
        except EngineError as error:
            self._out(trial, error, self._clock() - began, answered=record is not None)
        else:
            self.windows += 1
            self.search.observe(trial, sample, self._clock() - began)
        self._on_change()

    async def _measured(self, trial: Trial) -> Sample:
        await self._rig.use(trial.setting)
        return await self._rig.measure(trial.seconds, self.search.settle_s)

    def _out(self, trial: Trial, error: EngineError, spent_s: float, *, answered: bool) -> None:
        """A setting cannot be measured. answered: whether it could before."""
        _log.info("autotune: %s: %s", trial.setting, error.message)
        others = any(not record.failed for record in self.search.records if record.setting != trial.setting)
        if not others and not self._begin_again(trial, error):
            raise WorkerFailed(f"the current settings cannot be measured: {error.message}")
        if not others:
            return
        self.failed.append(Failed(setting=trial.setting, reason=error.message))
        if isinstance(error, InsufficientMemory):
            self.refused += 1
        if answered or isinstance(error, InsufficientMemory):
            self.search.refuse(trial, spent_s)
        else:
            self.search.observe(trial, Sample.of_failure(error.message, spent_s), spent_s)

    def _begin_again(self, trial: Trial, error: EngineError) -> bool:
        """Nothing was ever answered: try longer windows; False where there is not the time."""
        self._attempts += 1
        seconds = trial.seconds * LONGER
        late = self.elapsed_s + seconds > BEGIN_SHARE * self.search.budget_s
        if self._restart is None or late or self._attempts >= MAX_ATTEMPTS:
            return False
        self.notes.append(f"no answer within {trial.seconds:g} s: trying runs of {seconds:g} s")
        self.search = self._restart(seconds)
        self.search.spent_s = self.elapsed_s
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _apply(self, setting: Setting) -> None:
        self.unapplied = await self._go_to(setting)
        self.applied = not self.unapplied

    async def _put_back(self) -> None:
        self.applied = False
        self.not_put_back = await self._go_to(self._before)

    async def _go_to(self, setting: Setting) -> str:
        """Without load; why it is not there, "" where it is."""
        self.now = None
        self._on_change()
        await self._rig.rest()
        try:
            await self._rig.use(setting)
        except EngineError as error:
            _log.error("autotune: settings could not be restored to %s: %s", setting, error.message)
            return error.message
        return ""


def best_of(search: Search) -> Record | None:
    """Return the best setting; None where nothing was answered."""
    best = search.best()
    return None if best is None or best.failed else best


def _record_of(search: Search, setting: Setting) -> Record | None:
    return next((record for record in search.records if record.setting == setting), None)


def tried_of(search: Search) -> tuple[Tried, ...]:
    """All settings that were measured, the fastest first."""
    best, front = best_of(search), {each.setting for each in pareto(search.records, search.slo)}
    answered = [record for record in search.records if not record.failed]
    return tuple(
        _tried(each, front=each.setting in front, best=best is not None and each.setting == best.setting)
        for each in sorted(answered, key=lambda each: -each.tokens_per_s.value)
    )


def _tried(record: Record, *, front: bool, best: bool) -> Tried:
    rate, ttft, itl = record.tokens_per_s, record.ttft_s, record.itl_s
    return Tried(
        setting=record.setting,
        tokens_per_s=rate.value,
        low=rate.low,
        high=_finite(rate.high),
        ttft_s=ttft.value if ttft is not None else None,
        ttft_low_s=ttft.low if ttft is not None else None,
        ttft_high_s=_finite(ttft.high) if ttft is not None else None,
        itl_s=itl.value if itl is not None else None,
        itl_low_s=itl.low if itl is not None else None,
        itl_high_s=_finite(itl.high) if itl is not None else None,
        goodput_per_s=record.goodput_per_s,
        verdict=record.verdict,
        keeps=record.keeps,
        windows=record.windows,
        front=front,
        best=best,
    )


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None
