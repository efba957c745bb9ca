"""`ericllm bench latency|users|threads|...`: flags in; progress, a table and files out."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from console.bench.dialects import DIALECTS
from console.bench.engine_target import EngineTarget
from console.bench.export import csv_text, plot
from console.bench.history import BenchHistory
from console.bench.http_target import HttpTarget
from console.bench.kinds import PLANS, Plan
from console.bench.kinds.base import plan_fits, refuse_server
from console.bench.own_engine import engine_target, known_context
from console.bench.plan_fields import add_flags, plan_of
from console.bench.progress import Progress, Showing
from console.bench.result import BenchProgress, BenchResult, encode_result
from console.bench.run import run_bench
from console.bench.target import Target
from console.bench.text import progress_text, result_text, row_text
from console.bench.workload import read_trace
from console.runtime.loading import ModelLookup
from console.runtime.output import say, write
from console.settings.schema import APP_NAME, Settings, flag_of, state_dir
from console.settings.secrets import read_secret
from console.settings.sources import Sources, add_settings, flag_name, no_such_flag
from console.tuning.profiles import with_tuned
from engine.errors import EngineError, InvalidRequest
from engine.models.files import home_expanded
from engine.models.resolve import resolve
from engine.system.files import replace_file
from engine.system.tasks import reduce_gc_pauses
from engine.text.printable import printable
from engine.text.tokenizer import Tokenizer

# Where the result of a bench goes: into the history, and into files of several kinds.

_WRITTEN: Mapping[str, Callable[[BenchResult], bytes]] = {
    "json": encode_result,
    "csv": lambda result: csv_text(result).encode(),
    "svg": lambda result: plot(result).encode(),
}
"""What a file of each kind holds."""


def refuse_unwritable(files: Mapping[str, Path]) -> None:
    """Raise InvalidRequest where one of them could not be written, as far as that is known before there is a result."""
    for kind, file in files.items():
        if why := _why_unwritable(file):
            raise InvalidRequest(f"{file} cannot be written: {why}", param=kind)


def _why_unwritable(file: Path) -> str:
    """ "" where nothing is known against it; folders that are not there are made."""
    try:
        if file.is_dir():
            return "it is a folder"
        folder = next(each for each in file.absolute().parents if each.exists())
        if not folder.is_dir():
            return f"{folder} is not a folder"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write to {folder}"


def save_to_history(result: BenchResult) -> str:
    """Keep it in the user's history; what came of that, as a sentence."""
    try:
        return f"saved as #{BenchHistory(state_dir()).add(result)} ('{APP_NAME} bench history')"
    except EngineError as error:
        return f"{APP_NAME}: {error.message}"


def write_files(result: BenchResult, files: Mapping[str, Path]) -> Sequence[str]:
    """Write them, each whatever became of the others; why some could not be, as sentences."""
    failed = []
    for kind, file in files.items():
        try:
            replace_file(file, _WRITTEN[kind](result))
        except OSError as error:
            failed.append(f"{file} cannot be written: {error.strerror or error}")
        except EngineError as error:
            failed.append(f"{file} was not written: {error.message}")
    return failed


# What `ericllm bench latency` and its kin are asked for on the command line.

_OF_SERVING = frozenset(
    {
        *("timeout", "drain_seconds", "idle_unload", "show_prompts"),
        *("slo_ttft", "slo_itl", "energy_rate", "energy_currency"),
    }
)
"""Settings of the engine that say nothing of how a model is loaded and computed."""

LOADING = frozenset(
    name for name in Settings.model_fields if flag_of(name).group in ("Model", "Engine") and name not in _OF_SERVING
)
"""The settings that a bench takes besides its own: those for loading a model."""

