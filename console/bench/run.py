"""Runs a bench on a target: every part as often as there are repeats, by turns, with news as it goes on."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import TypeVar

import msgspec
import psutil

from console.bench.kinds.base import BenchPart, Plan, SkipPart, refuse_server
from console.bench.measure import BenchContext, Record
from console.bench.result import (
    BenchProgress,
    BenchResult,
    DeviceInfo,
    MachineInfo,
    Row,
    Sample,
    TargetInfo,
    Versions,
    merge_rows,
)
from console.bench.target import EngineHere, Target
from engine.devices import MachineProbe, cpu_name, usable_cores
from engine.errors import EngineError

# The machine and the software of a bench.


def this_machine() -> MachineInfo:
    """This machine."""
    return MachineInfo(
        cpu=cpu_name(),
        cores=usable_cores(),
        ram_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        devices=tuple(
            DeviceInfo(id=device.id, name=device.name, kind=device.kind, total_bytes=device.total_bytes)
            for device in MachineProbe().read()
            if device.kind != "cpu"
        ),
    )


def these_versions() -> Versions:
    """Versions of installed packages, without an import of torch."""
    return Versions(ericllm=_version("ericllm"), python=platform.python_version(), torch=_version("torch"))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


Report = Callable[[BenchProgress], None]
_T = TypeVar("_T")
_REASONS = 3
"""Maximum of reported reasons of failed requests."""
_POLL_S = 0.05


class BenchCancelled(Exception):
    """The bench was cancelled."""


async def unless_cancelled(work: Awaitable[_T], cancelled: Callable[[], bool]) -> _T:
    """Return its result; where the bench is cancelled meanwhile, cancel it and raise BenchCancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_S)
            if cancelled():
                raise BenchCancelled
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return task.result()


async def run_bench(
    plan: Plan,
    target: Target,
    report: Report = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    samples: bool = False,
) -> BenchResult:
    """Measure; a bench that is cancelled, or whose target fails after the first row, gives what it has by then.

    samples: whether the result has every request.  Raises InvalidRequest for a plan that the target cannot take, and
    EngineError where nothing could be measured.
    """
    running = _Running(plan, target, report, cancelled, samples)
    here = target if isinstance(target, EngineHere) else None
    before = here.knobs if here else None
    try:
        await running.go()
    finally:
        if here is not None and before is not None:
            await running.restore_knobs(here, before)
    return running.result()


