"""`make bench-peers`: who generates how much on this machine's CPU, written into the docs."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from engine.snapshot import DeviceLimits
from tools.benchmarks import goals
from tools.benchmarks.driver import Driver, Plan
from tools.benchmarks.engine_process import EngineFailed
from tools.benchmarks.engines import OURS, chosen
from tools.benchmarks.machine import measured_limits, most_of, this_machine
from tools.benchmarks.places import ROOT, Places
from tools.benchmarks.protocol import PROMPT_TOKENS
from tools.benchmarks.publish import CLIENTS, NAME, ROUNDS, SHAPES, lacking, write
from tools.benchmarks.report import markdown
from tools.benchmarks.results import Failure, Goal, Results, read_results
from tools.synthetic_models import SHAPES as KNOWN_SHAPES

PAGE = ROOT / "docs" / "performance.md"
RUNS = "runs"
QUICK_CLIENTS = (1, 8)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run. goals: measure prefill, prefix and load too.  write: None where it is complete.  saved: results to publish
    without measuring.  resumed: results of earlier pieces, which the file has."""

    plan: Plan
    goals: bool
    write: bool | None
    cache: Path
    file: Path
    prepare_only: bool = False
    saved: Results | None = None
    resumed: Results | None = None


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write page and JSON of a run that is complete. Returns the exit status: 1 where nothing was
    measured, or the page cannot be written."""
    given = asked(arguments)
    if given.prepare_only:
        return _prepared(given)
    results = given.saved or _measured(given, arguments)
    if not results.cells:
        reason = results.failures[0].reason if results.failures else "there are no rates"
        _say(f"nothing was measured, and nothing is written: {reason}")
        return 1
    lacks = lacking(results)
    print(markdown(results, lacks))
    if given.write is False:
        return 0
    if lacks and given.write is None:
        _say(f"{PAGE.name} keeps its {NAME}: this run lacks {lacks}; --write publishes it still")
        return 0
    try:
        file = write(results, PAGE)
    except (OSError, ValueError) as error:
        _say(f"the docs are not written: {error}")
        return 1
    _say(f"written: {NAME} of {PAGE.name}, and {file.name}")
    return 0


def _prepared(given: Asked) -> int:
    driver = Driver(given.plan, Places(given.cache), _say)
    driver.prepare()
    return 1 if driver.measured.failures else 0


def _measured(given: Asked, arguments: Sequence[str]) -> Results:
    """All of a run that is not there. It is saved in the cache after each turn."""
    began_s, plan, places, before = time.monotonic(), given.plan, Places(given.cache), given.resumed
    driver = Driver(plan, places, _say, before)
    driver.prepare()
    limits = _limits(before.limits if before else None)
    others: list[Goal] = list(before.goals) if before else []
    command = f"python -m tools.benchmarks {shlex.join(arguments)}".rstrip()

    def results() -> Results:
        return Results(
            machine=this_machine(),
            date=before.date if before else f"{datetime.now():%Y-%m-%d}",
            commands=(*(before.commands if before else ()), command),
            minutes=(before.minutes if before else 0.0) + (time.monotonic() - began_s) / 60,
            limits=limits,
            cells=driver.measured.cells,
            failures=tuple(driver.measured.failures),
            goals=tuple(others),
            versions=driver.measured.versions,
            precisions=driver.measured.precisions,
        )

    _say(f"saved after each turn in {given.file}, which --resume and --from take")
    for shape in plan.shapes:
        if not driver.measure(shape, lambda: results().write(given.file)):
            break
        if given.goals and shape not in {goal.shape for goal in others}:
            _say(f"{shape}: prefill, shared prefix and load")
            try:
                others += goals.measured(shape, places, plan.rounds)
            except EngineFailed as error:
                driver.measured.failures.append(Failure(shape, OURS, str(error)))
            results().write(given.file)
    if driver.measured.cells:
        limits = _limits(limits)
        results().write(given.file)
    return results()


def _limits(before: DeviceLimits | None) -> DeviceLimits:
    """Measure them. What was measured before stays where it is more, or where they cannot be measured now; without it,
    that raises SystemExit."""
    try:
        found = measured_limits()
    except (subprocess.CalledProcessError, OSError) as error:
        if before is None:
            raise SystemExit(f"the limits of the machine cannot be measured: {error}") from None
        _say(f"the limits of the machine stay as they were measured before, as they cannot be measured now: {error}")
        return before
    return most_of(found, before) if before else found


def asked(arguments: Sequence[str]) -> Asked:
    """Parse the arguments. Raises SystemExit, with one sentence, for what makes no sense."""
    parser = _parser()
    given = parser.parse_args(arguments)
    quick = given.quick
    try:
        rows = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        rows=rows,
        shapes=_each(given.shapes, SHAPES[:1] if quick else SHAPES),
        clients=_each(given.clients, QUICK_CLIENTS if quick else CLIENTS),
        rounds=given.rounds or (1 if quick else ROUNDS),
        prompts=_each(given.prompt, (PROMPT_TOKENS,)),
        seconds=given.minutes * 60 if given.minutes else math.inf,
    )
    if not any(row.runs_with(clients) for row in rows for clients in plan.clients):
        parser.error(
            f"{', '.join(row.key for row in rows)} is not measured with {', '.join(map(str, plan.clients))} clients"
        )
    cache: Path = given.cache.expanduser().resolve()
    if cache.exists() and not cache.is_dir():
        parser.error(f"--cache is no folder: {cache}")
    limited = quick or given.only or given.shapes or given.clients or given.rounds or given.prompt or given.minutes
    if given.saved and (limited or given.resume or given.prepare):
        parser.error("--from measures nothing: leave out all but --write")
    resumed = _saved(parser, given.resume) if given.resume else None
    if resumed and resumed.machine != this_machine():
        parser.error(f"{given.resume} is of another machine: {resumed.machine.line}")
    return Asked(
        plan=plan,
        goals=given.goals,
        write=given.write,
        cache=cache,
        file=given.resume or cache / RUNS / f"{datetime.now():%Y-%m-%d-%H%M%S}.json",
        prepare_only=given.prepare,
        saved=_saved(parser, given.saved) if given.saved else None,
        resumed=resumed,
    )


def _each(given: Sequence[_T] | None, by_default: Sequence[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(given or by_default))


def _saved(parser: argparse.ArgumentParser, file: Path) -> Results:
    try:
        return read_results(file)
    except OSError as error:
        parser.error(f"{file} cannot be read: {error.strerror}")
    except msgspec.MsgspecError as error:
        parser.error(f"{file} holds no results: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks",
        description="Who generates how much on this machine's CPU. The docs are written where the run is complete.",
    )
    numbers: Any = {"nargs": "+", "type": _at_least_one, "metavar": "N"}
    parser.add_argument("--only", nargs="+", metavar="ROW", help="keys of rows, as in tools/benchmarks/engines.py")
    parser.add_argument(
        "--shapes", nargs="+", choices=KNOWN_SHAPES, metavar="SHAPE", help=f"{' '.join(SHAPES)} by default"
    )
    parser.add_argument("--clients", **numbers, help=f"{' '.join(map(str, CLIENTS))} by default")
    parser.add_argument("--prompt", **numbers, help=f"about how many tokens prompts have, {PROMPT_TOKENS} by default")
    parser.add_argument("--rounds", type=_at_least_one, metavar="N", help=f"{ROUNDS} by default")
    parser.add_argument("--quick", action="store_true", help="the first shape, 1 and 8 clients, one round, by default")
    parser.add_argument(
        "--minutes", type=_at_least_one, metavar="N", help="begin no turn that would not end within N minutes"
    )
    parser.add_argument("--no-goals", dest="goals", action="store_false", help="leave out prefill, prefix and load")
    parser.add_argument("--prepare", action="store_true", help="install engines and make models; measure nothing")
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        help="write the docs even if rows, shapes, clients or rounds lack, or not even if none do",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="measure what this JSON file of an earlier run lacks, into it"
    )
    parser.add_argument(
        "--from", dest="saved", type=Path, metavar="FILE", help="publish the results of this JSON file; measure nothing"
    )
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("ericllm") / "bench")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine is left behind, stopped
    sys.exit(main(sys.argv[1:]))