FILES = ("json", "csv", "svg")
"""The kinds of file that a result is written as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments:
    """One bench, as it was asked for. sources: of the settings that the model is loaded by.

    url: of the server to be measured, "" for an engine here.  dialect, key, tokenizer: of a server.
    model: by its name here or there, "" where none was given.  files: where the result is written, by its kind.
    samples: whether it has every request.  everything: whether all its numbers are printed.
    history: whether it is remembered.
    """

    plan: Plan
    sources: Sources
    url: str
    dialect: str
    model: str
    key: str
    tokenizer: str
    files: Mapping[str, Path]
    samples: bool
    everything: bool
    history: bool


def parse_arguments(argv: Sequence[str], parser: argparse.ArgumentParser, plan: type[Plan]) -> BenchArguments:
    """Parse the flags of a bench; a wrong one ends the program with one line. Raises InvalidRequest."""
    _describe(parser, plan)
    _add_own(parser)
    add_flags(parser.add_argument_group("bench"), plan)
    loading = LOADING - {"model", *plan.__struct_fields__}
    add_settings(parser, loading)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown(unknown, parser, plan))
    flags = {name: value for name, value in vars(given).items() if name in loading}
    _refuse_crossed(parser, given, flags)
    model = given.model or given.model_name
    return BenchArguments(
        plan=plan_of(plan, vars(given), quick=given.quick),
        sources=Sources.read({**flags, **({"model": model} if model else {})}),
        url=given.url,
        dialect=given.dialect,
        model=model,
        key=given.key or (read_secret(given.key_file, "--key-file") if given.key_file else ""),
        tokenizer=given.tokenizer,
        files={kind: file for kind in FILES if (file := getattr(given, kind)) is not None},
        samples=given.samples,
        everything=given.everything,
        history=given.history,
    )


def _describe(parser: argparse.ArgumentParser, plan: type[Plan]) -> None:
    parser.prog += f" {plan.name}"
    parser.description = f"Measure {plan.about}."
    parser.epilog = "Load options are those of 'ericllm'; ERICLLM_* and config.toml apply, too."


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every bench."""
    add = parser.add_argument
    add("model_name", metavar="MODEL", nargs="?", default="", help="model folder, hub id, or demo")
    add("--model", default="", metavar="NAME", help="same as MODEL; with --url the model name on the server")
    add("--url", default="", metavar="URL", help="measure this server instead of loading a model here")
    add("--dialect", default="openai", choices=DIALECTS, help="API dialect of --url (default openai)")
    add("--key-file", type=Path, metavar="FILE", help="file whose first line is the API key for --url")
    add("--key", default="", metavar="KEY", help="API key for --url; visible to other users of this machine")
    add(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="with --url: local model with the same tokenizer, to count tokens",
    )
    add("--json", type=Path, metavar="FILE", help="write the result as JSON, with every repeat")
    add("--csv", type=Path, metavar="FILE", help="write the result as CSV, one line per row and repeat")
    add("--svg", type=Path, metavar="FILE", help="draw the first number of the table as SVG")
    add("--samples", action="store_true", help="include every request in the JSON")
    add(
        "--all",
        action="store_true",
        dest="everything",
        help="print all numbers, with means, deviations and percentiles",
    )
    add("--quick", action="store_true", help="quick run: fewer rows and requests, shorter answers")
    add(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="save the result to the history (default)",
    )


def _unknown(unknown: Sequence[str], parser: argparse.ArgumentParser, plan: type[Plan]) -> str:
    """Why the first of them is none."""
    flag = next((each.partition("=")[0] for each in unknown if each.startswith("-")), "")
    if not flag:
        return f"unexpected argument {unknown[0]}: only one model"
    if any(flag in (flag_name(name), flag_name(f"no_{name}")) for name in Settings.model_fields):
        return f"{flag} is not a load option and is not accepted by 'bench {plan.name}'"
    return no_such_flag(flag, [each for action in parser._actions for each in action.option_strings])


def _refuse_crossed(parser: argparse.ArgumentParser, given: argparse.Namespace, flags: Mapping[str, Any]) -> None:
    """End the program for flags that do not go together."""
    if given.model and given.model_name and given.model != given.model_name:
        parser.error(f"the model is given twice: {given.model_name} and {given.model}")
    if given.key and given.key_file:
        parser.error("give only one of --key and --key-file")
    if not given.url and (given.key or given.key_file or given.tokenizer or given.dialect != "openai"):
        parser.error("--dialect, --key, --key-file and --tokenizer need --url")
    if given.url and flags:
        parser.error(f"{flag_name(next(iter(flags)))} is a load option, which --url excludes")


