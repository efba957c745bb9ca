"""`ericllm bench latency|users|threads|...`: flags in; progress, a table and files out."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TextIO

import msgspec

from console.bench.command_line import Asked, asked_for
from console.bench.engine_target import EngineTarget
from console.bench.http_target import HttpTarget
from console.bench.keeping import refuse_unwritable, remember, write_files
from console.bench.kinds import PLANS
from console.bench.kinds.base import plan_fits, refuse_server
from console.bench.news import BenchProgress
from console.bench.own_engine import engine_target, known_context
from console.bench.progress import Progress, Showing
from console.bench.result import BenchResult
from console.bench.run import run_bench
from console.bench.target import Target
from console.bench.text import progress_text, result_text, row_text
from console.bench.trace import read_trace
from console.finding import Finding
from console.output import say, write
from console.settings import Settings, state_dir
from console.sources import Sources
from console.tuned import with_tuned
from engine.models.files import home_expanded
from engine.models.resolve import resolve
from engine.pauses import collect_rarely
from engine.text.printable import printable
from engine.text.tokenizer import Tokenizer

_SHOWN_EVERY_S = 0.2
FAILED = 1
INTERRUPTED = 130
_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def measure(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the bench that argv names first; returns 0, 1 where a file could not be written, or 130 where ctrl+c ended
    it. Raises EngineError."""
    asked = asked_for(argv[1:], parser, PLANS[argv[0]])
    sources = _with_tuned(asked)
    settings = sources.settings()
    _refuse_early(asked, settings)
    progress = Progress(sys.stderr)
    try:
        result = asyncio.run(_measured(asked, settings, sources.tuned, progress))
    except asyncio.CancelledError:
        progress.end()
        say("ended before anything was measured")
        return INTERRUPTED
    finally:
        progress.end()
    said = [remember(result)] if asked.history and result.rows else []  # first: whatever fails after it, it is kept
    failed = write_files(result, asked.files)
    for line in (*said, *failed):
        say(line)
    write(result_text(result, everything=asked.everything))
    if failed:
        return FAILED
    return 0 if result.complete else INTERRUPTED


def _with_tuned(asked: Asked) -> Sources:
    """The settings with what autotune found for the model here, as `ericllm` uses it; a server has its own."""
    return asked.sources if asked.url else with_tuned(asked.sources, asked.sources.settings(), state_dir())


def _refuse_early(asked: Asked, settings: Settings) -> None:
    """Raise EngineError for what cannot be measured or kept, as far as that is known before a model is loaded, which
    may take minutes, or a server is asked."""
    asked.plan.check()
    if trace := getattr(asked.plan, "trace", ""):
        read_trace(home_expanded(trace))
    refuse_unwritable(asked.files)
    if asked.url:
        refuse_server(asked.plan)
    else:
        plan_fits(asked.plan, known_context(settings))


async def _measured(asked: Asked, settings: Settings, tuned: Mapping[str, object], progress: Progress) -> BenchResult:
    stop = _Stop()
    with stop.heard():
        async with _target(asked, settings, progress.show) as target:
            stop.opening = False
            collect_rarely()
            shown = _Shown(progress, sys.stderr)
            result = await run_bench(asked.plan, target, shown.show, stop.is_asked, samples=asked.samples)
            return _noted(result, target, tuned)


class _Stop:
    """Ctrl+C, or a kind kill: while a target is opened, the end of that; later, of what is measured."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._asked = False
        self.opening = True

    def is_asked(self) -> bool:
        """Whether one came."""
        return self._asked

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While this is open."""
        loop = asyncio.get_running_loop()
        for ending in _ENDINGS:
            loop.add_signal_handler(ending, self._hear)
        try:
            yield
        finally:
            for ending in _ENDINGS:
                loop.remove_signal_handler(ending)

    def _hear(self) -> None:
        self._asked = True
        if self.opening and self._task is not None:
            self._task.cancel()


def _noted(result: BenchResult, target: Target, tuned: Mapping[str, object]) -> BenchResult:
    """With what must be known of the engine that was opened for it."""
    notes, settings = list(result.notes), dict(result.settings)
    if tuned:
        used = ", ".join(f"{name} {value}" for name, value in tuned.items())
        notes.insert(0, f"Settings that autotune found for this model here were used: {used}.")
        settings["tuned"] = list(tuned)
    if isinstance(target, EngineTarget) and target.note:
        notes.insert(0, target.note)
    return msgspec.structs.replace(result, notes=tuple(notes), settings=settings)


@asynccontextmanager
async def _target(asked: Asked, settings: Settings, show: Showing) -> AsyncIterator[Target]:
    """The server at --url, else an engine with the model."""
    if not asked.url:
        async with engine_target(settings, show) as engine:
            yield engine
        return
    tokenizer = None
    if asked.tokenizer:
        find = partial(resolve, asked.tokenizer, settings.models_dir)
        folder = await Finding(asked.tokenizer).by(lambda report, cancelled: find(report=report, cancelled=cancelled))
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
    async with HttpTarget(
        asked.url, dialect=asked.dialect, model=asked.model, key=asked.key, tokenizer=tokenizer
    ) as server:
        show(f"asking {asked.url}")
        yield server


class _Shown:
    """Progress on a terminal: a line that changes, and one that stays for each row."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress, self._stream = progress, stream
        self._at_s, self._said = 0.0, ""
        self._rows = 0

    def show(self, news: BenchProgress) -> None:
        """Say it, now and then."""
        done = sum(max(map(len, row.values.values()), default=0) for row in news.rows)
        if done > self._rows:
            self._rows = done
            self._progress.end()
            self._stream.write(f"{printable(row_text(news))}\n")
        now_s, doing = time.monotonic(), f"{news.repeat} {news.doing}"
        if doing != self._said or (self._stream.isatty() and now_s - self._at_s >= _SHOWN_EVERY_S):
            self._at_s, self._said = now_s, doing
            self._progress.show(progress_text(news))
