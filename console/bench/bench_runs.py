"""Benches that consoles run: one at a time, as a task of its own; and their results."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from console.bench.comparison import headline, settings_text
from console.bench.engine_target import EngineTarget
from console.bench.history import BenchHistory, Kept
from console.bench.http_target import HttpTarget
from console.bench.kinds import PLANS, Plan
from console.bench.kinds.base import BenchPart
from console.bench.kinds.threads import Threads
from console.bench.measure import BenchContext, check_fits
from console.bench.plan_fields import form_of, plan_from
from console.bench.result import BenchProgress, BenchResult, encode_result, write_file
from console.bench.run import Report, run_bench
from console.bench.target import Target
from console.bench.workload import Mix
from console.link.benches import BenchEntry, BenchForm, BenchOrder, BenchReport, BenchServer, BenchState
from console.runtime.loops import LoopThread
from engine.engine import Engine
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.models.files import home_expanded
from engine.system.tasks import run_detached

log = logging.getLogger(__name__)

FOLDER = "benches"
"""Of the state folder: every result of a console's bench, as JSON."""
MAX_LISTED = 500
_PATIENCE_S = 2.0
"""What a bench gets to end by itself where the program ends."""
_LETTERS_PER_TOKEN = 3
"""Of a trace's prompts, at least: to count them exactly takes as long as to make them."""
MAX_TOKENS = 500_000
"""Of the prompts of one row: they are made on the engine's loop, which serves no other client meanwhile."""
MAX_TRACE_BYTES = 64 << 20
"""Of a trace's file, as reading a larger one would delay other clients."""


def plan_of_order(order: BenchOrder) -> Plan:
    """The plan of an order. Raises InvalidRequest, its param the setting."""
    if order.bench not in PLANS:
        raise InvalidRequest(f"there is no benchmark {order.bench}; available: {', '.join(PLANS)}", param="bench")
    plan = PLANS[order.bench]
    if refused := plan.no_serving if order.server is None else plan.no_server:
        raise InvalidRequest(f"{refused}.", param="bench")
    for name in order.settings:
        if name not in plan.form:
            raise InvalidRequest(f"{name} of benchmark {order.bench} is for the command line only", param=name)
    return plan_from(plan, order.settings, quick=order.quick)


def check_size(plan: Plan, parts: Sequence[BenchPart], prompt_tokens: int, max_queue: int) -> None:
    """Raise InvalidRequest where other clients could not be served meanwhile. prompt_tokens: max of one request."""
    concurrent = plan.max_concurrent_requests
    if concurrent > max_queue:
        raise InvalidRequest(
            f"{concurrent:,} concurrent requests exceed the queue limit ({max_queue:,}), and other clients would "
            "be refused; use fewer, or raise max_queue",
            param="requests",
        )
    tokens = max((part.requests for part in parts), default=0) * prompt_tokens
    if tokens > MAX_TOKENS:
        raise InvalidRequest(
            f"a row has {tokens:,} prompt tokens; more than {MAX_TOKENS:,} would delay other clients: "
            "use fewer, or the command line",
            param="requests",
        )


def check_trace(path: str) -> None:
    """Raise InvalidRequest for a file that cannot be read while others are served; a missing one is found later."""
    file = home_expanded(path)
    try:
        status = file.stat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"{file} is not a file", param="trace")
    if status.st_size > MAX_TRACE_BYTES:
        raise InvalidRequest(
            f"{file} has {status.st_size >> 20:,} MiB; more than {MAX_TRACE_BYTES >> 20} would delay other "
            "clients: use a part of it, or the command line",
            param="trace",
        )


Job = Callable[[Report, Callable[[], bool]], Awaitable[BenchResult]]
"""A bench that can begin: reports how far it is, and ends early where it is cancelled. Raises EngineError."""


async def job_for(order: BenchOrder, plan: Plan, engine: Engine) -> tuple[str, Job]:
    """Return the job of an order, and the name of its model, or its server's address while that is not known. Raises
    EngineError where it cannot run, or a server does not answer."""
    plan.check()
    if trace := getattr(plan, "trace", ""):
        await asyncio.to_thread(check_trace, trace)
    if order.server is not None:
        return await _server_job(order.server, plan)
    return await _engine_job(order.model, plan, engine)


