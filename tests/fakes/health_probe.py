"""Asks /health a hundred times a second in a process of its own, until stdin ends: run with port and the server's pid.

It answers each line of stdin with `Waits` as JSON, of what it asked since the last. On a machine with other work the
clock says little; what a client waits for is what the server does before it answers, and that has a processor time. The
server says itself how much it has spent when it answers (CPU_HEADER): who asks may wait for a core until it can look.
"""

from __future__ import annotations

import http.client
import select
import sys
import time
from contextlib import closing

import msgspec

PAUSE_S = 0.01
PATIENCE_S = 120.0
CPU_HEADER = "X-CPU-Seconds"
"""time.process_time() of the server."""


class Waits(msgspec.Struct, frozen=True):
    """The longest of all answers. clock_s: seconds, infinite where one did not come. cpu_s: processor time that the
    server spent from the request to its answer, in all of its threads."""

    clock_s: float
    cpu_s: float
    answers: int


def probe(port: int, pid: int) -> None:
    """Ask until stdin ends, and say of each line's time at least one wait."""
    clock_s = cpu_s = 0.0
    answers = 0
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        while True:
            if select.select([sys.stdin], [], [], PAUSE_S)[0] and answers:
                if not sys.stdin.readline():
                    return
                _say(Waits(clock_s, cpu_s, answers))
                clock_s = cpu_s = 0.0
                answers = 0
            try:
                connection.putrequest("GET", "/health")
                began_s, spent_s = time.monotonic(), _cpu_s(pid)
                connection.endheaders()  # which sends: nothing else may come between
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                _say(Waits(float("inf"), float("inf"), answers))
                return
            assert response.status == 200, response.status
            clock_s = max(clock_s, time.monotonic() - began_s)
            cpu_s = max(cpu_s, float(response.headers[CPU_HEADER]) - spent_s)
            answers += 1


def _say(waits: Waits) -> None:
    print(msgspec.json.encode(waits).decode(), flush=True)


def _cpu_s(pid: int) -> float:
    """time.process_time() of another process (Linux): its clock's id is made as clock_getcpuclockid(3) makes it."""
    return time.clock_gettime(~pid << 3 | 2)


if __name__ == "__main__":
    probe(int(sys.argv[1]), int(sys.argv[2]))
