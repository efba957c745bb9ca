"""A result as CSV: a line for each row and repeat, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from console.bench.result import BenchResult
from engine.errors import InvalidRequest
from engine.files import replace_file

_FORMULA = re.compile(r"[=+\-@\t\r]")
"""What begins a field that a spreadsheet would compute."""


def csv_text(result: BenchResult) -> str:
    """The header has the columns' stable names; a number that a repeat has not is an empty field.

    Text that a spreadsheet would take for a formula has an apostrophe before it, which it does not show.
    """
    keys = [key.name for key in result.keys]
    columns = [column.name for column in result.columns]
    name, started = _plain(result.name), _plain(result.started)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["bench", "started", *map(_plain, keys), "repeat", *map(_plain, columns)])
    for row in result.rows:
        for repeat in range(max(map(len, row.values.values()), default=0)):
            numbers = (row.values.get(column, ()) for column in columns)
            writer.writerow(
                [
                    *(name, started),
                    *(_plain(row.keys.get(key, "")) for key in keys),
                    repeat + 1,
                    *(values[repeat] if repeat < len(values) else None for values in numbers),
                ]
            )
    return out.getvalue()


def _plain(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def write_csv(file: Path, result: BenchResult) -> None:
    """Write it. Raises InvalidRequest where the file cannot be written."""
    try:
        replace_file(file, csv_text(result).encode())
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}", param="csv") from error
