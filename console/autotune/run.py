"""One run of tuning: what it is made of, what is told of it, and what is kept in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from console.autotune.knobs import Wishes, space_of
from console.autotune.load import Load
from console.autotune.mix import Mix, mix_of_history, usual_mix
from console.autotune.record import Slo
from console.autotune.rig import LiveRig, setting_of
from console.autotune.search import Search
from console.autotune.table import Outcome, sentences
from console.autotune.tuner import Tuner, tried_of
from console.last_settings import model_key
from console.links.tuning import Tried, TuneOrder, TuningReport, TuningState
from console.tuned import Tuned, TunedFile, hardware_of, settings_of
from engine.devices import usable_cores
from engine.engine import Engine, Serving
from engine.tasks import uninterrupted

if TYPE_CHECKING:
    from console.runtime import Runtime

SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 2.0, 6.0


class Run:
    """Of a model that serves. mix: what requests are like, as they were in this session if None.

    on_change: after every trial, and when another begins.  unkept: why what was found is not in the file, "" where it
    is. Raises InvalidRequest where nothing can be turned.
    """

    def __init__(
        self, runtime: Runtime, serving: Serving, order: TuneOrder, mix: Mix | None, on_change: Callable[[], None]
    ) -> None:
        engine = runtime.engine
        self._runtime = runtime
        self._serving = serving
        self._order = order
        self.unkept = ""
        slo = Slo(ttft_s=order.slo_ttft_s, itl_s=order.slo_itl_s, share=order.percentile / 100)
        self._mix = _mix_for(engine, serving, mix, order.seed)
        before = setting_of(serving.spec, serving.config)
        space = space_of(
            serving.model,
            serving.spec,
            before,
            cores=usable_cores(),
            load_s=_load_s(engine, serving.name),
            wishes=Wishes(knobs=order.knobs, kept=order.kept, least_cache_bits=order.least_cache_bits).validate(),
        )
        ids = [each for each in range(serving.model.vocab_size) if each not in serving.tokenizer.special_ids]
        load = Load(engine, serving.name, self._mix, slo, ids, seed=order.seed)
        self._rig = LiveRig(engine, serving.name, load, before, users=order.users)
        budget_s = order.minutes * 60

        def search(window_s: float) -> Search:
            return Search(space, slo, budget_s=budget_s, window_s=window_s, seed=order.seed)

        first = search(_window_s(budget_s))
        self.tuner = Tuner(first, self._rig, before=before, anew=search, on_change=on_change)

    @property
    def best(self) -> Tried | None:
        """The best by now."""
        return next((each for each in tried_of(self.tuner.search) if each.best), None)

    async def to_its_end(self) -> None:
        """Run it. What was found by then is kept however it ends. Raises EngineError."""
        try:
            await self.tuner.run(apply=self._order.apply)
        finally:
            await uninterrupted(self._keep_best())

    async def go_to(self, best: Tried) -> None:
        """Put the engine there and keep that it is to be so. Raises EngineError."""
        await self._rig.use(best.setting)
        self.tuner.applied = True
        await self._keep(best)

    def said(self, early: str = "") -> str:
        """What came of it, in sentences. early: why it ended before its time."""
        tuner = self.tuner
        return sentences(
            Outcome(
                best=self.best,
                asked=self._order.slo_ttft_s is not None or self._order.slo_itl_s is not None,
                early=early,
                apply=self._order.apply,
                applied=tuner.applied,
                unapplied=tuner.unapplied,
                not_put_back=tuner.not_put_back,
                unkept=self.unkept,
            )
        )

    async def _keep_best(self) -> None:
        if (best := self.best) is not None:
            await self._keep(best)

    async def _keep(self, found: Tried) -> None:
        order, search = self._order, self.tuner.search
        kept = Tuned(
            model=model_key(self._serving.name, self._serving.spec.path),
            hardware=hardware_of(self._runtime.engine.snapshot().devices),
            at=time.time(),
            applied=self.tuner.applied,
            settings=settings_of(found.setting, [knob.name for knob in search.space.knobs]),
            measured=found,
            slo_ttft_s=order.slo_ttft_s,
            slo_itl_s=order.slo_itl_s,
            percentile=order.percentile,
            mix=self._mix.said,
        )
        file = TunedFile(self._runtime.state_dir)
        self.unkept = ""
        try:
            await asyncio.to_thread(file.keep, kept)
        except OSError as error:
            self.unkept = f"{file.file} cannot be written: {error.strerror or error}"

    def report(self, state: TuningState) -> TuningReport:
        """How it stands."""
        tuner, search, order = self.tuner, self.tuner.search, self._order
        return TuningReport(
            state=state,
            model=self._serving.name,
            slo_ttft_s=order.slo_ttft_s,
            slo_itl_s=order.slo_itl_s,
            percentile=order.percentile,
            mix=self._mix.said,
            stage=search.stage,
            now=tuner.now,
            start=search.space.start,
            elapsed_s=tuner.elapsed_s,
            budget_s=search.budget_s,
            size=search.space.size,
            knobs=tuple(knob.name for knob in search.space.knobs),
            windows=tuner.windows,
            refused=tuner.refused,
            failed=tuple(tuner.failed),
            notes=tuple(tuner.notes),
            tried=tried_of(search),
        )


def _window_s(budget_s: float) -> float:
    """So that there is time for some dozens of windows, as far as short ones say anything."""
    return min(LONGEST_WINDOW_S, max(SHORTEST_WINDOW_S, budget_s / 100))


def _mix_for(engine: Engine, serving: Serving, mix: Mix | None, seed: int) -> Mix:
    found = mix or mix_of_history(engine.snapshot().insight, seed) or usual_mix(seed)
    return found.within(min(serving.model.max_model_len, serving.model.kv_tokens))


def _load_s(engine: Engine, model: str) -> float | None:
    """What a worker of it took to load."""
    return next(
        (worker.load_s for worker in engine.snapshot().workers if worker.model == model and worker.load_s), None
    )
