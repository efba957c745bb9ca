"""The arithmetic of a graph: seconds into columns, values into eighths of a cell. Nothing here knows a widget."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from textual.content import Content
from textual.style import Style

from console.tui.widgets.glyphs import ASCII_COLUMNS, COLUMNS, ROWS
from engine.snapshot import Second, TenSeconds

Ink = str
Sample = Second | TenSeconds
S = TypeVar("S", Second, Sample)
Values = Sequence[float | None]

MISSED_S = 2.5
"""Two seconds of history that are so far apart have some missing between them; closer ones, the later came late."""
_EIGHTHS = 8
_NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class Cell(NamedTuple):
    """One character. ink: what colours it; "both" is the front curve before the one behind; else a CSS variable."""

    char: str
    ink: Ink


def nice_bound(value: float, least: float = 1.0) -> float:
    """A round number that is not below `value` nor `least`."""
    value = max(value, least)
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in _NICE if step * power >= value * (1 - 1e-9)), 10 * power)


def column_of(at: float, newest: float, seconds_per_column: int) -> int:
    """How many columns before the newest one the moment `at` lies. Columns begin at whole multiples of their length,
    so that a column never changes once it is past."""
    return math.floor(newest / seconds_per_column) - math.floor(at / seconds_per_column)


def moment_of(back: int, newest: float, seconds_per_column: int) -> float:
    """When the column that is `back` columns before the newest one begins: the inverse of `column_of`."""
    return (math.floor(newest / seconds_per_column) - back) * seconds_per_column


def next_moment(at: float | None, by: int, *, oldest: float, newest: float, seconds_per_column: int) -> float | None:
    """The moment of a cursor one column earlier (-1) or later (1) than `at`, beginning with the newest; None after
    that."""
    found = newest if at is None else at + by * seconds_per_column
    leaves = found > newest or (at is None and by > 0)
    return None if leaves else max(oldest, found)


class Columns:
    """The samples of a history in the last `width` columns of a plot.

    width: columns.  missed: those, counted from the left, that lie where seconds are missing from the history.
    """

    def __init__(self, history: Sequence[Sample], width: int, seconds_per_column: int) -> None:
        self.width = width
        self.missed: list[int] = []
        self._late: list[int] = []
        self._shown: list[tuple[int, int, Sample]] = []  # column, weight and sample, newest first
        newest, after = history[-1].at if history else 0.0, math.inf
        before = -1  # how many columns back `after` is
        for sample in reversed(history):
            back = column_of(sample.at, newest, seconds_per_column)
            if back < 0:  # the clock was set back since
                continue
            if back > before + 1 and after < math.inf:
                gap = range(max(0, width - back), width - 1 - before)
                if after - sample.at < _missed_s(sample):
                    self._late += gap
                else:
                    self.missed += gap
            if back >= width:
                break
            after, before = sample.at, back
            self._shown.append((width - 1 - back, sample.seconds if isinstance(sample, TenSeconds) else 1, sample))
        self._late.sort()

    def values(self, value: Callable[[Any], float | None]) -> list[float | None]:
        """Return the mean of `value` over each column, oldest first; None where nothing was measured.

        A column between two seconds of which the later one came a little late has what the earlier one had.
        """
        sums, counts = [0.0] * self.width, [0] * self.width
        for column, weight, sample in self._shown:
            measured = value(sample)
            if measured is not None:
                sums[column] += measured * weight
                counts[column] += weight
        found = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        for column in self._late:
            if column > 0:
                found[column] = found[column - 1]
        return found


def columns(
    history: Sequence[S], width: int, seconds_per_column: int, value: Callable[[S], float | None]
) -> list[float | None]:
    """Return the values of one curve, as `Columns` has them."""
    return Columns(history, width, seconds_per_column).values(value)


def _missed_s(sample: Sample) -> float:
    return 10 + MISSED_S if isinstance(sample, TenSeconds) else MISSED_S


LONG_S = 200
"""A time from here on is said in minutes."""
_AXIS_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
_MIN_LABEL_CELLS = 11
_NOW = "now"


def seconds_per_column(span_s: int, width: int, history_s: int) -> int:
    """Whole seconds, so that `width` columns show about `span_s` and no more than the history has."""
    step = max(1, round(span_s / max(1, width)))
    return step if step * width <= history_s else max(1, span_s // max(1, width))


def time_axis(width: int, seconds_per_column: int, signs: Collection[int] = ()) -> str:
    """The row below a graph: "−60 s", "−30 s" under the columns of that age, "now" under the last.

    signs: columns with a sign. A label that one would touch is left out, "now" too.
    """

    def is_free(start: int, label: str) -> bool:
        return start >= 0 and not any(start - 1 <= column <= start + len(label) for column in signs)

    axis, now = [" "] * max(0, width), max(0, width - len(_NOW))
    if is_free(now, _NOW):
        axis[now:] = _NOW[: len(axis)]
    least = max(_MIN_LABEL_CELLS * seconds_per_column, 60 if width * seconds_per_column >= LONG_S else 0)
    interval = next((step for step in _AXIS_STEPS_S if step >= least), 3600)
    for age in range(interval, width * seconds_per_column, interval):
        label = f"−{age} s" if interval < 60 else f"−{age // 60} min"
        start = width - 1 - age // seconds_per_column - len(label) // 2
        if is_free(start, label) and start + len(label) + 1 < now:
            axis[start : start + len(label)] = label
    return "".join(axis)


def draw(
    front: Values, behind: Values, top: float, rows: int, *, ascii_only: bool = False, shaded: bool = False
) -> list[list[Cell]]:
    """Rows of cells, uppermost first, of the curve `front` filled to the ground and of `behind` rising above it.

    A value above `top` fills its column; a value above zero shows at least an eighth.
    shaded: fill what is behind with a shade, where colours cannot distinguish it from the front.
    """
    blocks = ASCII_COLUMNS if ascii_only else COLUMNS
    low = [_eighths(value, top, rows) for value in front]
    high = [_eighths(value, top, rows) for value in behind] if behind else low
    cells = [
        [_cell(near - row * _EIGHTHS, far - row * _EIGHTHS, blocks) for near, far in zip(low, high, strict=True)]
        for row in reversed(range(rows))
    ]
    return [[_shade(cell) for cell in row] for row in cells] if shaded else cells


def _shade(cell: Cell) -> Cell:
    return Cell("░", cell.ink) if cell.ink == "behind" else cell


def _eighths(value: float | None, top: float, rows: int) -> int:
    if value is None or value <= 0:
        return 0
    return max(1, min(rows * _EIGHTHS, round(value / top * rows * _EIGHTHS)))


def _cell(near: int, far: int, blocks: str) -> Cell:
    """near, far: how high the two curves stand above this cell's floor, in eighths; either may be out of the cell."""
    if near > _EIGHTHS:
        return Cell(blocks[-1], "front")
    if near > 0:
        far = min(_EIGHTHS, far)
        return Cell(blocks[near], "both" if near < far and far - near >= _EIGHTHS - far else "front")
    if far > 0:
        return Cell(blocks[min(_EIGHTHS, far)], "behind")
    return Cell(" ", "")


