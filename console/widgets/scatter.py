"""Scatter: a few named points between zero and round bounds, the one that counts now drawn full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from console.widgets.glyphs import fitted
from console.widgets.graph import GUTTER, HEADROOM
from console.widgets.plot import nice_bound

_LEAST = 1e-4


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


class Scatter(Widget):
    """One title row, the points, and the bound of x below them. Styles are CSS variables."""

    DEFAULT_CSS = """
    Scatter { height: 1fr; width: 1fr; min-height: 3; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown: tuple[str, Content, tuple[Point, ...]] = ("", Content(""), ())
        self._label: Callable[[float], str] = str

    def show(self, title: Content, points: Sequence[Point], label: Callable[[float], str], empty: str) -> None:
        """label: how x is written.  empty: what is said where there is no point."""
        shown = (empty, title, tuple(points))
        if shown[0] != self._shown[0] or not title.is_same(self._shown[1]) or shown[2] != self._shown[2]:
            self._shown, self._label = shown, label
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """Title first, then the points from their upper edge down."""
        return Visual.to_strips(self, self.line(y), self.size.width, 1, self.visual_style, pad=True)[0]

    def line(self, y: int) -> Content:
        """Row `y` as content."""
        (empty, title, points), rows = self._shown, self.size.height - 2
        width = max(0, self.size.width - GUTTER)
        if y == 0 or not points or not width or rows < 1:
            said = title if y == 0 else Content.styled(empty if y == 1 else "", "$muted")
            return fitted(self.app, said.truncate(self.size.width, ellipsis=True))
        top, right = bounds(points)
        if y > rows:
            axis = f"{self._label(right):>{self.size.width}}"
            return fitted(self.app, Content.styled(axis, "$graph-axis"))
        label = f"{top:.0f}" if y == 1 else "0" if y == rows else ""
        runs = groupby(place(points, width, rows)[y - 1], lambda cell: cell.style)
        cells = [("".join(cell.char for cell in run), style) for style, run in runs]
        return fitted(self.app, Content.assemble((f"{label:>{GUTTER - 1}}▕", "$graph-axis"), *cells))


def bounds(points: Sequence[Point]) -> tuple[float, float]:
    """Round upper edges of y and x, above all points."""
    top = nice_bound(max(point.y for point in points) * HEADROOM)
    return top, nice_bound(max(point.x for point in points) * HEADROOM, _LEAST)


def place(points: Sequence[Point], width: int, rows: int) -> list[list[_Cell]]:
    """Rows of cells, uppermost first. A point's name stands beside it where there is room; the one that counts is
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
