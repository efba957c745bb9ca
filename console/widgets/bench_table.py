"""The rows of a bench as a table: what each was measured for, and the middle of its repeats with how far they lie."""

from __future__ import annotations

from collections.abc import Sequence

from console.bench.result import Column as Number
from console.bench.result import Row as Measured
from console.bench.text import cell as figure
from console.bench.text import key_text, titled
from console.widgets.table import Cell, Column, Row, cell


def shown_numbers(numbers: Sequence[Number], rows: Sequence[Measured]) -> list[Number]:
    """Those for a person that a row has; while there is no row, all of them."""
    return [each for each in numbers if each.shown and (not rows or any(row.known(each.name) for row in rows))]


def table_of(
    keys: Sequence[Number], numbers: Sequence[Number], rows: Sequence[Measured]
) -> tuple[tuple[Column, ...], list[Row]]:
    """Columns and rows; where there is not the room, the last numbers go first."""
    shown = shown_numbers(numbers, rows)
    said = [_said(keys, shown, row) for row in rows]
    titles = [titled(each) for each in (*keys, *shown)]
    columns = tuple(
        Column(
            title,
            max(len(title), *(len(row[at]) for row in said), 1),
            "right" if at else "left",
            drop=max(0, at - len(keys)),
        )
        for at, title in enumerate(titles)
    )
    return columns, [Row(" ".join(row[: len(keys)]), _cells(row, len(keys))) for row in said]


def _said(keys: Sequence[Number], shown: Sequence[Number], row: Measured) -> list[str]:
    known = (key_text(row.keys.get(key.name, "")) for key in keys)
    return [*known, *(figure(row, each) for each in shown)]


def _cells(said: Sequence[str], keys: int) -> tuple[Cell, ...]:
    return tuple(cell(each, "$muted" if at < keys else "bold" if at == keys else "") for at, each in enumerate(said))
