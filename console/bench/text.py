"""A result, and how far a bench is, for a person at a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from console.bench.result import BenchProgress, BenchResult, Column, Key, Row, columns_with_numbers, key_texts
from engine.text.printable import printable

# Plain tables for a terminal or a page.


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first is aligned left, the others right. Each row is one line."""
    lines = [[printable(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


_GIB = 1 << 30
_SMALL = 0.1


def result_text(result: BenchResult, *, everything: bool = False) -> str:
    """The table, with all that one must know to read it. everything: every number that there is, not those of the table
    alone."""
    if not result.rows:
        notes = map(printable, result.notes)
        return "\n\n".join((heading_text(result), *notes, "Ended early: nothing was measured."))
    columns = [column for column in columns_with_numbers(result.columns, result.rows) if everything or column.shown]
    lines = [[column_title(column) for column in (*result.keys, *columns)]]
    lines += [row_cells(result.keys, columns, row) for row in result.rows]
    if everything:  # too many for columns: a line each, and the rows are side by side
        lines = [list(line) for line in zip(*lines, strict=True)]
    parts = [heading_text(result), table(lines[0], lines[1:])]
    if result.published:
        parts.append(published_text(result))
    if result.notes:
        parts.append("\n".join(map(printable, result.notes)))
    if not result.complete:
        parts.append("Ended early; partial results.")
    return "\n\n".join(parts)


def row_cells(keys: Sequence[Column], columns: Sequence[Column], row: Row) -> list[str]:
    """The keys of a row, then its numbers."""
    return [*(key_text(row.keys.get(key.name, "")) for key in keys), *(cell(row, column) for column in columns)]


def column_title(column: Column) -> str:
    """The column's title with its unit."""
    return f"{column.title} ({column.unit})" if column.unit else column.title


def cell(row: Row, column: Column) -> str:
    """The number of a row."""
    median, spread = row.median(column.name), row.spread(column.name)
    if median is None or spread is None:
        return "-"
    return median_text(median, spread, column)


def median_text(median: float, spread: tuple[float, float], column: Column) -> str:
    """A median, and half the distance of the least and the most of the repeats, as a share of it."""
    share = 50 * (spread[1] - spread[0]) / abs(median) if median else 0.0
    return f"{figure(median, column)}{f' ±{share:.0f}%' if share else ''}"


def figure(value: float, column: Column) -> str:
    """A number with as many digits as its column has; where those would leave little or nothing of it, with two that
    say something."""
    digits = column.digits
    if digits and 0 < abs(value) < _SMALL:
        digits = max(digits, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def progress_text(progress: BenchProgress) -> str:
    """One line."""
    repeat = f"repeat {progress.repeat + 1} of {progress.repeats}, " if progress.repeats > 1 else ""
    left = "" if progress.left_s is None else f", about {span(progress.left_s)} left"
    return f"{progress.bench}: {repeat}{progress.doing}, {progress.done} of {progress.total}{left}"


def row_text(progress: BenchProgress) -> str:
    """The row that was measured last, in one line: what it is, and its first numbers."""
    row = next(row for row in progress.rows if key_texts(row.keys) == progress.doing)
    shown = [column for column in progress.columns if column.shown and row.numbers(column.name)]
    last = ((column, row.numbers(column.name)[-1]) for column in shown)
    texts = (f"{column.title} {figure(value, column)} {column.unit}".strip() for column, value in last)
    return f"{progress.doing}: {', '.join(texts)}"


def span(seconds: float) -> str:
    """A time for a person."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def heading_text(result: BenchResult) -> str:
    """Two lines: the target, and the machine with the settings."""
    target, machine, versions = result.target, result.machine, result.versions
    if target.kind == "http":
        what = (
            f"{target.model or 'the model'} at {target.url} ({target.dialect}, tokens counted by {target.counted_by})"
        )
    else:
        what = f"{target.model} ({target.backend}, {target.dtype})"
    devices = "".join(f", {device.name}" for device in machine.devices)
    repeats = f"{result.repeats} repeat{'s' * (result.repeats != 1)}, " if result.rows else ""
    lines = (
        f"bench {result.name}: {what}, {repeats}{span(result.duration_s)}",
        f"{machine.cpu}{devices}, {machine.ram_bytes / _GIB:.0f} GiB; ericllm {versions.ericllm}, "
        f"torch {versions.torch or 'none'}, Python {versions.python}",
    )
    return "\n".join(map(printable, lines))


def published_text(result: BenchResult) -> str:
    """The rows of others as a table, and where they come from."""
    names = {name for each in result.published for name in each.values}
    columns = [column for column in result.columns if column.name in names]
    keys = [key for key in result.keys if any(key.name in each.keys for each in result.published)]
    rows = [
        [
            each.who,
            each.device,
            *(key_text(each.keys.get(key.name, "")) for key in keys),
            *(
                f"{each.values[column.name]:,.{column.digits}f}" if column.name in each.values else ""
                for column in columns
            ),
        ]
        for each in result.published
    ]
    sources = dict.fromkeys(each.source for each in result.published)
    header = ["", "on", *(column_title(column) for column in (*keys, *columns))]
    return f"Published results on other hardware:\n{table(header, rows)}\nFrom {printable('; '.join(sources))}."


def key_text(value: Key) -> str:
    """A key as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)
