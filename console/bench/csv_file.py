"""A result as CSV: a line for each row and repeat, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from console.bench.result import BenchResult
from engine.errors import InvalidRequest
from engine.files import replace_file


def csv_text(result: BenchResult) -> str:
    """The header has the columns' stable names; a number that a repeat has not is an empty field."""
    keys = [key.name for key in result.keys]
    columns = [column.name for column in result.columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["bench", "started", *keys, "repeat", *columns])
    for row in result.rows:
        for repeat in range(max(map(len, row.values.values()), default=0)):
            numbers = (row.values.get(column, ()) for column in columns)
            writer.writerow(
                [
                    *(result.name, result.started),
                    *(row.keys.get(key, "") for key in keys),
                    repeat + 1,
                    *(values[repeat] if repeat < len(values) else None for values in numbers),
                ]
            )
    return out.getvalue()


def write_csv(file: Path, result: BenchResult) -> None:
    """Write it. Raises InvalidRequest where the file cannot be written."""
    try:
        replace_file(file, csv_text(result).encode())
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}", param="csv") from error
