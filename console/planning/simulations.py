"""Simulations in child processes, several at once: `python -m console.planning.simulations` runs one.

It reads a pickled case on stdin and writes its pickled outcome on stdout, both from and to the process that started it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from engine.devices import usable_cores
from engine.errors import WorkerFailed
from engine.simulation.outcome import Outcome
from engine.simulation.simulation import simulate
from engine.simulation.what_if import Case, in_turn
from engine.system.child_process import child_environment, python_command

_MAX_PROCESSES = 8


class Simulations:
    """Runs cases, those of one call at once. `with` ends the processes that still run."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Simulations:
        """Start nothing yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the processes."""
        for process in list(self._running):
            process.kill()
            process.wait()

    def run(self, cases: Sequence[Case]) -> Sequence[Outcome]:
        """Return the outcomes, in the order of the cases. Raises WorkerFailed where a process dies."""
        processes = min(usable_cores(), len(cases), _MAX_PROCESSES)
        if processes == 1:
            return in_turn(cases)
        threads = ThreadPoolExecutor(processes)
        try:
            return list(threads.map(self._run, cases))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, case: Case) -> Outcome:
        process = subprocess.Popen(
            python_command("-m", "console.planning.simulations"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        self._running.append(process)
        content, _ = process.communicate(pickle.dumps(case))
        self._running.remove(process)
        if process.returncode:
            raise WorkerFailed(f"a simulation ended with {process.returncode}")
        return cast("Outcome", pickle.loads(content))


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(simulate(*pickle.loads(sys.stdin.buffer.read()))))
