"""The command line of `ericllm bench`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from console.bench.http import HttpReport, http_text, measure_http
from console.bench.kinds import PLANS
from console.bench.looking import COMMANDS, look
from console.bench.overhead import OverheadReport, measure_overhead, overhead_text
from console.bench.plan import plan_for
from console.bench.progress import Progress
from console.bench.screen import measure_screen
from console.bench.screen_report import ScreenReport, screen_text
from console.bench.workers import WorkersReport, measure_workers, workers_text
from console.output import write

_OWN = ("overhead", "workers", "screen", "http")
_DESCRIPTION = (
    "Measure a model on this machine, or any server: 'ericllm bench NAME --help' tells the flags of each. "
    + " ".join(f"'{name}': {plan.about}." for name, plan in PLANS.items())
    + " Results are remembered: 'history', 'show', 'compare', 'plot' and 'forget' look at them. "
    "The rest measures what the engine costs here. 'overhead': what it adds to a bare loop over the backend, and the "
    "memory of a waiting request. 'workers': two workers with half the threads each against one with all, and the "
    "memory of 1, 2 and 4 workers. 'screen': how quick the console is while clients stream. 'http': what the API "
    "serves on one core where the backend costs nothing, and the time that it adds. Measure on a quiet machine; each "
    "takes a few minutes."
)


def bench(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0, 130 where ctrl+c ended it. Raises EngineError for what cannot be measured."""
    if argv[:1] and argv[0] in PLANS:
        from console.bench.measuring import measure

        return measure(argv, parser)
    if argv[:1] and argv[0] in COMMANDS:
        return look(argv, parser)
    given = _parse(argv, parser)
    plan = plan_for(given.model, threads=given.threads, rounds=given.rounds)
    progress = Progress(sys.stderr)
    try:
        report: OverheadReport | WorkersReport | ScreenReport | HttpReport
        if given.what == "overhead":
            report = asyncio.run(measure_overhead(plan, given.concurrent, given.waiting, progress.show))
            text = overhead_text(report)
        elif given.what == "screen":
            report = asyncio.run(measure_screen(given.model, given.concurrent, given.seconds, progress.show))
            text = screen_text(report)
        elif given.what == "http":
            report = asyncio.run(measure_http(given.model, given.rounds, progress.show, profile=given.profile))
            text = http_text(report)
        else:
            report = asyncio.run(measure_workers(plan, progress.show))
            text = workers_text(report)
    finally:
        progress.end()
    if given.as_json:
        text = msgspec.json.format(msgspec.json.encode(report)).decode()
    write(text, as_json=given.as_json)
    return 0


def _parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.description = _DESCRIPTION
    parser.add_argument("what", choices=(*PLANS, *COMMANDS, *_OWN))
    parser.add_argument("--model", default="demo", help="a folder, or a name as --model takes it (default demo)")
    parser.add_argument("--threads", type=_positive, help="CPU threads in all (default: the machine's cores)")
    parser.add_argument("--rounds", type=_positive, default=9, help="rounds of each kind, interleaved (default 9)")
    parser.add_argument(
        "--concurrent", type=_positive, default=32, help="overhead, screen: requests at once (default 32)"
    )
    parser.add_argument(
        "--waiting", type=_positive, default=10_000, help="overhead: requests in the queue (default 10000)"
    )
    parser.add_argument("--seconds", type=_positive, default=20, help="screen: how long each part takes (default 20)")
    parser.add_argument(
        "--profile", default="", metavar="FILE", help="http: cProfile's account of the server (python -m pstats FILE)"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the numbers for programs")
    given = parser.parse_args(argv)
    if given.what not in _OWN:
        parser.error(f"say first what is wanted: {parser.prog} {given.what} ...")
    return given


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)
