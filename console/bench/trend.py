"""One row of a bench over the results that have it: what became of it from run to run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from console.bench.comparison import same_work
from console.bench.headline import main_row
from console.bench.result import BenchResult, Column, Row, said

_KEYS = (Column(name="number", title="#", digits=0), Column(name="started", title="started (UTC)"))


@dataclass(frozen=True, slots=True)
class Trend:
    """row: which one of the results it is, for a person.  found: a row for each result that has it.

    left_out: how many have it of other work, whose numbers tell nothing of this one.
    """

    row: str
    found: BenchResult
    left_out: int

    @property
    def about(self) -> str:
        """What the title of its plot says beside the number."""
        others = f", {self.left_out} result{'s' * (self.left_out != 1)} of other work left out" if self.left_out else ""
        return f" of {self.row}, over time{others}"


def trend(shown: BenchResult, column: Column, results: Mapping[int, BenchResult]) -> Trend:
    """What became of the row that `shown` is about, in the results by their numbers, in their order."""
    about = main_row(shown, column)
    having = {
        number: (result, row)
        for number, result in results.items()
        for row in result.rows
        if about is not None and row.keys == about.keys and row.known(column.name)
    }
    rows = [
        Row(
            keys={"number": number, "started": f"{result.started[:10]} {result.started[11:16]}"},
            values={column.name: row.values[column.name]},
        )
        for number, (result, row) in having.items()
        if same_work(shown, result, column.name)
    ]
    return Trend(
        row=said(about.keys) if about is not None else "",
        found=msgspec.structs.replace(shown, keys=_KEYS, columns=(column,), rows=tuple(rows)),
        left_out=len(having) - len(rows),
    )