# Bars in eighths of a cell: one level against its whole, or several parts stacked to a whole.

_CELL_EIGHTHS = 8


class BarSegment(NamedTuple):
    """One part of a stack. style: a CSS variable; letter: what fills it in ASCII."""

    value: float
    style: str
    letter: str


def meter(fraction: float | None, width: int, style: str) -> Content:
    """A level against 100% as a line in half cells, what is left a thinner one; bare where it is not known."""
    halves = round(min(1.0, max(0.0, fraction or 0.0)) * width * 2)
    whole, half = divmod(halves, 2)
    line = "━" * whole + "╸" * half
    return Content.assemble((line, style), ("─" * (width - len(line)), "$gpu-free"))


_SMALL_GRAPH = "small-graph"


def small_graph(drawn: Content, cursor: int | None = None) -> Content:
    """A row of columns, a cell each, which `column_under` finds under the mouse.

    cursor: the column to highlight, counted back from the last one.
    """
    graph = drawn.stylize(Style.from_meta({_SMALL_GRAPH: True}))
    at = -1 if cursor is None else len(graph) - 1 - cursor
    return graph.stylize("reverse", at, at + 1) if 0 <= at < len(graph) else graph


def column_under(line: Content, x: int) -> tuple[int, int] | None:
    """The columns of the `small_graph` in the cell `x` of a line, and which of them that is, counted back from the last
    one; None where there is none."""
    for start, end, style in line.spans:
        if start <= x < end and isinstance(style, Style) and style.meta.get(_SMALL_GRAPH):
            return end - start, end - 1 - x
    return None


def spark(
    shares: Sequence[float | None], style: str, *, ascii_only: bool = False, cursor: int | None = None
) -> Content:
    """Shares of a whole over time in one row, a column each, against 100%; a dot where one is missing.

    cursor: as of a `small_graph`.
    """
    cells = [cell.char for cell in draw(shares, (), 1.0, 1, ascii_only=ascii_only)[0]]
    begins = next((at for at, share in enumerate(shares) if share is not None), len(shares))
    for at in range(begins, len(shares)):
        if shares[at] is None:
            cells[at] = "·"
    return small_graph(Content.styled("".join(cells), f"{style} on $gpu-free"), cursor)


def stack(parts: Sequence[BarSegment], width: int, *, ascii_only: bool = False) -> Content:
    """The parts side by side in `width` cells; each that is not zero shows, if only as an eighth of a cell."""
    edges = _edges([part.value for part in parts], width * _CELL_EIGHTHS)
    cells: list[tuple[str, str]] = []
    for cell in range(width):
        start, end = cell * _CELL_EIGHTHS, (cell + 1) * _CELL_EIGHTHS
        inside = [index for index in range(len(parts)) if edges[index] < end and edges[index + 1] > start]
        if not inside:
            cells.append((" ", ""))
            continue
        first, second = inside[0], max(inside[1:], key=lambda index: edges[index + 1] - edges[index], default=None)
        if second is None:
            cells.append((parts[first].letter if ascii_only else ROWS[-1], parts[first].style))
            continue
        share = min(edges[first + 1], end) - max(edges[first], start)
        if ascii_only:
            larger = parts[first if share * 2 >= _CELL_EIGHTHS else second]
            cells.append((larger.letter, larger.style))
        else:
            cells.append((ROWS[share], f"{parts[first].style} on {parts[second].style}"))
    return Content.assemble(*cells).simplify()


def _edges(values: Sequence[float], room: int) -> list[int]:
    """Where each value begins and the last ends, in eighths. Sums to `room`; the largest pays for the rounding."""
    total = sum(max(0.0, value) for value in values)
    if total <= 0:
        return [0] * (len(values) + 1)
    sizes = [max(1, round(value / total * room)) if value > 0 else 0 for value in values]
    sizes[max(range(len(sizes)), key=sizes.__getitem__)] += room - sum(sizes)
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return edges
