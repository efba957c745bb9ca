"""Asks /health a hundred times a second in a process of its own, until stdin ends: run with port and the server's pid.

It answers each line of stdin with `Waits` as JSON, of what it asked since the last. On a machine with other work the
clock says little; what a client waits for is what the server does before it answers, and that has a processor time.
"""

from __future__ import annotations

import http.client
import select
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec

PAUSE_S = 0.01
PATIENCE_S = 120.0


class Waits(msgspec.Struct, frozen=True):
    """The longest of all answers. clock_s: seconds, infinite where one did not come. cpu_s: processor time that the
    server spent meanwhile, in all of its threads."""

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
            began_s, spent_s = time.monotonic(), _cpu_s(pid)
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                _say(Waits(float("inf"), float("inf"), answers))
                return
            assert response.status == 200, response.status
            clock_s = max(clock_s, time.monotonic() - began_s)
            cpu_s = max(cpu_s, _cpu_s(pid) - spent_s)
            answers += 1


def _say(waits: Waits) -> None:
    print(msgspec.json.encode(waits).decode(), flush=True)


def _cpu_s(pid: int) -> float:
    """What the threads of a process have spent so far (Linux)."""
    spent_ns = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            spent_ns += int(stat.read_text().split()[0])
        except OSError:  # it has ended
            continue
    return spent_ns / 1e9


if __name__ == "__main__":
    probe(int(sys.argv[1]), int(sys.argv[2]))
