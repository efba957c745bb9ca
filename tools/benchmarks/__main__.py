"""`make bench-cpu` and `make bench-peers`: who generates how much on this machine's CPU, written into the docs."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from tools.benchmarks import goals
from tools.benchmarks.arguments import Asked, asked
from tools.benchmarks.complete import lacking
from tools.benchmarks.driver import Driver, all_turns
from tools.benchmarks.engine_process import EngineFailed
from tools.benchmarks.engines import OURS, chosen
from tools.benchmarks.machine import Machine, this_machine
from tools.benchmarks.pace import Pace
from tools.benchmarks.places import ROOT, Places
from tools.benchmarks.publish import PEERS, publish, sections
from tools.benchmarks.results import Failure, Goal, Results

PAGE = ROOT / "docs" / "performance.md"
RUNS = "runs"


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write page and JSON of a run that is complete. Returns the exit status: 1 where nothing was
    measured, or the page cannot be written."""
    machine = this_machine()
    given = asked(arguments, machine.flags)
    results = given.saved or _measured(given, machine, arguments)
    if not results.cells:
        reason = results.failures[0].reason if results.failures else "there are no rates"
        _say(f"nothing was measured, and nothing is written: {reason}")
        return 1
    made = sections(results, given.which)
    for section in made:
        print(section.text)
    try:
        publish(made, PAGE, _say, write=given.write)
    except (OSError, ValueError) as error:
        _say(f"the docs are not written: {error}")
        return 1
    return 0


def _measured(given: Asked, machine: Machine, arguments: Sequence[str]) -> Results:
    """All of a run. It is kept in the cache, whether the docs take it or not."""
    _say_what_is_lacking(given, machine)
    began_s, plan, places = time.monotonic(), given.plan, Places(given.cache)
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
        date=f"{datetime.now():%Y-%m-%d}",
        command=f"python -m tools.benchmarks {shlex.join(arguments)}",
        minutes=(time.monotonic() - began_s) / 60,
        cells=driver.measured.cells,
        failures=tuple(driver.measured.failures),
        goals=tuple(others),
        versions=driver.measured.versions,
        precisions=driver.measured.precisions,
    )
    if results.cells:
        saved = given.cache / RUNS / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
        results.write(saved)
        _say(f"saved in {saved}, which --from takes")
    return results


def _say_what_is_lacking(given: Asked, machine: Machine) -> None:
    """Before it takes most of an hour."""
    plan = given.plan
    rows = chosen(None, goals_only=PEERS not in given.which, flags=machine.flags)
    lacks = lacking(Counter(all_turns(plan)), plan.shapes if given.goals else (), rows)
    if lacks and given.write is None:
        _say(f"this run will not be written into the docs, for it lacks {lacks}; --write publishes it all the same")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine is left behind, stopped
    sys.exit(main(sys.argv[1:]))