_SHOWN_EVERY_S = 0.2
FAILED = 1
INTERRUPTED = 130
_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def measure(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the bench that argv names first; returns 0, 1 where a file could not be written, or 130 where ctrl+c ended
    it. Raises EngineError."""
    asked = parse_arguments(argv[1:], parser, PLANS[argv[0]])
    sources = _with_tuned(asked)
    settings = sources.settings()
    _refuse_early(asked, settings)
    progress = Progress(sys.stderr)
    try:
        result = asyncio.run(_measured(asked, sources, settings, progress))
    except asyncio.CancelledError:
        progress.end()
        say("cancelled before the first result")
        return INTERRUPTED
    finally:
        progress.end()
    notes = (
        [save_to_history(result)] if asked.history and result.rows else []
    )  # first: whatever fails after it, it is kept
    failed = write_files(result, asked.files)
    for line in (*notes, *failed):
        say(line)
    write(result_text(result, everything=asked.everything))
    if failed:
        return FAILED
    return 0 if result.complete else INTERRUPTED


def _with_tuned(asked: BenchArguments) -> Sources:
    """The settings with what autotune found for the model here, as `ericllm` uses it; a server has its own."""
    return asked.sources if asked.url else with_tuned(asked.sources, asked.sources.settings(), state_dir())


def _refuse_early(asked: BenchArguments, settings: Settings) -> None:
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


async def _measured(asked: BenchArguments, sources: Sources, settings: Settings, progress: Progress) -> BenchResult:
    stop = _Stop()
    with stop.heard():
        async with _target(asked, sources, settings, progress.show) as target:
            stop.opening = False
            reduce_gc_pauses()
            shown = _Shown(progress, sys.stderr)
            result = await run_bench(asked.plan, target, shown.show, stop.is_asked, samples=asked.samples)
            return _noted(result, target, sources.tuned)


class _Stop:
    """Ctrl+C, or a kind kill: while a target is opened, the end of that; later, of what is measured."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._asked = False
        self.opening = True

    def is_asked(self) -> bool:
        """Return whether a signal arrived."""
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
        notes.insert(0, f"Used the settings of autotune for this model: {used}.")
        settings["tuned"] = list(tuned)
    if isinstance(target, EngineTarget) and target.note:
        notes.insert(0, target.note)
    return msgspec.structs.replace(result, notes=tuple(notes), settings=settings)


@asynccontextmanager
async def _target(asked: BenchArguments, sources: Sources, settings: Settings, show: Showing) -> AsyncIterator[Target]:
    """The server at --url, else an engine with the model."""
    if not asked.url:
        async with engine_target(settings, show, library_prompts=sources.library_prompts) as engine:
            yield engine
        return
    tokenizer = None
    if asked.tokenizer:
        find = partial(resolve, asked.tokenizer, settings.models_dir)
        folder = await ModelLookup(asked.tokenizer).by(
            lambda report, cancelled: find(report=report, cancelled=cancelled)
        )
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
    async with HttpTarget(
        asked.url, dialect=asked.dialect, model=asked.model, key=asked.key, tokenizer=tokenizer
    ) as server:
        show(f"connecting to {asked.url}")
        yield server


class _Shown:
    """Progress on a terminal: a line that changes, and one that stays for each row."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress, self._stream = progress, stream
        self._at_s, self._text = 0.0, ""
        self._rows = 0

    def show(self, news: BenchProgress) -> None:
        """Say it, now and then."""
        done = sum(max(map(len, row.values.values()), default=0) for row in news.rows)
        if done > self._rows:
            self._rows = done
            self._progress.end()
            self._stream.write(f"{printable(row_text(news))}\n")
        now_s, doing = time.monotonic(), f"{news.repeat} {news.doing}"
        if doing != self._text or (self._stream.isatty() and now_s - self._at_s >= _SHOWN_EVERY_S):
            self._at_s, self._text = now_s, doing
            self._progress.show(progress_text(news))
