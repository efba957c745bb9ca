"""Tuning of a model that serves: one run at a time, as a task of its own, whoever watches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from console.autotune.knobs import Wishes, space_of
from console.autotune.load import Load
from console.autotune.mix import Mix, mix_of_history, usual_mix
from console.autotune.record import Slo
from console.autotune.rig import LiveRig, setting_of
from console.autotune.search import Search
from console.autotune.tuner import Tuner, tried_of
from console.last_settings import model_key
from console.links.tuning import Tried, TuneOrder, TuningReport, TuningState
from console.tuned import Tuned, TunedFile, hardware_of, settings_of
from engine.devices import usable_cores
from engine.engine import Engine, Serving
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.tasks import detached

if TYPE_CHECKING:
    from console.runtime import Runtime


SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 2.0, 6.0


class Tuning:
    """Of one runtime; on its loop, but for `report`, which any thread may call."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._run: _Run | None = None
        self._task: asyncio.Task[None] | None = None
        self._report = TuningReport()

    def report(self) -> TuningReport:
        """How the last one goes or went."""
        run = self._run
        if run is None or not self._report.under_way:
            return self._report
        return msgspec.structs.replace(self._report, elapsed_s=run.tuner.elapsed_s)

    async def start(self, order: TuneOrder, mix: Mix | None = None) -> None:
        """See TuningLink.start. mix: what requests are like, as they were in this session if None."""
        self._refuse_if_busy()
        engine = self._runtime.engine
        serving = await engine.serving(order.model)
        self._refuse_if_busy()
        self._run = run = _Run(self._runtime, serving, self._with_slo(order), mix, self._changed)
        self._report = run.report("running")
        self._task = detached(self._to_its_end(run))

    async def cancel(self) -> None:
        """See TuningLink.cancel."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def use_best(self) -> None:
        """See TuningLink.use_best."""
        self._refuse_if_busy()
        best = self._report.best
        if self._run is None or best is None:
            raise InvalidRequest("nothing was found yet that could be used")
        await self._run.go_to(best)
        self._report = msgspec.structs.replace(self._report, applied=True, said=_said(best, applied=True))

    async def finished(self) -> None:
        """Wait for the end of the run under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _refuse_if_busy(self) -> None:
        if self._task is not None and not self._task.done():
            raise EngineBusy("settings are being tried already; cancel that first", state="tuning")
        if self._runtime.benches.report().under_way:
            raise EngineBusy("a bench goes on, which would measure what is tried; cancel that first", state="bench")

    def _with_slo(self, order: TuneOrder) -> TuneOrder:
        """With what the settings ask of latency, where the order leaves that open."""
        config = self._runtime.engine.config
        return msgspec.structs.replace(
            order, slo_ttft_s=order.slo_ttft_s or config.slo_ttft_s, slo_itl_s=order.slo_itl_s or config.slo_itl_s
        )

    async def _to_its_end(self, run: _Run) -> None:
        state: TuningState = "failed"
        said = ""
        try:
            said = await run.to_its_end()
            state = "done"
        except asyncio.CancelledError:
            state, said = "cancelled", "Cancelled; the engine is as it was."
        except EngineError as error:
            said = error.message
        finally:
            applied = state == "done" and run.order.apply
            self._report = msgspec.structs.replace(run.report(state), said=said, applied=applied)

    def _changed(self) -> None:
        if self._run is not None:
            self._report = self._run.report("running" if self._run.tuner.now is not None else "restoring")


class _Run:
    """One run: what it is made of, and what is told of it."""

    def __init__(
        self, runtime: Runtime, serving: Serving, order: TuneOrder, mix: Mix | None, on_change: Callable[[], None]
    ) -> None:
        engine = runtime.engine
        self._runtime = runtime
        self._serving = serving
        self.order = order
        slo = Slo(ttft_s=order.slo_ttft_s, itl_s=order.slo_itl_s, share=order.percentile / 100)
        self._mix = _mix_for(engine, serving, mix, order.seed)
        wishes = Wishes(knobs=order.knobs, least_cache_bits=order.least_cache_bits).validate()
        space = space_of(
            serving.model,
            serving.spec,
            setting_of(serving.spec, serving.config),
            cores=usable_cores(),
            load_s=_load_s(engine, serving.name),
            wishes=wishes,
        )
        ids = [each for each in range(serving.model.vocab_size) if each not in serving.tokenizer.special_ids]
        load = Load(engine, serving.name, self._mix, slo, ids, seed=order.seed)
        self._rig = LiveRig(engine, serving.name, load, space.start, users=order.users)
        budget_s = order.minutes * 60
        search = Search(space, slo, budget_s=budget_s, window_s=_window_s(budget_s), seed=order.seed)
        self.tuner = Tuner(search, self._rig, on_change=on_change)

    async def to_its_end(self) -> str:
        """Run, and keep what was found; a sentence about it."""
        best = await self.tuner.run(apply=self.order.apply)
        found = next((each for each in tried_of(self.tuner.search) if each.best), None)
        if best is None or found is None:
            return "No setting could be measured."
        await asyncio.to_thread(self._keep, found, self.order.apply)
        return _said(found, applied=self.order.apply)

    async def go_to(self, best: Tried) -> None:
        """Put the engine there and keep that it is to be so."""
        await self._rig.use(best.setting)
        await asyncio.to_thread(self._keep, best, True)

    def _keep(self, found: Tried, applied: bool) -> None:
        order, search = self.order, self.tuner.search
        TunedFile(self._runtime.state_dir).keep(
            Tuned(
                model=model_key(self._serving.name, self._serving.spec.path),
                hardware=hardware_of(self._runtime.engine.snapshot().devices),
                at=time.time(),
                applied=applied,
                settings=settings_of(found.setting, [knob.name for knob in search.space.knobs]),
                measured=found,
                slo_ttft_s=order.slo_ttft_s,
                slo_itl_s=order.slo_itl_s,
                percentile=order.percentile,
                mix=self._mix.said,
            )
        )

    def report(self, state: TuningState) -> TuningReport:
        """How it stands."""
        search, order = self.tuner.search, self.order
        return TuningReport(
            state=state,
            model=self._serving.name,
            slo_ttft_s=order.slo_ttft_s,
            slo_itl_s=order.slo_itl_s,
            percentile=order.percentile,
            mix=self._mix.said,
            stage=search.stage,
            now=self.tuner.now,
            start=search.space.start,
            elapsed_s=self.tuner.elapsed_s,
            budget_s=search.budget_s,
            size=search.space.size,
            knobs=tuple(knob.name for knob in search.space.knobs),
            windows=self.tuner.windows,
            refused=self.tuner.refused,
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


def _said(best: Tried, *, applied: bool) -> str:
    kept = {
        "kept": "keeps what is asked of latency",
        "unsure": "seems to keep what is asked of latency",
        "broken": "breaks what is asked of latency least, as every setting that was tried does break it",
    }[best.verdict]
    used = "It is in use, and will be from now on." if applied else "The engine is as it was before."
    return f"{best.tokens_per_s:,.0f} tok/s; it {kept}. {used}"
