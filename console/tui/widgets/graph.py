"""Graph: a bounded curve over time in eighth blocks, with its bound and unit, and marks where a knob moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from console.tui.widgets.plot import Cell, Ink, column_of, columns, draw, missed_columns, nice_bound
from engine.snapshot import Mark, Second

GUTTER = 7
HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class Curve:
    """value: what is drawn of each second; style: a CSS variable."""

    value: Callable[[Second], float | None]
    style: str


@dataclass(frozen=True, slots=True)
class Scale:
    """The upper edge: `bound` where it is fixed (100%), else a round number above all that is shown and `least`.

    label: how it is written, with its unit.
    """

    label: Callable[[float], str]
    least: float = 1.0
    bound: float | None = None

    def top(self, shown: Sequence[float | None]) -> float:
        """The value at the upper edge."""
        if self.bound is not None:
            return self.bound
        highest = max((value for value in shown if value is not None), default=0.0)
        return nice_bound(highest * HEADROOM, self.least)


ZOOMS = (1, 2, 5, 10)
"""Seconds that a column may show."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time that graphs show: it ends with the last second of `history`."""

    history: Sequence[Second] = ()
    marks: Sequence[Mark] = ()
    seconds_per_column: int = 1


class Plot(Widget):
    """A widget that is drawn row by row."""

    def line(self, y: int) -> Content:
        """Return row `y` as content."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """Return row `y` as the terminal takes it."""
        return Visual.to_strips(self, self.line(y), self.size.width, 1, self.visual_style, pad=True)[0]


class Graph(Plot):
    """One title row and the plot below it: `front` filled to the ground, `behind` (never below it) rising above it."""

    DEFAULT_CSS = """
    Graph { height: 1fr; width: 1fr; min-height: 2; }
    """

    def __init__(self, scale: Scale, front: Curve, behind: Curve | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._scale, self._front, self._behind = scale, front, behind
        back = behind.style if behind else front.style
        self._inks: dict[Ink, str] = {
            "": "$graph-mark",
            "front": front.style,
            "behind": back,
            "both": f"{front.style} on {back}",
            "mark": f"$graph-mark on {front.style}",
        }
        self._title, self._span = Content(""), Span()
        self._plot: list[list[Cell]] = []
        self._top_label = ""

    def show(self, title: Content, span: Span) -> None:
        """Draw the graph again, where anything changed."""
        changed = not title.is_same(self._title)
        self._title, self._span = title, span
        if self._replot() or changed:
            self.refresh()

    def on_resize(self) -> None:
        """Another width shows another span."""
        self._replot()
        self.refresh()

    def _replot(self) -> bool:
        width, rows = max(0, self.size.width - GUTTER), max(0, self.size.height - 1)
        span, step = self._span, self._span.seconds_per_column
        front = columns(span.history, width, step, self._front.value)
        behind = columns(span.history, width, step, self._behind.value) if self._behind else []
        top = self._scale.top([*front, *behind])
        plot = draw(front, behind, top, rows, ascii_only=is_ascii(self.app), shaded=is_lettered(self.app))
        for column in missed_columns(span.history, width, step) if plot else ():
            plot[-1][column] = Cell("·", "")
        if span.history and plot:
            newest = span.history[-1].at
            marks = [(max(0, column_of(mark.at, newest, step)), mark.text) for mark in span.marks]
            plot = [_mark(row, marks, named=row is plot[0]) for row in plot]
        before = (self._plot, self._top_label)
        self._plot, self._top_label = plot, self._scale.label(top)
        return before != (self._plot, self._top_label)

    def line(self, y: int) -> Content:
        """Title first, then the plot from its upper edge down."""
        if y == 0 or y > len(self._plot):
            return for_terminal(self.app, self._title if y == 0 else Content(""))
        label = self._top_label if y == 1 else "0" if y == len(self._plot) else ""
        parts: list[Content | str | tuple[str, str]] = [(f"{label:>{GUTTER - 1}}▕", "$graph-axis")]
        runs = groupby(self._plot[y - 1], lambda cell: cell.ink)
        parts.extend(("".join(cell.char for cell in run), self._inks[ink]) for ink, run in runs)
        return for_terminal(self.app, Content.assemble(*parts))


def _mark(row: list[Cell], marks: Sequence[tuple[int, str]], *, named: bool) -> list[Cell]:
    """`row` with a dotted line where a knob moved; `named`: with what was done, where no curve is in the way."""
    marked, width = list(row), len(row)
    seen = [(width - 1 - back, text) for back, text in marks if 0 <= width - 1 - back < width]
    for column, _ in seen:
        if row[column].char in " █#":
            marked[column] = Cell("┊", "mark" if row[column].ink == "front" else row[column].ink)
    for column, text in reversed(seen) if named else ():
        for start in (column + 1, column - len(text)):
            label = range(start, start + len(text))
            if label.start >= 0 and label.stop <= width and all(marked[at] == (" ", "") for at in label):
                marked[label.start : label.stop] = [Cell(char, "") for char in text]
                break
    return marked


# Scatter: a few named points between zero and round bounds, the one that counts now drawn full.

_MIN_BOUND = 1e-4


@dataclass(frozen=True, slots=True)
class Point:
    """now: it is the one that counts.  front: nothing beats it in both."""

    x: float
    y: float
    label: str
    now: bool = False
    front: bool = False


@dataclass(frozen=True, slots=True)
class _Cell:
    char: str = " "
    style: str = ""


_BLANK = _Cell()


class Scatter(Plot):
    """One title row, the points, and the bound of x below them. Styles are CSS variables."""

    DEFAULT_CSS = """
    Scatter { height: 1fr; width: 1fr; min-height: 3; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown: tuple[str, Content, tuple[Point, ...]] = ("", Content(""), ())
        self._label: Callable[[float], str] = str

    def show(self, title: Content, points: Sequence[Point], label: Callable[[float], str], empty: str) -> None:
        """label: how x is written.  empty: text where there is no point."""
        shown = (empty, title, tuple(points))
        if shown[0] != self._shown[0] or not title.is_same(self._shown[1]) or shown[2] != self._shown[2]:
            self._shown, self._label = shown, label
            self.refresh()

    def line(self, y: int) -> Content:
        """Title first, then the points from their upper edge down."""
        (empty, title, points), rows = self._shown, self.size.height - 2
        width = max(0, self.size.width - GUTTER)
        if y == 0 or not points or not width or rows < 1:
            line = title if y == 0 else Content.styled(empty if y == 1 else "", "$muted")
            return for_terminal(self.app, line.truncate(self.size.width, ellipsis=True))
        top, right = bounds(points)
        if y > rows:
            axis = f"{self._label(right):>{self.size.width}}"
            return for_terminal(self.app, Content.styled(axis, "$graph-axis"))
        label = f"{top:.0f}" if y == 1 else "0" if y == rows else ""
        runs = groupby(place(points, width, rows)[y - 1], lambda cell: cell.style)
        cells = [("".join(cell.char for cell in run), style) for style, run in runs]
        return for_terminal(self.app, Content.assemble((f"{label:>{GUTTER - 1}}▕", "$graph-axis"), *cells))


def bounds(points: Sequence[Point]) -> tuple[float, float]:
    """Round upper edges of y and x, above all points."""
    top = nice_bound(max(point.y for point in points) * HEADROOM)
    return top, nice_bound(max(point.x for point in points) * HEADROOM, _MIN_BOUND)


def place(points: Sequence[Point], width: int, rows: int) -> list[list[_Cell]]:
    """Rows of cells, uppermost first. A point's name stands next to it where there is room; the one that counts is
    placed first and drawn over others, then the front."""
    top, right = bounds(points)
    cells = [[_BLANK] * width for _ in range(rows)]
    spots = [
        (
            min(width - 1, int(point.x / right * width)),
            rows - 1 - min(rows - 1, int(point.y / top * rows)),
            point,
        )
        for point in sorted(points, key=lambda point: (point.now, point.front))
    ]
    for column, row, point in spots:
        style = "bold $graph-tokens" if point.now else "$graph-tokens" if point.front else "$muted"
        cells[row][column] = _Cell("●" if point.now else "◆" if point.front else "○", style)
    for column, row, point in sorted(spots, key=lambda spot: (not spot[2].now, not spot[2].front)):
        style = "bold $foreground" if point.now else "$muted"
        for line, start in (
            (row, column + 2),
            (row, column - 1 - len(point.label)),
            (row - 1, column),
            (row + 1, column),
        ):
            room = range(start, start + len(point.label))
            if (
                0 <= line < rows
                and room.start >= 0
                and room.stop <= width
                and all(cells[line][at] is _BLANK for at in room)
            ):
                cells[line][room.start : room.stop] = [_Cell(char, style) for char in point.label]
                break
    return cells
