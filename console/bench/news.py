"""How far a bench is: what it tells while it runs. Light, for whoever only shows it."""

from __future__ import annotations

import msgspec

from console.bench.result import Column, Row


class BenchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a bench is. doing: the part that is being measured, in words.  done, total: requests of all parts.

    left_s: seconds to go, None while nothing is known of it.  rows: those that have a repeat at least.
    """

    bench: str
    doing: str
    repeat: int
    repeats: int
    done: int
    total: int
    elapsed_s: float
    left_s: float | None
    keys: tuple[Column, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
