"""The command line: `python -m tools.internal_benches overhead|accounting|workers|screen|idle|http`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from console.bench.progress import Progress, Show
from console.runtime.output import write
from tools.command import exit_code
from tools.internal_benches.api_overhead import HttpReport, http_text, measure_http
from tools.internal_benches.console_latency import ScreenReport, measure_screen, screen_text
from tools.internal_benches.engine_overhead import OverheadReport, measure_overhead, overhead_text
from tools.internal_benches.idle_console import IdleReport, idle_text, measure_idle
from tools.internal_benches.rounds import Rounds
from tools.internal_benches.time_accounting import AccountingReport, accounting_text, measure_accounting
from tools.internal_benches.workers import WorkersReport, measure_workers, workers_text

BENCHES = {
    "overhead": "the engine against a bare loop over the backend, and the memory of a waiting request",
    "accounting": "the engine with the accounting of request time against the engine without it",
    "workers": "two workers with half the threads each against one with all, and the memory of 1, 2 and 4 workers",
    "screen": "response times of the console while clients stream",
    "idle": "the start of the console until the first answer, and the CPU of it and its worker while idle",
    "http": "throughput of the API on one core with a backend that costs nothing, and the latency it adds",
}
_DESCRIPTION = "Measure what the parts cost on this machine, which should be quiet; each bench takes a few minutes."


def main(argv: Sequence[str]) -> int:
    """Run one bench and print its report; return the exit code."""
    arguments = _parse(argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    progress = Progress(sys.stderr)
    try:
        report, text = asyncio.run(_measure(arguments, progress.show))
    finally:
        progress.end()
    if arguments.as_json:
        text = msgspec.json.format(msgspec.json.encode(report)).decode()
    write(text, as_json=arguments.as_json)


async def _measure(
    arguments: argparse.Namespace, show: Show
) -> tuple[OverheadReport | AccountingReport | WorkersReport | ScreenReport | IdleReport | HttpReport, str]:
    match arguments.bench:
        case "overhead":
            overhead = await measure_overhead(_rounds(arguments), arguments.concurrent, arguments.waiting, show)
            return overhead, overhead_text(overhead)
        case "accounting":
            accounting = await measure_accounting(_rounds(arguments), arguments.concurrent, show)
            return accounting, accounting_text(accounting)
        case "workers":
            workers = await measure_workers(_rounds(arguments), show)
            return workers, workers_text(workers)
        case "screen":
            screen = await measure_screen(arguments.model, arguments.concurrent, arguments.seconds, show)
            return screen, screen_text(screen)
        case "idle":
            idle = await measure_idle(arguments.model, arguments.seconds, show)
            return idle, idle_text(idle)
        case _:
            http = await measure_http(arguments.model, arguments.rounds, show, profile=arguments.profile)
            return http, http_text(http)


def _rounds(arguments: argparse.Namespace) -> Rounds:
    return Rounds.on(arguments.model, threads=arguments.threads, count=arguments.rounds)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.internal_benches", description=_DESCRIPTION)
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, measures in BENCHES.items():
        bench = benches.add_parser(name, help=measures, description=f"Measure {measures}.")
        bench.add_argument("--model", default="demo", help="a folder, or a name as --model takes it (default demo)")
        bench.add_argument("--json", action="store_true", dest="as_json", help="print the numbers for programs")
        if name in ("overhead", "accounting", "workers"):
            bench.add_argument("--threads", type=_positive, help="CPU threads in all (default: the machine's cores)")
        if name not in ("screen", "idle"):
            bench.add_argument("--rounds", type=_positive, default=9, help="rounds of each variant (default 9)")
        if name in ("overhead", "accounting", "screen"):
            bench.add_argument("--concurrent", type=_positive, default=32, help="concurrent requests (default 32)")
        if name == "overhead":
            bench.add_argument("--waiting", type=_positive, default=10_000, help="queued requests (default 10000)")
        if name in ("screen", "idle"):
            bench.add_argument(
                "--seconds",
                type=_positive,
                default=20 if name == "screen" else 60,
                help="seconds of each part (default: %(default)s)",
            )
        if name == "http":
            bench.add_argument(
                "--profile", default="", metavar="FILE", help="cProfile of the server (python -m pstats FILE)"
            )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
