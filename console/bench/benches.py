"""Benches that a console has run: one at a time, as a task of its own, whoever watches it; and their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from console.bench.forms import forms, ordered
from console.bench.headline import headline, settings_text
from console.bench.history import BenchHistory, Kept
from console.bench.jobs import Job, job_for
from console.bench.news import BenchProgress
from console.bench.result import BenchResult, write_result
from console.links.benches import BenchEntry, BenchForm, BenchOrder, BenchReport, BenchState
from engine.engine import Engine
from engine.errors import EngineBusy, EngineError, InvalidRequest
from engine.tasks import detached

log = logging.getLogger(__name__)

FOLDER = "benches"
"""Of the state folder: every result of a console's bench, as JSON."""
MOST_LISTED = 500
PATIENCE_S = 2.0
"""What a bench gets to end by itself where the program ends."""


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
        return forms()

    # -- measuring ------------------------------------------------------------------------------------------------

    async def start(self, order: BenchOrder) -> None:
        """See BenchesLink.start."""
        self._refuse_if_busy()
        job = await job_for(order, ordered(order), self._engine)
        self._refuse_if_busy()
        self._stopping = False
        self._report = BenchReport(state="running", bench=job.name, model=job.model)
        self._task = detached(self._to_its_end(job))

    async def cancel(self) -> None:
        """See BenchesLink.cancel."""
        if self._task is not None and not self._task.done():
            self._stop()
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """End it because the program ends: what waits for a worker is not waited for."""
        if self._task is not None and not self._task.done():
            self._stop()
            await asyncio.wait((self._task,), timeout=PATIENCE_S)
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=PATIENCE_S)

    async def finished(self) -> None:
        """Wait for the end of the one under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _stop(self) -> None:
        self._stopping = True
        self._report = msgspec.structs.replace(self._report, state="stopping")

    def _refuse_if_busy(self) -> None:
        if self._report.under_way:
            raise EngineBusy(f"bench {self._report.bench} goes on already; cancel that first", state="bench")
        if self._tuning():
            raise EngineBusy("settings are being tried to find the best; cancel that first", state="tuning")

    async def _to_its_end(self, job: Job) -> None:
        state: BenchState = "failed"
        said, number = "It failed; the log says how.", 0
        try:
            result = await job.run(self._tell, lambda: self._stopping)
            state, said, number = await self._ended(result)
        except EngineError as error:
            said = error.message
        except Exception:
            log.exception("bench %s failed", job.name)
        finally:
            self._report = msgspec.structs.replace(self._report, state=state, said=said, number=number)

    def _tell(self, progress: BenchProgress) -> None:
        self._report = msgspec.structs.replace(self._report, progress=progress)

    async def _ended(self, result: BenchResult) -> tuple[BenchState, str, int]:
        if not result.rows:
            return "cancelled", "Cancelled before the first row was measured.", 0
        try:
            number = await asyncio.to_thread(self._keep, result)
            kept = f"kept as number {number}" if number else "not remembered, as there is no state folder"
        except EngineError as error:
            number, kept = 0, error.message
        if result.complete:
            return "done", f"{headline(result)}; {kept}.", number
        why = "Cancelled" if self._stopping else "It ended early"
        return "cancelled", f"{why}: what was measured by then is {kept}.", number

    def _keep(self, result: BenchResult) -> int:
        """Remember it, and write it for programs; its number, 0 where there is no folder for it."""
        if self._folder is None:
            return 0
        number = BenchHistory(self._folder).add(result)
        write_result(_file(self._folder, result), result)
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
            raise InvalidRequest("there is no state folder, so nothing is remembered", param="number")
        return BenchHistory(self._folder)

    def _listed(self) -> Sequence[BenchEntry]:
        if self._folder is None:
            return ()
        history = self._history
        return [self._entry(history, kept) for kept in history.results(limit=MOST_LISTED)]

    def _entry(self, history: BenchHistory, kept: Kept) -> BenchEntry:
        """Read once: a result never changes."""
        key = kept.id, kept.started
        if key not in self._entries:
            self._entries[key] = _entry(history, kept)
        return self._entries[key]

    def _forget(self, number: int) -> None:
        history = self._history
        result = history.result(number)
        history.remove(number)
        if self._folder is not None:
            _file(self._folder, result).unlink(missing_ok=True)


def _entry(history: BenchHistory, kept: Kept) -> BenchEntry:
    try:
        result = history.result(kept.id)
        found, settings = headline(result), settings_text(result)
    except InvalidRequest as error:
        found, settings = "cannot be read", error.message
    return BenchEntry(
        id=kept.id,
        bench=kept.name,
        started=kept.started,
        duration_s=kept.duration_s,
        model=kept.model,
        target=kept.target,
        complete=kept.complete,
        headline=found,
        settings=settings,
    )


def _file(folder: Path, result: BenchResult) -> Path:
    """`benches/20260301-123000-users.json`."""
    moment = "".join(each for each in result.started[:19] if each.isdigit())
    return folder / FOLDER / f"{moment[:8]}-{moment[8:]}-{result.name}.json"
