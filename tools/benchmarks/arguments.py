"""The arguments of `python -m tools.benchmarks`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import platformdirs

from tools.benchmarks.complete import CLIENTS, ROUNDS, SHAPES
from tools.benchmarks.driver import Plan
from tools.benchmarks.engines import Row, chosen
from tools.benchmarks.publish import GOAL_ROWS, GOALS, PEERS, TITLES
from tools.benchmarks.results import Results, read_results
from tools.synthetic_models import SHAPES as KNOWN_SHAPES

QUICK_CLIENTS = (1, 8)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run. which: the sections.  write: None where they are complete.  kept: results to publish without measuring."""

    which: tuple[str, ...]
    plan: Plan
    goals: bool
    write: bool | None
    cache: Path
    saved: Results | None


def asked(arguments: Sequence[str], flags: Sequence[str]) -> Asked:
    """Parse the arguments. flags: those of the CPU. Raises SystemExit, with one sentence, for what makes no sense."""
    parser = _parser()
    given = parser.parse_args(arguments)
    rows = _rows(parser, given.which, given.only, flags)
    quick = given.quick
    plan = Plan(
        rows=rows,
        shapes=_each(given.shapes, SHAPES[:1] if quick else SHAPES),
        clients=_each(given.clients, QUICK_CLIENTS if quick else CLIENTS),
        rounds=given.rounds or (1 if quick else ROUNDS),
    )
    if not any(row.runs_with(plan.clients) for row in rows):
        parser.error(
            f"{', '.join(row.key for row in rows)} is not measured with {', '.join(map(str, plan.clients))} clients"
        )
    cache: Path = given.cache.expanduser().resolve()
    if cache.exists() and not cache.is_dir():
        parser.error(f"--cache is no folder: {cache}")
    if given.saved and (quick or given.only or given.shapes or given.clients or given.rounds):
        parser.error("--from measures nothing: leave out --only, --shapes, --clients, --rounds and --quick")
    saved = _saved(parser, given.saved) if given.saved else None
    return Asked(which=tuple(given.which), plan=plan, goals=given.goals, write=given.write, cache=cache, saved=saved)


def _each(given: Sequence[_T] | None, by_default: Sequence[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(given or by_default))


def _rows(
    parser: argparse.ArgumentParser, which: Sequence[str], only: Sequence[str] | None, flags: Sequence[str]
) -> tuple[Row, ...]:
    try:
        rows = chosen(only, goals_only=PEERS not in which, flags=flags)
    except ValueError as error:
        parser.error(str(error))
    others = [row.key for row in rows if row.key not in GOAL_ROWS]
    if others and PEERS not in which:
        parser.error(f"{GOALS} has no {', '.join(others)}; {PEERS} has")
    return rows


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
    parser.add_argument(
        "which", nargs="+", choices=TITLES, help=f"{GOALS}: the rows that goals speak of; {PEERS}: all there are"
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", help="keys of rows, as in tools/benchmarks/engines.py")
    parser.add_argument(
        "--shapes", nargs="+", choices=KNOWN_SHAPES, metavar="SHAPE", help=f"{' '.join(SHAPES)} by default"
    )
    parser.add_argument(
        "--clients", nargs="+", type=_at_least_one, metavar="N", help=f"{' '.join(map(str, CLIENTS))} by default"
    )
    parser.add_argument("--rounds", type=_at_least_one, metavar="N", help=f"{ROUNDS} by default")
    parser.add_argument("--quick", action="store_true", help="the first shape, 1 and 8 clients, one round, by default")
    parser.add_argument("--no-goals", dest="goals", action="store_false", help="leave out prefill, prefix and load")
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        help="write the docs even if rows, shapes, clients or rounds lack, or not even if none do",
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
