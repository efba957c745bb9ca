"""The check whether a run may be published: all rows that its CPU can run, in enough rounds to see the noise."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tools.benchmarks.engines import Row
from tools.benchmarks.pace import Turn

SHAPES, CLIENTS, ROUNDS = ("135m", "0.5b"), (1, 8, 32), 3
"""What `make bench-cpu` and `make bench-peers` measure if nothing else is asked for."""


def lacking(rounds: Mapping[Turn, int], promised: Collection[str], rows: Sequence[Row]) -> str:
    """Return what a run of these rows lacks, in words; "" for one that is complete.

    rounds: how many there are of each turn.  promised: shapes whose prefill, prefix and load are there too.
    """
    short = [
        f"{row.key} of {shape} with c={clients}"
        for shape in SHAPES
        for row in rows
        for clients in row.runs_with(CLIENTS)
        if rounds.get((shape, clients, row.key), 0) < ROUNDS
    ]
    lacks = [f"{ROUNDS} rounds of {short[0]}{f' and {len(short) - 1} more' if short[1:] else ''}"] if short else []
    lacks += [f"prefill, prefix and load of {shape}" for shape in SHAPES if shape not in promised]
    return ", ".join(lacks)
