"""One row of a bench over the results that have it: what became of it from run to run. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.bench.headline import main_row
from console.bench.result import BenchResult, Column, Row, said

_KEYS = (Column(name="number", title="#", digits=0), Column(name="started", title="started (UTC)"))


def trend(shown: BenchResult, column: Column, results: Mapping[int, BenchResult]) -> tuple[str, BenchResult]:
    """Which row of `shown` it is, and a row for each result by its number, in their order, that has the same one."""
    about = main_row(shown, column)
    rows = [
        Row(
            keys={"number": number, "started": f"{result.started[:10]} {result.started[11:16]}"},
            values={column.name: row.values[column.name]},
        )
        for number, result in results.items()
        for row in result.rows
        if about is not None and row.keys == about.keys and row.known(column.name)
    ]
    found = msgspec.structs.replace(shown, keys=_KEYS, columns=(column,), rows=tuple(rows))
    return said(about.keys) if about is not None else "", found
