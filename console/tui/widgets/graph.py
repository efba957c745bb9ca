"""Graph: a bounded curve over time in eighth blocks, with its bound, unit and time axis, and marks of changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from textual.content import Content
from textual.events import MouseMove
from textual.message import Message
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from console import text
from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from console.tui.widgets.plot import (
    LONG_S,
    Cell,
    Columns,
    Ink,
    Sample,
    Values,
    column_of,
    draw,
    moment_of,
    next_moment,
    nice_bound,
    seconds_per_column,
    time_axis,
)
from console.tuning.effects import changes
from console.tuning.knobs import knob_text, knob_title
from engine.snapshot import Mark, Snapshot

GUTTER = 7
HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class Curve:
    """value: what is drawn of each second; style: a CSS variable; name: next to the value under the cursor.

    reading: the value there, where it is not the one that is drawn.
    """

    value: Callable[[Sample], float | None]
    style: str
    name: str = ""
    reading: Callable[[Sample], float | None] | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The upper edge: `bound` where it is fixed (100%), else a round number above all that is shown and `least`.

    label: how it is written, with its unit.  clips: leave few values that are far above the others out of it.
    """

    label: Callable[[float], str]
    least: float = 1.0
    bound: float | None = None
    clips: bool = False

    def top(self, shown: Sequence[float | None]) -> float:
        """The value at the upper edge."""
        if self.bound is not None:
            return self.bound
        values = [value for value in shown if value is not None]
        if self.clips and values:
            usual = [value for value in values if value <= _FAR_ABOVE * median(values)]
            values = usual if len(usual) >= (1 - _FEW) * len(values) else values
        return nice_bound(max(values, default=0.0) * HEADROOM, self.least)


_FAR_ABOVE, _FEW = 4.0, 0.25
"""Values this many times the median are clipped, where they are no more than this share of all."""
_CLIPPED = "↑"


ZOOMS = (60, 300, 600, 3600)
"""Seconds that graphs show about: whole seconds for each column may make more or less of them."""

HISTORY_S = 600
_SIGNS = {
    "failure": ("✖", "$worker-failed"),
    "worker": ("✖", "$worker-failed"),
    "warning": ("•", "$warning"),
    "swap": ("◇", "$worker-loading"),
    "load": ("▼", "$worker-loading"),
    "unload": ("○", "$worker-draining"),
    "drain": ("◒", "$worker-draining"),
    "knob": ("┊", "$graph-mark"),
}
"""By kind, the most important first: of several in one column it is the one that shows."""
_EVENT = _SIGNS["warning"]


def next_zoom(seconds: int) -> int:
    """The next of ZOOMS, and back to the first."""
    return ZOOMS[(ZOOMS.index(seconds) + 1) % len(ZOOMS)]


@dataclass(frozen=True, slots=True)
class Span:
    """The time that graphs show: about `seconds`, up to the last sample of `history`."""

    history: Sequence[Sample] = ()
    marks: Sequence[Mark] = ()
    seconds: int = 60
    _columns: dict[tuple[int, int], Columns] = field(default_factory=dict, compare=False, repr=False)

    def columns(self, width: int, step: int) -> Columns:
        """The samples in `width` columns of `step` seconds, placed once for all graphs of that width."""
        found = self._columns.get((width, step))
        if found is None:
            found = self._columns[width, step] = Columns(self.history, width, step)
        return found


def span_of(snapshot: Snapshot, seconds: int) -> Span:
    """The last `seconds` of a snapshot: an hour in tens of seconds, its newest ones by the second."""
    history: Sequence[Sample] = snapshot.history
    if seconds > HISTORY_S and snapshot.hour:
        newest = [second for second in snapshot.history if second.at >= snapshot.hour[-1].at + 5]
        history = (*snapshot.hour, *newest)
    return Span(history, merged_marks(snapshot.marks), seconds)


def merged_marks(marks: Sequence[Mark]) -> list[Mark]:
    """One mark for each change of a knob, of several steps or one, and the events; oldest first."""
    turned = [
        Mark(
            at=change.at,
            text=f"{knob_title(change.knob)} "
            f"{knob_text(change.knob, change.before)} → {knob_text(change.knob, change.after)}",
        )
        for change in changes(marks)
    ]
    others = [mark for mark in marks if not mark.knob or mark.before is None or mark.after is None]
    return sorted([*turned, *others], key=lambda mark: mark.at)


def mark_sign(mark: Mark) -> tuple[str, str]:
    """The character of a mark, and its CSS variable."""
    return _SIGNS.get(mark.kind, _EVENT)


def _importance(mark: Mark) -> int:
    kinds = list(_SIGNS)
    return -kinds.index(mark.kind if mark.kind in kinds else "warning")


def moment_text(at: float, newest: float) -> str:
    """ "12:03:41, 70 s ago"; newest: the last moment that graphs show."""
    return f"{text.local_time(at)}, {max(0, round(newest - at))} s ago"


