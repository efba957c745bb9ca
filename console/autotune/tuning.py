"""Tuning of a model that serves: one run at a time, as a task of its own, whoever watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from console.autotune.mix import Mix, asked_mix, mix_of_trace
from console.autotune.run import Run
from console.bench.forms import check_trace
from console.bench.prompts import TokenIds
from console.bench.trace import Exchange, read_trace
from console.links.tuning import TuneOrder, TuningReport, TuningState
from engine.engine import Serving
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.models.files import home_expanded
from engine.tasks import detached

if TYPE_CHECKING:
    from console.runtime import Runtime


class Tuning:
    """Of one runtime; on its loop, but for `report`, which any thread may call."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._run: Run | None = None
        self._task: asyncio.Task[None] | None = None
        self._report = TuningReport()

    def report(self) -> TuningReport:
        """How the last one goes or went."""
        run = self._run
        if run is None or not self._report.under_way:
            return self._report
        return msgspec.structs.replace(self._report, elapsed_s=run.tuner.elapsed_s)

    async def start(self, order: TuneOrder, mix: Mix | None = None) -> None:
        """See TuningLink.start. mix: what requests are like, as the order or the session has them if None."""
        self._refuse_if_busy()
        self._refuse_users(order)
        serving = await self._runtime.engine.serving(order.model)
        found = mix or await mix_of_order(order, serving)
        self._refuse_if_busy()
        self._run = run = Run(self._runtime, serving, self._with_slo(order), found, self._changed)
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
        if not best.keeps:
            raise InvalidRequest("the best that was found breaks what is asked of latency: it is not put to use")
        await self._run.go_to(best)
        self._report = msgspec.structs.replace(self._report, applied=True, said=self._run.said())
        if self._run.unkept:
            raise EngineError(self._report.said)

    async def finished(self) -> None:
        """Wait for the end of the run under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _refuse_if_busy(self) -> None:
        if self._task is not None and not self._task.done():
            raise EngineBusy("settings are being tried already; cancel that first", state="tuning")
        if self._runtime.benches.report().under_way:
            raise EngineBusy("a bench goes on, which would measure what is tried; cancel that first", state="bench")

    def _refuse_users(self, order: TuneOrder) -> None:
        most = self._runtime.engine.config.max_queue
        if order.users is not None and order.users > most:
            raise InvalidRequest(
                f"{order.users:,} users would fill the queue, which takes {most:,}, and others would be turned away",
                param="users",
            )

    def _with_slo(self, order: TuneOrder) -> TuneOrder:
        """With what the settings ask of latency, where the order leaves that open."""
        config = self._runtime.engine.config
        return msgspec.structs.replace(
            order, slo_ttft_s=order.slo_ttft_s or config.slo_ttft_s, slo_itl_s=order.slo_itl_s or config.slo_itl_s
        )

    async def _to_its_end(self, run: Run) -> None:
        state: TuningState = "failed"
        early = ""
        try:
            await run.to_its_end()
            state = "done"
        except asyncio.CancelledError:
            state, early = "cancelled", "Cancelled"
        except EngineError as error:
            early = error.message
        except Exception as error:
            early = f"it failed: {error!r}"
            raise
        finally:
            applied = run.tuner.applied
            self._report = msgspec.structs.replace(run.report(state), said=run.said(early), applied=applied)

    def _changed(self) -> None:
        if self._run is not None:
            self._report = self._run.report("running" if self._run.tuner.now is not None else "restoring")


async def mix_of_order(order: TuneOrder, serving: Serving) -> Mix | None:
    """The lengths that an order names, None where it names none. Raises InvalidRequest, its param the field."""
    if not order.trace:
        return asked_mix(order.prompt or None, order.output or None, order.seed)
    if order.prompt or order.output:
        raise InvalidRequest("a trace has lengths of its own: give it alone", param="trace")
    await asyncio.to_thread(check_trace, order.trace)
    exchanges = await asyncio.to_thread(read_trace, home_expanded(order.trace))
    return await traced_mix(exchanges, serving, order.seed)


async def traced_mix(exchanges: Sequence[Exchange], serving: Serving, seed: int) -> Mix:
    """Questions as a trace has them, in tokens of that model. Raises InvalidRequest where none fits."""
    material = TokenIds.of(serving.tokenizer, serving.model.vocab_size)
    return await asyncio.to_thread(mix_of_trace, exchanges, material, serving.model.max_model_len, seed)