async def _engine_job(model: str, plan: Plan, engine: Engine) -> tuple[str, Job]:
    """The job of the engine that serves others, too, with a note of what they asked meanwhile."""
    serving = await engine.serving(model)
    target = EngineTarget(engine, model=serving.name, fresh=True)
    if isinstance(plan, Threads):
        plan = msgspec.structs.replace(plan, guessed=(target.draft_tokens,))
    parts, mix = plan.parts(target), await _mix(plan, target)
    check_fits(target, mix)
    check_size(plan, parts, _prompt_tokens(mix), engine.config.max_queue)
    before = engine.totals().requests

    async def job(report: Report, cancelled: Callable[[], bool]) -> BenchResult:
        result = await run_bench(plan, target, report, cancelled)
        return _with_note(result, engine.totals().requests - before - target.sent)

    return serving.name, job


async def _server_job(server: BenchServer, plan: Plan) -> tuple[str, Job]:
    """The job of a server. Its clients have a thread of their own: neither they nor the engine wait for the other."""
    async with _target(server) as target:
        plan.parts(target)
        await _mix(plan, target)
        await target.greet()
        model = target.info.model or server.url

    async def measured(report: Report, cancelled: Callable[[], bool]) -> BenchResult:
        async with _target(server) as target:
            return await run_bench(plan, target, report, cancelled)

    async def job(report: Report, cancelled: Callable[[], bool]) -> BenchResult:
        clients = LoopThread("bench")
        try:
            return await asyncio.wrap_future(clients.submit(measured(report, cancelled)))
        finally:
            await asyncio.to_thread(clients.stop)

    return model, job


def _target(server: BenchServer) -> HttpTarget:
    return HttpTarget(server.url, dialect=server.dialect, model=server.model, key=server.key)


async def _mix(plan: Plan, target: Target) -> Mix:
    context = BenchContext(target, plan.seed)
    await plan.prepare(context)
    return plan.mix(context)


def _prompt_tokens(mix: Mix) -> int:
    """Of one request: at most, or on average where a trace says."""
    shared = mix.prefix.tokens if mix.prefix else 0
    if mix.prompt.most is not None:
        return shared + mix.prompt.most
    return shared + sum(len(each.asked) for each in mix.trace) // (_LETTERS_PER_TOKEN * len(mix.trace))


def _with_note(result: BenchResult, others: int) -> BenchResult:
    if others <= 0:
        return result
    asked = "1 other request ran" if others == 1 else f"{others:,} other requests ran"
    return msgspec.structs.replace(
        result,
        notes=(
            *result.notes,
            f"{asked} during the benchmark and {'is' if others == 1 else 'are'} included in the results.",
        ),
    )


