"""`ericllm autotune MODEL`: find the settings for a model on this machine."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TextIO

import msgspec

from console.bench.workload import Exchange, read_trace
from console.cli.parser import add_every_setting, parse
from console.link.tuning import MAX_MINUTES, TuneOrder, TuningReport
from console.runtime.logs import logging_to, own_log_folder
from console.runtime.output import say, write
from console.runtime.runtime import Runtime
from console.settings.schema import Settings, state_dir
from console.settings.sources import Sources, changed
from console.tuning.autotune.knob_space import KNOBS
from console.tuning.autotune.space import MIN_CACHE_BITS, KnobName
from console.tuning.autotune.table import heading_of, progress_of, remarks_of, table_of
from console.tuning.autotune.traffic import Mix, asked_mix
from console.tuning.autotune.tuning_runs import traced_mix
from engine.errors import InvalidRequest
from engine.text.printable import printable

# How tuning goes, drawn as it grows: a block that is redrawn on a terminal, elsewhere a line for every window.

_OTHER_LINES = 10
"""Lines that are no rows of the table."""


class Live:
    """Draws reports. size: of the terminal, in columns and lines."""

    def __init__(self, stream: TextIO, size: Callable[[], os.terminal_size] = shutil.get_terminal_size) -> None:
        self._stream = stream
        self._size = size
        self._redraws = stream.isatty()
        self._drawn = 0
        self._shown_windows = -1
        self._notes = 0

    def say(self, text: str) -> None:
        """Show a step of the preparation."""
        self._draw([text])

    def show(self, report: TuningReport) -> None:
        """How it stands."""
        if self._redraws:
            columns, lines = self._size()
            block = [*heading_of(report).splitlines(), "", progress_of(report)]
            block += remarks_of(report)[-1:]
            if report.tried:
                block += ["", *table_of(report, max(3, lines - _OTHER_LINES), columns).splitlines()]
            self._draw(block)
        elif report.windows != self._shown_windows or len(report.notes) != self._notes:
            self._draw([*report.notes[self._notes :], progress_of(report)])
            self._shown_windows, self._notes = report.windows, len(report.notes)

    def end(self) -> None:
        """Leave nothing of it on the terminal."""
        self._draw([])

    def _draw(self, lines: list[str]) -> None:
        lines = [printable(line) for line in lines]
        if not self._redraws:
            self._stream.write("".join(f"{line}\n" for line in lines))
        else:
            columns, _ = self._size()
            back = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
            self._stream.write(back + "".join(f"{line[: columns - 1]}\n" for line in lines))
            self._drawn = len(lines)
        self._stream.flush()


DESCRIPTION = (
    "Find the settings with the highest tok/s on this machine that meet --slo-ttft and --slo-itl, by measurement under "
    "load. Stops early when more runs would not help; Ctrl+C prints partial results."
)
MAX_QUEUE = 1_000_000
_LOOK_S = 0.2


class Watcher(Protocol):
    """A reader of progress."""

    def say(self, text: str) -> None:
        """Take a step of the preparation."""

    def show(self, report: TuningReport) -> None:
        """How it stands."""

    def end(self) -> None:
        """It is over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides settings."""
    add = parser.add_argument_group("Autotune").add_argument
    parser.add_argument("name", metavar="MODEL", nargs="?", help="same as --model")
    add("--minutes", type=_minutes, default=10.0, metavar="N", help="time limit (default 10)")
    add(
        "--percentile",
        type=_percentile,
        default=95.0,
        metavar="P",
        help="latency percentile that must meet the SLO (default 95)",
    )
    add("--prompt", metavar="TOKENS", help="prompt tokens: 128, 64-256 (default) or normal:128:32")
    add("--output", metavar="TOKENS", help="answer tokens, same format (default 32-128)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="use prompts and answer lengths from a ShareGPT file",
    )
    add("--users", type=_count, metavar="N", help="concurrent clients (default: one per slot)")
    add("--knobs", type=_knobs, default=(), metavar="NAME,NAME", help=f"tune only these: {', '.join(KNOBS)}")
    add(
        "--least-cache-bits",
        type=int,
        choices=(4, 6, 8, 16),
        default=MIN_CACHE_BITS,
        help=f"min KV cache bits to try (default {MIN_CACHE_BITS}; fewer bits change answers)",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed (default 0)")
    add("--apply", action="store_true", help="save the best settings as defaults for this model and hardware")
    add("--json", action="store_true", dest="as_json", help="print JSON")


def autotune(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; return 0, or 1 where it ended early or no setting keeps the SLO. Raises EngineError."""
    add_every_setting(parser, DESCRIPTION)
    add_arguments(parser)
    given = argparse.Namespace(**parse(argv, parser))
    flags = {name: value for name, value in vars(given).items() if name in Settings.model_fields}
    if given.name is not None:
        flags["model"] = given.name
    sources = Sources.read(flags)
    settings = sources.settings()
    order = TuneOrder(
        minutes=given.minutes,
        slo_ttft_s=settings.slo_ttft,
        slo_itl_s=settings.slo_itl,
        percentile=given.percentile,
        users=given.users,
        knobs=given.knobs,
        least_cache_bits=given.least_cache_bits,
        apply=given.apply,
        seed=given.seed,
    )
    mix = asked_mix(given.prompt, given.output, given.seed)
    if mix is not None and given.trace is not None:
        raise InvalidRequest("--trace has its own lengths: omit --prompt and --output", param="trace")
    trace = read_trace(given.trace) if given.trace is not None else ()
    reports: list[TuningReport] = []
    try:
        asyncio.run(tune(settings, order, mix or trace, Live(sys.stderr), reports, sources.library_prompts))
    finally:
        if reports and reports[-1].tried:
            text = as_json(reports[-1]) if given.as_json else as_text(reports[-1], _columns())
            write(text, as_json=given.as_json)
    last = reports[-1]
    if not last.tried:
        say(last.outcome)
    return 0 if last.state == "done" and last.best is not None and last.best.keeps and not _missed(last, order) else 1