class Plot(Widget):
    """A widget that is drawn row by row."""

    def line(self, y: int) -> Content:
        """Return row `y` as content."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """Return row `y` as the terminal takes it."""
        return Visual.to_strips(self, self.line(y), self.size.width, 1, self.visual_style, pad=True)[0]


def moment_under(plot: Plot, x: int, history: Sequence[Sample], seconds_per_column: int) -> float | None:
    """The moment in the cell `x` of a plot that ends with the last sample of `history`; None next to its columns."""
    back = plot.size.width - 1 - x
    return None if x < GUTTER or back < 0 or not history else moment_of(back, history[-1].at, seconds_per_column)


class Graph(Plot):
    """One title row, the plot: `front` filled to the ground, `behind` (never below it) rising above it; and the time
    axis, where there is room. Under the mouse, the title gives way to the values of that moment.

    names_marks: write what each mark stands for into the plot, where there is room.
    note: more to say of the samples of that moment."""

    DEFAULT_CSS = """
    Graph { height: 1fr; width: 1fr; min-height: 2; }
    """

    def __init__(
        self,
        scale: Scale,
        front: Curve,
        behind: Curve | None = None,
        *,
        names_marks: bool = True,
        note: Callable[[Sequence[Sample]], Content] | None = None,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._names_marks, self._note = names_marks, note
        self._scale, self._front, self._behind = scale, front, behind
        back = behind.style if behind else front.style
        self._inks: dict[Ink, str] = {
            "": "$graph-axis",
            "front": front.style,
            "behind": back,
            "both": f"{front.style} on {back}",
        }
        self._title, self._span = Content(""), Span()
        self._plotted: tuple[object, ...] = ()
        self._plot: list[list[Cell]] = []
        self._top_label, self._axis = "", Content("")
        self._step = 1
        self._cursor: float | None = None

    class Pointed(Message):
        """The mouse is on a moment of the graph, or has left it: None."""

        def __init__(self, at: float | None) -> None:
            super().__init__()
            self.at = at

    def on_mouse_move(self, event: MouseMove) -> None:
        """Say which moment is under the mouse."""
        self.post_message(self.Pointed(moment_under(self, event.x, self._span.history, self._step)))

    def on_leave(self) -> None:
        """No moment is under the mouse."""
        self.post_message(self.Pointed(None))

    def move_cursor(self, by: int) -> None:
        """Point at the next moment earlier (-1) or later (1), beginning with the newest; after that at none."""
        if history := self._span.history:
            oldest, newest = history[0].at, history[-1].at
            at = next_moment(self._cursor, by, oldest=oldest, newest=newest, seconds_per_column=self._step)
            self.post_message(self.Pointed(at))

    def point(self, at: float | None) -> None:
        """Show the values of a moment in the title; None: the title again."""
        if at != self._cursor:
            self._cursor = at
            self._replot()
            self.refresh()

    def reading(self) -> Content:
        """The values under the cursor."""
        assert self._cursor is not None
        history, width = self._span.history, max(0, self.size.width - GUTTER)
        back = column_of(self._cursor, history[-1].at, self._step) if history else width
        found = self._span.columns(width, self._step)
        if not 0 <= back < width or found.values(lambda _: 1.0)[width - 1 - back] is None:
            return Content.styled("no data", "$muted")
        parts: list[tuple[str, str] | Content] = []
        for curve in (self._front, self._behind):
            if curve is not None:
                value = found.values(curve.reading or curve.value)[width - 1 - back]
                shown = "–" if value is None else self._scale.label(value)
                parts += ("■ ", curve.style), (f"{curve.name} ", "$muted"), (f"{shown}  ", "bold")
        if self._note is not None:
            here = [sample for sample in history if column_of(sample.at, history[-1].at, self._step) == back]
            parts.append(self._note(here))
        for mark in self._span.marks:
            if column_of(mark.at, history[-1].at, self._step) == back:
                sign, style = mark_sign(mark)
                parts += (f"{sign} ", style), (f"{mark.text}  ", "$muted")
        return Content.assemble(*parts)

    def show(self, title: Content, span: Span) -> None:
        """Draw the graph again, where anything changed."""
        changed = not title.is_same(self._title)
        self._title, self._span = title, span
        if self._replot() or changed:
            self.refresh()

    def span_text(self, seconds: int) -> str:
        """Return the time that a span of about `seconds` has in this width: "last 72 s", "last 9 min"; "" before the
        graph has a size."""
        width = max(0, self.size.width - GUTTER)
        shown_s = width * _step(seconds, width)
        if not shown_s:
            return ""
        return f"last {shown_s} s" if shown_s < LONG_S else f"last {shown_s / 60:.0f} min"

    def on_resize(self) -> None:
        """Another width shows another span."""
        self._replot()
        self.refresh()

    def _replot(self) -> bool:
        width, rows = max(0, self.size.width - GUTTER), max(0, self.size.height - 1)
        has_axis = rows >= 2  # on it alone does a mark show beneath bars that fill the plot
        rows -= has_axis
        span = self._span
        step = self._step = _step(span.seconds, width)
        found = span.columns(width, step)
        front = found.values(self._front.value)
        behind = found.values(self._behind.value) if self._behind else []
        marks: list[tuple[int, Mark]] = []
        if span.history:
            newest = span.history[-1].at
            by_importance = sorted(span.marks, key=_importance)
            marks = [(max(0, column_of(mark.at, newest, step)), mark) for mark in by_importance]
            marks = [(back, mark) for back, mark in marks if back < width]
        cursor, ascii_only, lettered = self._cursor_column(width), is_ascii(self.app), is_lettered(self.app)
        drawn_from = (front, behind, found.missed, marks, cursor, rows, has_axis, step, ascii_only, lettered)
        if drawn_from == self._plotted:
            return False
        self._plotted = drawn_from
        top = self._scale.top([*front, *behind])
        plot = draw(front, behind, top, rows, ascii_only=ascii_only, shaded=lettered)
        for column, highest in enumerate(_highest(front, behind)) if plot else ():
            if self._scale.clips and highest > top:
                plot[0][column] = Cell(_CLIPPED, "behind" if behind else "front")
        for column in found.missed if plot else ():
            plot[-1][column] = Cell("·", "")
        plot = [_mark(row, marks, named=self._names_marks and row is plot[0]) for row in plot] if marks else plot
        before = (self._plot, self._top_label, self._axis.markup)
        self._plot, self._top_label = plot, text.bound(self._scale.label(top))
        self._axis = _axis_row(width, step, marks if plot else [], cursor) if has_axis else Content("")
        return before != (self._plot, self._top_label, self._axis.markup)

    def _cursor_column(self, width: int) -> int:
        """From the left; negative where there is none."""
        if self._cursor is None or not self._span.history:
            return -1
        return width - 1 - column_of(self._cursor, self._span.history[-1].at, self._step)

    def line(self, y: int) -> Content:
        """Title first, then the plot from its upper edge down."""
        if y == 0 or y > len(self._plot):
            title = self._title if self._cursor is None else self.reading()
            line = title if y == 0 else self._axis if y == len(self._plot) + 1 else Content("")
            return for_terminal(self.app, line)
        label = self._top_label if y == 1 else "0" if y == len(self._plot) else ""
        parts: list[Content | str | tuple[str, str]] = [(f"{label:>{GUTTER - 1}}▕", "$graph-axis")]
        runs = groupby(self._plot[y - 1], lambda cell: cell.ink)
        parts.extend(("".join(cell.char for cell in run), self._inks.get(ink, ink)) for ink, run in runs)
        return for_terminal(self.app, Content.assemble(*parts))


def _step(seconds: int, width: int) -> int:
    return seconds_per_column(seconds, width, max(HISTORY_S, seconds))


def _highest(front: Values, behind: Values) -> list[float]:
    """The highest value of each column."""
    return [max(near or 0.0, far or 0.0) for near, far in zip(front, behind or front, strict=True)]


def _mark(row: list[Cell], marks: Sequence[tuple[int, Mark]], *, named: bool) -> list[Cell]:
    """`row` with a dotted line at each mark where no curve is in the way; `named`: with what was done."""
    marked, width = list(row), len(row)
    seen = [(width - 1 - back, mark) for back, mark in marks if back < width]
    for column, mark in seen:
        if row[column] == (" ", ""):
            marked[column] = Cell("┊", mark_sign(mark)[1])
    for column, mark in reversed(seen) if named else ():
        words = mark.text
        for start in (column + 1, column - len(words)):
            label = range(start, start + len(words))
            if label.start >= 0 and label.stop <= width and all(marked[at] == (" ", "") for at in label):
                marked[label.start : label.stop] = [Cell(char, mark_sign(mark)[1]) for char in words]
                break
    return marked


def _axis_row(width: int, step: int, marks: Sequence[tuple[int, Mark]], cursor: int) -> Content:
    """The time axis, with the signs of marks and of the cursor on it, which cover no word."""
    signs = {width - 1 - back: mark_sign(mark) for back, mark in marks if back < width}
    if 0 <= cursor < width:
        signs[cursor] = ("▲", "$foreground")
    cells = [Cell(char, "$graph-axis") for char in " " * GUTTER + time_axis(width, step, signs)]
    for column, (sign, style) in signs.items():
        if cells[GUTTER + column].char == " ":
            cells[GUTTER + column] = Cell(sign, style)
    runs = groupby(cells, lambda cell: cell.ink)
    return Content.assemble(*(("".join(cell.char for cell in run), ink) for ink, run in runs))


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
            axis = f"{text.bound(self._label(right)):>{self.size.width}}"
            return for_terminal(self.app, Content.styled(axis, "$graph-axis"))
        label = text.bound(text.count(top)) if y == 1 else "0" if y == rows else ""
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
