"""`make bench-cpu` and `make bench-peers`: who generates how much on this machine's CPU, written into the docs."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import platformdirs

from benchmarks import goals
from benchmarks.driver import Driver, Plan, all_turns
from benchmarks.engine_process import EngineFailed
from benchmarks.machine import this_machine
from benchmarks.pace import Pace
from benchmarks.page import write_section
from benchmarks.places import ROOT, Places
from benchmarks.report import markdown
from benchmarks.results import Failure, Goal, Results
from benchmarks.rows import OURS, chosen

PAGE = ROOT / "docs" / "performance.md"
TITLES = {"bench-cpu": "On a CPU, against what was promised", "bench-peers": "On a CPU, beside other engines"}
QUICK_CLIENTS = (1, 8)


def main(arguments: list[str]) -> int:
    """Measure, print, and write page and JSON. Returns the exit status: 1 where nothing could be measured."""
    given = _parsed(arguments)
    began_s, machine = time.monotonic(), this_machine()
    sections = {
        which: chosen(given.only, goals_only=which == "bench-cpu", flags=machine.flags) for which in given.which
    }
    plan = Plan(
        rows=max(sections.values(), key=len),
        shapes=tuple(given.shapes),
        clients=tuple(given.clients),
        rounds=given.rounds,
    )
    if given.quick:
        plan = replace(plan, shapes=plan.shapes[:1], clients=QUICK_CLIENTS, rounds=1)
    places = Places(given.cache.expanduser().resolve())
    driver = Driver(plan, places, _say)
    driver.prepare()
    pace = Pace(all_turns(plan))
    others: list[Goal] = []
    for shape in plan.shapes:
        driver.measure(shape, pace)
        if given.goals:
            _say(f"{shape}: prefill, shared prefix and load")
            try:
                others += goals.measured(shape, places, plan.rounds)
            except EngineFailed as error:
                driver.measured.failures.append(Failure(shape, OURS, str(error)))
    results = Results(
        machine=machine,
        date=f"{date.today():%Y-%m-%d}",
        command=f"python -m benchmarks {' '.join(arguments)}",
        minutes=(time.monotonic() - began_s) / 60,
        cells=driver.measured.cells,
        failures=tuple(driver.measured.failures),
        goals=tuple(others),
        versions=driver.measured.versions,
    )
    for which, rows in sections.items():
        _publish(which, results.of({row.key for row in rows}), write=given.write)
    return 0 if results.cells else 1


def _publish(which: str, results: Results, *, write: bool) -> None:
    text = markdown(results, TITLES[which])
    print(text)
    if write:
        write_section(PAGE, which, text)
        results.write(PAGE.with_name(f"{which}.json"))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "which", nargs="+", choices=TITLES, help="the rows that goals speak of, all there are, or each from one run"
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", help="keys of rows, as in benchmarks/rows.py")
    parser.add_argument("--shapes", nargs="+", default=["135m", "0.5b"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the first shape, 1 and 8 clients, one round")
    parser.add_argument("--no-goals", dest="goals", action="store_false", help="leave out prefill, prefix and load")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print, and leave the docs as they are")
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("ericllm") / "bench")
    given = parser.parse_args(arguments)
    try:
        chosen(given.only, goals_only=False)
    except ValueError as error:
        parser.error(str(error))
    return given


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine is left behind, stopped
    sys.exit(main(sys.argv[1:]))
