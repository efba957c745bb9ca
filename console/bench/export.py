"""A result as a plot in SVG: medians with the least and the most of the repeats, over what the rows were measured for.

`plot.css` has its style, which follows the reader's light or dark mode.
Drawn here: pygal has no error bars and puts a script into each file; matplotlib takes 2 s to import and 35 MiB.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from xml.sax.saxutils import escape

from console.bench.result import BenchResult, Column, Key, Row, columns_with_numbers
from console.bench.text import key_text
from engine.errors import InvalidRequest
from engine.text.printable import printable

# A result as CSV: a line for each row and repeat, for spreadsheets and notebooks.

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


WIDTH, HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 62, 58
_NOTE_LETTER, _TITLE_LETTER = 7.3, 10.5
"""About how wide a letter is."""
_TICKS = 5
_DIGITS = 12
_LOOKS = 6
"""Number of series styles in plot.css."""


@dataclass(frozen=True, slots=True)
class Point:
    """at: how far along the axis, from 0 to 1.  median, least, most: of the repeats."""

    at: float
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one look. name: what all its rows have in common."""

    name: str
    points: tuple[Point, ...]


def plot(result: BenchResult, column: str = "") -> str:
    """An SVG document of one column, by default the first that a table shows, over the last key; the other keys
    make series. Raises InvalidRequest for a column that the result has not, or that has no number."""
    chosen = _column(result, column)
    along = result.keys[-1] if result.keys else Column(name="", title="")
    ticks = list(dict.fromkeys(row.keys.get(along.name, "") for row in result.rows))
    series = _series(result, chosen, along.name, ticks)
    top = _round_up(max(point.most for each in series for point in each.points))
    parts = [
        _text(_LEFT, 28, _headline(chosen), "title"),
        _text(_LEFT, 47, _subtitle(result), "note"),
        *_grid(top),
        *_marks(ticks, along),
        *(line for index, each in enumerate(series) for line in _drawn(each, index, top, joined=_between(ticks))),
        *(_legend(series, _headline(chosen)) if len(series) > 1 else ()),
    ]
    style = files("console.bench").joinpath("plot.css").read_text(encoding="utf-8")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(printable(f'{result.name}: {chosen.title}'))}</title>\n<style>\n{style}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>\n{body}\n</svg>\n'
    )


def _column(result: BenchResult, name: str) -> Column:
    with_numbers = columns_with_numbers(result.columns, result.rows)
    if not name:
        shown = [each for each in with_numbers if each.shown]
        if shown:
            return shown[0]
        raise InvalidRequest("the result has no numbers to draw", param="column")
    chosen = next((each for each in with_numbers if each.name == name), None)
    if chosen is None:
        names = ", ".join(each.name for each in with_numbers)
        raise InvalidRequest(f"the result has no numbers named {name}; available: {names}", param="column")
    return chosen


def _series(result: BenchResult, column: Column, along: str, ticks: Sequence[Key]) -> list[Series]:
    found: dict[str, list[Point]] = {}
    for row in result.rows:
        point = _point(row, column.name, _place(ticks, row.keys.get(along, "")))
        if point is not None:
            others = [
                f"{key.title} {row.keys[key.name]}" for key in result.keys if key.name != along and key.name in row.keys
            ]
            found.setdefault(", ".join(others), []).append(point)
    return [Series(name, tuple(sorted(points, key=lambda point: point.at))) for name, points in found.items()]


def _point(row: Row, column: str, at: float) -> Point | None:
    median, spread = row.median(column), row.spread(column)
    return None if median is None or spread is None else Point(at, median, *spread)


def _place(ticks: Sequence[Key], tick: Key) -> float:
    """Where a key lies: as far along as its number where all are numbers that differ, else in its turn."""
    numbers = [value for value in ticks if isinstance(value, int | float)]
    if len(numbers) == len(ticks) > 1 and isinstance(tick, int | float):
        low, high = min(numbers), max(numbers)
        if low > 0 and high / low >= 16:  # doublings are as far apart as each other
            return math.log(tick / low) / math.log(high / low)
        return (tick - low) / (high - low)
    return ticks.index(tick) / max(1, len(ticks) - 1) if len(ticks) > 1 else 0.5


def _round_up(value: float) -> float:
    """The next number that ticks divide well."""
    if value <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(value))
    return next(step * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * factor >= value)


def _x(at: float) -> float:
    inset = 28
    return _LEFT + inset + at * (WIDTH - _LEFT - _RIGHT - 2 * inset)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _digits(step: float) -> int:
    """The fewest digits by which ticks at this distance differ."""
    return next((digits for digits in range(_DIGITS) if math.isclose(round(step, digits), step)), _DIGITS)


def _grid(top: float) -> list[str]:
    lines, digits = [], _digits(top / _TICKS)
    for tick in range(_TICKS + 1):
        y, value = _y(tick / _TICKS), top * tick / _TICKS
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(_text(_LEFT - 10, y + 4, f"{value:,.{digits}f}", "tick end"))
    return lines


def _marks(ticks: Sequence[Key], along: Column) -> list[str]:
    marks = [_text(_x(_place(ticks, tick)), HEIGHT - _BOTTOM + 20, key_text(tick), "tick middle") for tick in ticks]
    return [*marks, _text(_x(0.5), HEIGHT - 14, _headline(along), "axis middle")]


def _between(ticks: Sequence[Key]) -> bool:
    """Return whether there are values between two ticks, as there are not between words."""
    return any(isinstance(tick, int | float) for tick in ticks)


def _drawn(series: Series, index: int, top: float, *, joined: bool) -> list[str]:
    look = f"series s{index % _LOOKS}"
    places = [(_x(point.at), _y(point.median / top)) for point in series.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    spreads = [
        f'<line class="{look} spread" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(point.least / top):.1f}" '
        f'y2="{_y(point.most / top):.1f}"/>'
        for (x, _), point in zip(places, series.points, strict=True)
        if point.least < point.most
    ]
    dots = [f'<circle class="{look} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return [*([f'<polyline class="{look} line" points="{line}"/>'] if joined else ()), *spreads, *dots]


def _legend(series: Sequence[Series], title: str) -> list[str]:
    """Entries right of the title, from left to right; those without room are in the line below."""
    parts: list[str] = []
    lines: tuple[list[tuple[int, Series]], list[tuple[int, Series]]] = ([], [])
    room = WIDTH - _RIGHT - _LEFT - len(title) * _TITLE_LETTER
    for index, each in enumerate(series):
        room -= _entry_width(each)
        lines[room < 0].append((index, each))
    for line, entries in enumerate(lines):
        x = WIDTH - _RIGHT - sum(_entry_width(each) for _, each in entries)
        y = 28 + 19 * line
        for look, one in entries:
            parts.append(f'<circle class="series s{look % _LOOKS} dot" cx="{x + 5:.1f}" cy="{y - 4}" r="4"/>')
            parts.append(_text(x + 15, y, one.name, "note"))
            x += _entry_width(one)
    return parts


def _entry_width(series: Series) -> float:
    return len(series.name) * _NOTE_LETTER + 32


def _headline(column: Column) -> str:
    return f"{column.title}, {column.unit}" if column.unit else column.title


def _subtitle(result: BenchResult) -> str:
    repeats = f"{result.repeats} repeats" if result.repeats > 1 else "1 repeat"
    return f"{result.name} · {result.target.model} · {result.machine.cpu} · {result.started[:10]} · {repeats}"


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{escape(printable(text))}</text>'
