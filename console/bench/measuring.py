"""`ericllm bench latency|users|threads|...`: flags in; progress, a table and files out."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from console.bench.csv_file import csv_text
from console.bench.dialects import DIALECTS
from console.bench.engine_target import EngineTarget
from console.bench.flags import add_flags, plan_of
from console.bench.history import BenchHistory
from console.bench.http_target import HttpTarget
from console.bench.kinds import PLANS, Plan
from console.bench.kinds.base import plan_fits, refuse_server
from console.bench.news import BenchProgress
from console.bench.own_engine import engine_target, known_context
from console.bench.progress import Progress
from console.bench.result import BenchResult, write_result
from console.bench.run import run_bench
from console.bench.svg import plot
from console.bench.target import Target
from console.bench.text import progress_text, result_text, row_text
from console.bench.trace import read_trace
from console.cli import sources_of
from console.settings import APP_NAME, Settings, state_dir
from engine.errors import EngineError, InvalidRequest
from engine.files import replace_file
from engine.models.files import home_expanded
from engine.models.resolve import resolve
from engine.pauses import collect_rarely
from engine.text.tokenizer import Tokenizer

_SHOWN_EVERY_S = 0.2
INTERRUPTED = 130
_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def measure(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the bench that argv names first; returns 0, or 130 where ctrl+c ended it. Raises EngineError."""
    plan_type = PLANS[argv[0]]
    given, flags = _parse(argv[1:], parser, plan_type)
    plan = plan_of(plan_type, vars(given), quick=given.quick)
    settings = sources_of([*flags, *(("--model", given.model) if given.model else ())]).settings()
    _refuse_early(plan, settings, given.url)
    progress = Progress(sys.stderr)
    try:
        result = asyncio.run(_measured(plan, settings, given, progress))
    finally:
        progress.end()
    sys.stdout.write(f"{result_text(result, everything=given.everything)}\n")
    if given.json is not None:
        write_result(given.json, result)
    for file, text in ((given.csv, csv_text), (given.svg, plot)):
        if file is not None:
            _write(file, text(result))
    if given.history and result.rows:
        _remember(result)
    return 0 if result.complete else INTERRUPTED


def _refuse_early(plan: Plan, settings: Settings, url: str) -> None:
    """Raise EngineError for what cannot be measured, as far as that is known before a model is loaded, which may take
    minutes, or a server is asked."""
    plan.check()
    if trace := getattr(plan, "trace", ""):
        read_trace(home_expanded(trace))
    if url:
        refuse_server(plan)
    else:
        plan_fits(plan, known_context(settings))


async def _measured(plan: Plan, settings: Settings, given: argparse.Namespace, progress: Progress) -> BenchResult:
    async with _target(settings, given, progress.show) as target:
        collect_rarely()
        cancelled = asyncio.Event()
        loop = asyncio.get_running_loop()
        for ending in _ENDINGS:
            loop.add_signal_handler(ending, cancelled.set)
        try:
            shown = _Shown(progress, sys.stderr)
            result = await run_bench(plan, target, shown.show, cancelled.is_set, samples=given.samples)
            return _noted(result, target)
        finally:
            for ending in _ENDINGS:
                loop.remove_signal_handler(ending)


def _noted(result: BenchResult, target: Target) -> BenchResult:
    """With what must be known of the engine that was opened for it."""
    note = target.note if isinstance(target, EngineTarget) else ""
    return msgspec.structs.replace(result, notes=(note, *result.notes)) if note else result


@asynccontextmanager
async def _target(settings: Settings, given: argparse.Namespace, show: Callable[[str], None]) -> AsyncIterator[Target]:
    """The server at --url, else an engine with the model."""
    if not given.url:
        async with engine_target(settings, show) as engine:
            yield engine
        return
    tokenizer = None
    if given.tokenizer:
        tokenizer = await asyncio.to_thread(
            lambda: Tokenizer.from_folder(resolve(given.tokenizer, settings.models_dir))
        )
    async with HttpTarget(
        given.url, dialect=given.dialect, model=given.model, key=given.key, tokenizer=tokenizer
    ) as server:
        show(f"asking {given.url}")
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
            self._stream.write(f"{row_text(news)}\n")
        now_s, doing = time.monotonic(), f"{news.repeat} {news.doing}"
        if doing != self._said or (self._stream.isatty() and now_s - self._at_s >= _SHOWN_EVERY_S):
            self._at_s, self._said = now_s, doing
            self._progress.show(progress_text(news))


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}", param=file.suffix) from error


def _remember(result: BenchResult) -> None:
    """Keep it in the history; where that cannot be, the numbers are there all the same."""
    try:
        number = BenchHistory(state_dir()).add(result)
    except EngineError as error:
        sys.stderr.write(f"{APP_NAME}: {error.message}\n")
    else:
        sys.stderr.write(f"kept as number {number} ('{APP_NAME} bench history')\n")


def _parse(
    argv: Sequence[str], parser: argparse.ArgumentParser, plan: type[Plan]
) -> tuple[argparse.Namespace, list[str]]:
    """The bench's own flags, and those that are for loading the model."""
    parser.prog += f" {plan.name}"
    parser.description = f"Measure {plan.about}."
    parser.epilog = "Every flag of 'ericllm' for loading a model can be given too, --dtype and --num-workers say."
    parser.add_argument(
        "model_name",
        metavar="MODEL",
        nargs="?",
        default="",
        help="a folder, a hub id, demo, synthetic:7b, synthetic:7b-4.0bpw",
    )
    parser.add_argument("--model", default="", help="the same; with --url the name that the server knows it by")
    parser.add_argument("--url", default="", help="measure this server in place of an engine in this process")
    parser.add_argument("--dialect", default="openai", choices=DIALECTS, help="how --url is asked (default openai)")
    parser.add_argument("--key", default="", help="API key for --url")
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="with --url: a model here with its vocabulary, for exact prompts",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result for programs, every repeat of it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each row and repeat")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the first number of the table")
    parser.add_argument("--samples", action="store_true", help="the result has every request too")
    parser.add_argument(
        "--all", action="store_true", dest="everything", help="print all numbers: every mean, deviation and percentile"
    )
    parser.add_argument("--quick", action="store_true", help="a short look: fewer rows and requests, shorter answers")
    parser.add_argument(
        "--history", action=argparse.BooleanOptionalAction, default=True, help="remember the result (default)"
    )
    add_flags(parser.add_argument_group("what is measured"), plan)
    given, flags = parser.parse_known_args(argv)
    if given.model and given.model_name and given.model != given.model_name:
        parser.error(f"the model is given twice: {given.model_name} and {given.model}")
    given.model = given.model or given.model_name
    if not given.url and (given.key or given.tokenizer or given.dialect != "openai"):
        parser.error("--dialect, --key and --tokenizer are about a server; give its --url")
    if given.url and flags:
        parser.error(f"{flags[0]} is about loading a model here, and --url measures a server")
    return given, flags