class _Running:
    """A bench under way."""

    def __init__(
        self, plan: Plan, target: Target, report: Report, cancelled: Callable[[], bool], samples: bool
    ) -> None:
        self._plan, self._target, self._report, self._cancelled = plan, target, report, cancelled
        plan.check()
        if not isinstance(target, EngineHere):
            refuse_server(plan)
        self._parts = plan.parts(target)
        self._info, self._settings = target.info, dict(target.settings)
        self._keeps = samples
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._began_s = self._counted_s = time.perf_counter()
        self._notes: dict[str, None] = {}
        self._rows: tuple[Row, ...] = ()
        self._skipped: set[int] = set()
        self._samples: list[Sample] = []
        self._records: list[Record] = []
        self._short = self._answered = 0
        self._failed: Counter[str] = Counter()
        self._repeat = self._at = self._done = 0
        self._doing = "warming up"
        self._complete = True

    async def go(self) -> None:
        """Measure all. Raises EngineError where there is nothing to show for it."""
        context = BenchContext(self._target, self._plan.seed, note=self._note, done=self._ended)
        try:
            self._report_progress()
            await self._unless_cancelled(self._plan.prepare(context))
            await self._unless_cancelled(self._plan.warm(context))
            self._begin_to_count()
            for repeat in range(self._plan.repeats):
                for number, part in enumerate(self._parts):
                    if number not in self._skipped:
                        self._repeat, self._at = repeat, number
                        await self._measure(part, context)
        except BenchCancelled:
            self._complete = False
        except EngineError as error:
            if not self._rows:
                raise
            self._complete = False
            self._note(f"Ended early: {error.message}")

    async def restore_knobs(self, here: EngineHere, knobs: tuple[int, int]) -> None:
        """Set the knobs as they were; who is cancelled does not wait until it is so, nor is a result lost for it."""
        try:
            if here.knobs != knobs:
                await self._unless_cancelled(here.set_knobs(workers=knobs[0], max_prompts=knobs[1]))
        except BenchCancelled:
            pass  # they are set by then: what takes its time is to wait for workers
        except EngineError as error:
            self._note(f"The settings were not restored: {error.message}")

    async def _unless_cancelled(self, work: Awaitable[_T]) -> _T:
        """Whatever it waits for: workers that drain, loads, answers."""
        return await unless_cancelled(work, self._cancelled)

    async def _measure(self, part: BenchPart, context: BenchContext) -> None:
        self._doing = part.title
        self._records.clear()
        self._report_progress()
        context.begin(self._repeat, self._at)
        try:
            values = await self._unless_cancelled(self._plan.measure(part, context))
        except SkipPart as reason:
            self._skipped.add(self._at)
            self._note(str(reason))
            return
        new = Row(keys=part.keys, values={name: [value] for name, value in values.items()})
        self._rows = merge_rows([*self._rows, new])
        if self._keeps:
            at = [row.keys for row in self._rows].index(part.keys)
            self._samples += [_sample(record, at, self._repeat) for record in self._records]
        self._report_progress()

    def _begin_to_count(self) -> None:
        self._counted_s, self._done = time.perf_counter(), 0
        self._short = self._answered = 0
        self._failed.clear()

    def _ended(self, record: Record | None) -> None:
        self._done += 1
        if record is not None:
            self._records.append(record)
            if record.error:
                self._failed[record.error] += 1
            else:
                self._answered += 1
                self._short += record.output_tokens != record.item.output_tokens
        self._report_progress()

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _report_progress(self) -> None:
        self._report(
            BenchProgress(
                bench=self._plan.name,
                doing=self._doing,
                repeat=self._repeat,
                repeats=self._plan.repeats,
                done=self._done,
                total=self._plan.repeats * sum(part.requests for part in self._parts),
                elapsed_s=time.perf_counter() - self._began_s,
                left_s=self._left_s(),
                keys=self._plan.keys,
                columns=self._plan.columns,
                rows=self._rows,
            )
        )

    def _left_s(self) -> float | None:
        """By how long requests took so far; parts that have a pace of their own take that at least."""
        if not self._done or self._doing == "warming up":
            return None
        each_s = (time.perf_counter() - self._counted_s) / self._done
        order = [*self._parts] * self._plan.repeats
        at = self._repeat * len(self._parts) + self._at
        here = sum(part.requests for part in order[: at + 1]) - self._done
        return max(0, here) * each_s + sum(max(part.requests * each_s, part.least_s) for part in order[at + 1 :])

    def result(self) -> BenchResult:
        """The result so far."""
        return BenchResult(
            name=self._plan.name,
            started=self._started,
            duration_s=time.perf_counter() - self._began_s,
            complete=self._complete,
            machine=this_machine(),
            versions=these_versions(),
            target=self._observed(),
            settings={**self._settings, **self._plan.settings()},
            seeds=[self._plan.seed],
            keys=self._plan.keys,
            columns=self._plan.columns,
            rows=self._rows,
            published=self._plan.published,
            notes=(*self._notes, *self._about_counts()),
            samples=tuple(self._samples),
        )

    def _observed(self) -> TargetInfo:
        """The target as it turned out."""
        info = self._target.info if self._info.kind == "http" else self._info
        return msgspec.structs.replace(info, forces_length=not self._short)

    def _about_counts(self) -> Sequence[str]:
        notes = []
        if self._failed:
            notes.append(failures_text(self._failed, self._answered))
        if self._short:
            notes.append(
                f"{self._short} of {self._answered} answers had other lengths than requested, as the server ended "
                "them: compare rates, not times."
            )
        if self._observed().counted_by == "chunks":
            notes.append("The server reports no token counts; each chunk counts as one token.")
        return notes


def failures_text(reasons: Counter[str], answered: int) -> str:
    """How many requests failed, and why: the most frequent reasons."""
    failed, common = reasons.total(), reasons.most_common(_REASONS)
    why = [f"{reason.rstrip('.')}{f' ({count})' if len(reasons) > 1 else ''}" for reason, count in common]
    if others := failed - sum(count for _, count in common):
        why.append(f"other reasons ({others})")
    return f"{failed} of {failed + answered} requests failed: {'; '.join(why)}."


def _sample(record: Record, row: int, repeat: int) -> Sample:
    return Sample(
        row=row,
        repeat=repeat,
        sent_s=record.sent_s,
        end_s=record.end_s,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        token_s=[at_s for at_s, tokens in record.chunks for _ in range(tokens)],
        error=record.error,
    )
