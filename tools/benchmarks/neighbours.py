"""Rates of engines beside busy processes, and their share of the quiet rate.

`python -m tools.benchmarks.neighbours` [--own-sessions]

Closed loop: c requests at once, about 128 prompt tokens in, exactly 128 out, greedy. The busy processes have the lowest
priority. They and the engines are in this program's session; with `--own-sessions` each of them is in its own, where
Linux (`kernel.sched_autogroup_enabled`) gives it a fair share of its core, whatever its priority. Rounds of all engines
are interleaved, only one engine's processes run at a time, and medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import platformdirs

from tools.benchmarks.driver import start
from tools.benchmarks.engine_process import EngineFailed, EngineProcess
from tools.benchmarks.engines import Row, chosen
from tools.benchmarks.places import NotPrepared, Places
from tools.benchmarks.protocol import PROMPT_TOKENS, max_tokens, work_of

ROWS = ("ours-http", "openvino", "llamacpp")
_Key = tuple[str, int, int]


@contextmanager
def busy_processes(count: int, *, own_sessions: bool) -> Iterator[None]:
    """Processes of the lowest priority that compute all the time."""
    command = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command, start_new_session=own_sessions) for _ in range(count)]
    try:
        if started:
            time.sleep(0.5)  # until they run
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def measure(engines: dict[str, EngineProcess], given: argparse.Namespace) -> dict[_Key, list[float]]:
    """Tokens per second of each round, by row, clients and busy processes."""
    found: defaultdict[_Key, list[float]] = defaultdict(list)
    number = 0
    for round_ in range(given.rounds + 1):
        for busy in given.neighbours if round_ else (0,):  # the first round warms up
            for clients in given.clients:
                number += 1
                for key, engine in engines.items():
                    with busy_processes(busy, own_sessions=given.own_sessions):
                        rate = engine.do(work_of(clients, number)).rate
                    engine.pause()
                    if round_:
                        found[key, clients, busy].append(rate)
    return found


def lines(rows: tuple[Row, ...], found: dict[_Key, list[float]]) -> Iterator[str]:
    """One for each row, number of clients and of busy processes."""
    titles = {row.key: f"{row.engine}, {row.weights}" for row in rows}
    for (key, clients, busy), rates in found.items():
        median, quiet = statistics.median(rates), found.get((key, clients, 0))
        share = f": {median / statistics.median(quiet):.0%} of quiet" if busy and quiet else ""
        spread = f"({min(rates):.1f} to {max(rates):.1f})"
        yield f"c={clients:<3} {titles[key]:<44} {median:7.1f} tok/s {spread}, {busy} busy{share}"


def main() -> None:
    """Measure a synthetic shape in each engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW", help="keys of tools/benchmarks/engines.py")
    parser.add_argument("--shape", choices=("135m", "0.5b"), default="135m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2], help="busy processes")
    parser.add_argument("--own-sessions", action="store_true", help="each busy process in a session of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("ericllm") / "bench")
    given = parser.parse_args()
    try:
        rows = chosen(given.rows)
    except ValueError as error:
        parser.error(str(error))
    places, engines = Places(given.cache), {}
    with ExitStack() as running:
        for row in rows:
            try:
                places.python(row, lambda text: print(text, file=sys.stderr))
                engine = start(places, given.shape, row, max(given.clients), max_tokens(PROMPT_TOKENS))
            except (EngineFailed, NotPrepared, OSError) as error:
                sys.exit(f"{row.key}: {error}")
            running.callback(engine.close)
            engine.pause()
            engines[row.key] = engine
        print("\n".join(lines(rows, measure(engines, given))))


if __name__ == "__main__":
    main()
