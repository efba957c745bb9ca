"""Tuning of a model that serves: one run at a time, as a task of its own, watched or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from console.bench.bench_runs import check_trace
from console.bench.workload import Exchange, TokenIds, read_trace
from console.link.tuning import LOAD_S, Tried, TuneOrder, TuningReport, TuningState
from console.tuning.autotune.knob_space import space_of
from console.tuning.autotune.rig import LiveRig, setting_of
from console.tuning.autotune.search import Search
from console.tuning.autotune.table import Outcome, sentences
from console.tuning.autotune.traffic import LoadGenerator, Mix, asked_mix, mix_of_history, mix_of_trace, usual_mix
from console.tuning.autotune.tuner import Tuner, tried_of
from console.tuning.last_settings import model_key
from console.tuning.profiles import TunedProfile, TunedProfiles, hardware_of, settings_of
from console.tuning.sample_load import SampleLoad
from engine.devices import usable_cores
from engine.engine import Engine, Serving
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.metrics.slo import Slo
from engine.models.files import home_expanded
from engine.system.tasks import run_detached, run_uninterrupted

# One run of tuning: its parts, its report, and the profile it saves.

MIN_WINDOW_S, MAX_WINDOW_S = 2.0, 6.0


class TuningRun:
    """Of a model that serves. mix: what requests are like, as they were in this session if None.

    on_change: after every trial, and when another begins.  unkept: why what was found is not in the file, "" where it
    is. Raises InvalidRequest where nothing can be turned.
    """

    def __init__(
        self,
        engine: Engine,
        state_dir: Path | None,
        serving: Serving,
        order: TuneOrder,
        mix: Mix | None,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._state_dir = state_dir
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
            order=order,
        )
        ids = [each for each in range(serving.model.vocab_size) if each not in serving.tokenizer.special_ids]
        load = LoadGenerator(engine, serving.name, self._mix, slo, ids, seed=order.seed)
        self._rig = LiveRig(engine, serving.name, load, before, users=order.users)
        budget_s = order.minutes * 60

        def search(window_s: float) -> Search:
            return Search(space, slo, budget_s=budget_s, window_s=window_s, seed=order.seed)

        first = search(_window_s(budget_s))
        self.tuner = Tuner(first, self._rig, before=before, restart=search, on_change=on_change)

    @property
    def best(self) -> Tried | None:
        """The best by now."""
        return next((each for each in tried_of(self.tuner.search) if each.best), None)

    async def run_to_completion(self) -> None:
        """Run it. What was found by then is kept however it ends. Raises EngineError."""
        try:
            await self.tuner.run(apply=self._order.apply)
        finally:
            await run_uninterrupted(self._keep_best())

    async def go_to(self, best: Tried) -> None:
        """Put the engine there and keep that it is to be so. Raises EngineError."""
        await self._rig.use(best.setting)
        self.tuner.applied = True
        await self._keep(best)

    def summary(self, early: str = "") -> str:
        """Return the outcome in sentences. early: why it ended before its time."""
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
        profile = TunedProfile(
            model=model_key(self._serving.name, self._serving.spec.path),
            hardware=hardware_of(self._engine.snapshot().devices),
            at=time.time(),
            applied=self.tuner.applied,
            settings=settings_of(found.setting, [knob.name for knob in search.space.knobs]),
            measured=found,
            slo_ttft_s=order.slo_ttft_s,
            slo_itl_s=order.slo_itl_s,
            percentile=order.percentile,
            mix=self._mix.source,
        )
        file = TunedProfiles(self._state_dir)
        self.unkept = ""
        try:
            await asyncio.to_thread(file.keep, profile)
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
            mix=self._mix.source,
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
    return min(MAX_WINDOW_S, max(MIN_WINDOW_S, budget_s / 100))


def _mix_for(engine: Engine, serving: Serving, mix: Mix | None, seed: int) -> Mix:
    found = mix or mix_of_history(engine.snapshot().insight, seed) or usual_mix(seed)
    return found.within(min(serving.model.max_model_len, serving.model.kv_tokens))


def _load_s(engine: Engine, model: str) -> float | None:
    """Return the load time of one of its workers."""
    return next(
        (worker.load_s for worker in engine.snapshot().workers if worker.model == model and worker.load_s), None
    )


class Tuning:
    """Of one engine; on its loop, but for `report`, which any thread may call.

    is_measured: whether a bench is under way, which would measure what is tried.
    """

    def __init__(self, engine: Engine, state_dir: Path | None, is_measured: Callable[[], bool]) -> None:
        self._engine = engine
        self._state_dir = state_dir
        self._is_measured = is_measured
        self._run: TuningRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._report = TuningReport()
        self._sample = SampleLoad(engine)

    def report(self) -> TuningReport:
        """How the last one goes or went, and whether a sample load runs."""
        run, sample = self._run, self._sample
        report = self._report
        if run is not None and report.under_way:
            report = msgspec.structs.replace(report, elapsed_s=run.tuner.elapsed_s)
        if sample.clients:
            report = msgspec.structs.replace(report, load_left_s=sample.left_s, load_clients=sample.clients)
        return report

    async def start_load(self, model: str = "", seconds: float = LOAD_S) -> None:
        """See TuningLink.start_load."""
        self._refuse_if_busy()
        await self._sample.start(model, seconds)

    async def stop_load(self) -> None:
        """See TuningLink.stop_load."""
        self._sample.finish()

    async def start(self, order: TuneOrder, mix: Mix | None = None) -> None:
        """See TuningLink.start. mix: what requests are like, as the order or the session has them if None."""
        self._refuse_if_busy()
        self._refuse_users(order)
        serving = await self._engine.serving(order.model)
        found = mix or await mix_of_order(order, serving)
        await self._sample.stop()
        self._refuse_if_busy()
        self._run = run = TuningRun(self._engine, self._state_dir, serving, self._with_slo(order), found, self._changed)
        self._report = run.report("running")
        self._task = run_detached(self._run_to_completion(run))

    async def cancel(self) -> None:
        """See TuningLink.cancel."""
        await self._sample.stop()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def use_best(self) -> None:
        """See TuningLink.use_best."""
        self._refuse_if_busy()
        best = self._report.best
        if self._run is None or best is None:
            raise InvalidRequest("No result to apply yet")
        if not best.keeps:
            raise InvalidRequest("The best result misses the SLO and was not applied")
        await self._run.go_to(best)
        self._report = msgspec.structs.replace(self._report, applied=True, outcome=self._run.summary())
        if self._run.unkept:
            raise EngineError(self._report.outcome)

    async def finished(self) -> None:
        """Wait for the end of the run under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _refuse_if_busy(self) -> None:
        if self._task is not None and not self._task.done():
            raise EngineBusy("Autotune is already running. Cancel it first.", state="tuning")
        if self._is_measured():
            raise EngineBusy("A benchmark is running. Cancel it first.", state="bench")

    def _refuse_users(self, order: TuneOrder) -> None:
        most = self._engine.config.max_queue
        if order.users is not None and order.users > most:
            raise InvalidRequest(
                f"{order.users:,} users exceed the queue limit ({most:,}); other clients would get 429",
                param="users",
            )

    def _with_slo(self, order: TuneOrder) -> TuneOrder:
        """With what the settings ask of latency, where the order leaves that open."""
        config = self._engine.config
        return msgspec.structs.replace(
            order, slo_ttft_s=order.slo_ttft_s or config.slo_ttft_s, slo_itl_s=order.slo_itl_s or config.slo_itl_s
        )

    async def _run_to_completion(self, run: TuningRun) -> None:
        state: TuningState = "failed"
        early = ""
        try:
            await run.run_to_completion()
            state = "done"
        except asyncio.CancelledError:
            state, early = "cancelled", "Cancelled"
        except EngineError as error:
            early = error.message
        except Exception as error:
            early = f"failed: {error!r}"
            raise
        finally:
            applied = run.tuner.applied
            self._report = msgspec.structs.replace(run.report(state), outcome=run.summary(early), applied=applied)

    def _changed(self) -> None:
        if self._run is not None:
            self._report = self._run.report("running" if self._run.tuner.now is not None else "restoring")


async def mix_of_order(order: TuneOrder, serving: Serving) -> Mix | None:
    """The lengths that an order names, None where it names none. Raises InvalidRequest, its param the field."""
    if not order.trace:
        return asked_mix(order.prompt or None, order.output or None, order.seed)
    if order.prompt or order.output:
        raise InvalidRequest("a trace has its own lengths: leave prompt and answer tokens empty", param="trace")
    await asyncio.to_thread(check_trace, order.trace)
    exchanges = await asyncio.to_thread(read_trace, home_expanded(order.trace))
    return await traced_mix(exchanges, serving, order.seed)


async def traced_mix(exchanges: Sequence[Exchange], serving: Serving, seed: int) -> Mix:
    """Questions as a trace has them, in tokens of that model. Raises InvalidRequest where none fits."""
    material = TokenIds.of(serving.tokenizer, serving.model.vocab_size)
    return await asyncio.to_thread(mix_of_trace, exchanges, material, serving.model.max_model_len, seed)