def _missed(report: TuningReport, order: TuneOrder) -> bool:
    """Return whether it was to be applied, and is not."""
    return order.apply and not report.applied


async def tune(
    settings: Settings,
    order: TuneOrder,
    mix: Mix | Sequence[Exchange],
    watcher: Watcher,
    reports: list[TuningReport],
    library_prompts: int = 0,
) -> None:
    """Load the model into an engine of this process and tune that; the last report is put into `reports`, also where it
    is cancelled. mix: what requests are like, or a trace of them, as usual where that is empty.  library_prompts: see
    EngineConfig. Raises EngineError.
    """
    quiet = changed(settings, {"api": False, "timeout": 0, "max_queue": MAX_QUEUE})
    with ExitStack() as stack:
        folder = stack.enter_context(own_log_folder())
        runtime = await Runtime.open(quiet, log_dir=folder, state_dir=state_dir(), library_prompts=library_prompts)
        stack.enter_context(logging_to(runtime.engine.log, folder, level=settings.effective_log_level))
        try:
            await runtime.start()
            watcher.say(f"loading {settings.model}")
            await runtime.load(settings.model)
            await runtime.tuning.start(order, mix if isinstance(mix, Mix) else await _traced(runtime, mix, order.seed))
            await _watch(runtime, watcher)
        finally:
            await asyncio.shield(runtime.tuning.cancel())
            reports.append(runtime.tuning.report())
            watcher.end()
            await asyncio.shield(runtime.close(drain_s=0))


async def _traced(runtime: Runtime, trace: Sequence[Exchange], seed: int) -> Mix | None:
    if not trace:
        return None
    serving = await runtime.engine.serving()
    return await traced_mix(trace, serving, seed)


async def _watch(runtime: Runtime, watcher: Watcher) -> None:
    while (report := runtime.tuning.report()).under_way:
        watcher.show(report)
        await asyncio.sleep(_LOOK_S)


def _columns() -> int | None:
    """Of the terminal that is written to; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def as_text(report: TuningReport, columns: int | None = None) -> str:
    """Return the results as text. columns: of the terminal, None for no limit."""
    found = [heading_of(report), "", table_of(report, columns=columns), ""]
    if remarks := remarks_of(report):
        found += [*remarks, ""]
    return "\n".join((*found, report.outcome))


def as_json(report: TuningReport) -> str:
    """All of it, for programs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _knobs(text: str) -> Sequence[KnobName]:
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KNOBS:
            raise argparse.ArgumentTypeError(f"unknown knob {name}; valid: {', '.join(KNOBS)}")
    return tuple(knob for name in names for knob in KNOBS if knob == name)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 10,000")
    return int(text)


def _minutes(text: str) -> float:
    return _number(text, 0.05, MAX_MINUTES)


def _percentile(text: str) -> float:
    return _number(text, 1, 99.9)


def _number(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {least:g} to {most:g}")
    return value