class Benches:
    """Of one engine; on its loop, but for `report`, which any thread may call.

    folder: where results are kept, None keeps none.  tuning: whether settings are being tried, which a bench would
    disturb.
    """

    def __init__(self, engine: Engine, folder: Path | None, tuning: Callable[[], bool]) -> None:
        self._engine = engine
        self._folder = folder
        self._tuning = tuning
        self._report = BenchReport()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._entries: dict[tuple[int, str], BenchEntry] = {}

    def report(self) -> BenchReport:
        """How the last one goes or went."""
        return self._report

    async def forms(self) -> Sequence[BenchForm]:
        """See BenchesLink.forms."""
        return [form_of(plan) for plan in PLANS.values()]

    # -- measuring ------------------------------------------------------------------------------------------------

    async def start(self, order: BenchOrder) -> None:
        """See BenchesLink.start."""
        self._refuse_if_busy()
        model, job = await job_for(order, plan_of_order(order), self._engine)
        self._refuse_if_busy()
        self._stopping = False
        self._report = BenchReport(state="running", bench=order.bench, model=model)
        self._task = run_detached(self._run_to_completion(job))

    async def cancel(self) -> None:
        """See BenchesLink.cancel."""
        if self._task is not None and not self._task.done():
            self._stop()
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """End it because the program ends: what waits for a worker is not waited for."""
        if self._task is not None and not self._task.done():
            self._stop()
            await asyncio.wait((self._task,), timeout=_PATIENCE_S)
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_PATIENCE_S)

    async def finished(self) -> None:
        """Wait for the end of the one under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _stop(self) -> None:
        self._stopping = True
        self._report = msgspec.structs.replace(self._report, state="stopping")

    def _refuse_if_busy(self) -> None:
        if self._report.under_way:
            raise EngineBusy(f"Benchmark {self._report.bench} is already running. Cancel it first.", state="bench")
        if self._tuning():
            raise EngineBusy("Autotune is running. Cancel it first.", state="tuning")

    async def _run_to_completion(self, job: Job) -> None:
        state: BenchState = "failed"
        outcome, number = "Failed; see the log.", 0
        try:
            result = await job(self._set_progress, lambda: self._stopping)
            state, outcome, number = await self._ended(result)
        except EngineError as error:
            outcome = error.message
        except Exception:
            log.exception("bench %s failed", self._report.bench)
        finally:
            self._report = msgspec.structs.replace(self._report, state=state, outcome=outcome, number=number)

    def _set_progress(self, progress: BenchProgress) -> None:
        self._report = msgspec.structs.replace(self._report, progress=progress)

    async def _ended(self, result: BenchResult) -> tuple[BenchState, str, int]:
        if not result.rows:
            return "cancelled", "Cancelled before the first row was measured.", 0
        try:
            number = await asyncio.to_thread(self._keep, result)
            saved = f"saved as #{number}" if number else "not saved: there is no state folder"
        except EngineError as error:
            number, saved = 0, error.message
        if result.complete:
            return "done", f"{headline(result)}; {saved}.", number
        why = "Cancelled" if self._stopping else "Ended early"
        return "cancelled", f"{why}: the results until then are {saved}.", number

    def _keep(self, result: BenchResult) -> int:
        """Remember it, and write it for programs; its number, 0 where there is no folder for it."""
        if self._folder is None:
            return 0
        number = BenchHistory(self._folder).add(result)
        write_file(_file(self._folder, result), encode_result(result), "json")
        return number

    # -- results --------------------------------------------------------------------------------------------------

    async def history(self) -> Sequence[BenchEntry]:
        """See BenchesLink.history."""
        return await asyncio.to_thread(self._listed)

    async def result(self, number: int) -> BenchResult:
        """See BenchesLink.result."""
        return await asyncio.to_thread(self._history.result, number)

    async def forget(self, number: int) -> None:
        """See BenchesLink.forget."""
        await asyncio.to_thread(self._forget, number)

    @property
    def _history(self) -> BenchHistory:
        if self._folder is None:
            raise InvalidRequest("there is no state folder, so nothing is saved", param="number")
        return BenchHistory(self._folder)

    def _listed(self) -> Sequence[BenchEntry]:
        if self._folder is None:
            return ()
        history = self._history
        return [self._entry(history, result) for result in history.results(limit=MAX_LISTED)]

    def _entry(self, history: BenchHistory, result: Kept) -> BenchEntry:
        """Read once: a result never changes."""
        key = result.id, result.started
        if key not in self._entries:
            self._entries[key] = _entry(history, result)
        return self._entries[key]

    def _forget(self, number: int) -> None:
        history = self._history
        result = history.result(number)
        history.remove(number)
        if self._folder is not None:
            _file(self._folder, result).unlink(missing_ok=True)


def _entry(history: BenchHistory, stored: Kept) -> BenchEntry:
    try:
        result = history.result(stored.id)
        found, settings = headline(result), settings_text(result)
    except InvalidRequest as error:
        found, settings = "cannot be read", error.message
    return BenchEntry(
        id=stored.id,
        bench=stored.name,
        started=stored.started,
        duration_s=stored.duration_s,
        model=stored.model,
        target=stored.target,
        complete=stored.complete,
        headline=found,
        settings=settings,
    )


def _file(folder: Path, result: BenchResult) -> Path:
    """`benches/20260301-123000-users.json`."""
    moment = "".join(each for each in result.started[:19] if each.isdigit())
    return folder / FOLDER / f"{moment[:8]}-{moment[8:]}-{result.name}.json"
