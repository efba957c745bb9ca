"""Table: rows with a cursor that stays on its row while rows come and go. Only lines that changed are drawn."""

from __future__ import annotations

import textwrap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content, Span
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from console.tui.keymap import ConsoleBinding
from console.tui.printable_filter import MAX_CHARACTERS
from console.tui.widgets.glyphs import for_terminal
from engine.text.printable import ANY_UNSAFE, printable

# How a part of a widget looks.


def component_style(widget: Widget, *components: str) -> Style:
    """The style of a part of a widget, of all of it where none is named; with reversed letters, which
    `get_visual_style` leaves out."""
    if not components:
        return widget.visual_style
    style = widget.get_visual_style(*components)
    is_reversed = any(widget.get_component_styles(name).text_style.reverse for name in components)
    return style + Style(reverse=True) if is_reversed else style


# Columns of a table: what a cell is, which columns there is room for, and a line made of them. Pure.

Align = Literal["left", "right"]
Cell = tuple[tuple[str, str], ...]
"""Pieces of (text, style); a style is Textual's, with the theme's variables: "bold $primary"."""


def cell(text: str, style: str = "") -> Cell:
    """A cell of one piece."""
    return ((text, style),)


@dataclass(frozen=True, slots=True)
class Column:
    """width: cells it has at least; grow: how many more it may take where there is room.

    drop: columns with the highest number are the first to go where there is not; 0 never goes.
    """

    title: str
    width: int
    align: Align = "left"
    grow: int = 0
    drop: int = 0


def fitting_columns(columns: Sequence[Column], width: int) -> list[int]:
    """Which columns there is room for with one cell between them; those with the highest `drop` go first."""
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(columns[at].width + 1 for at in shown) - 1 > width:
        weakest = max(shown, key=lambda at: columns[at].drop)
        if columns[weakest].drop == 0:
            break
        shown.remove(weakest)
    return shown


def spread(columns: Sequence[Column], width: int) -> tuple[list[int], int]:
    """Widths of the columns in `width`, and the cells between two: two where they fit; columns grow, then gaps."""
    least, joints = sum(column.width for column in columns), max(1, len(columns) - 1)
    gap = 2 if least + 2 * joints <= width else 1
    spare = max(0, width - least - gap * joints)
    widths = [column.width for column in columns]
    growing = sorted((at for at, column in enumerate(columns) if column.grow), key=lambda at: columns[at].grow)
    for turn, at in enumerate(growing):
        more = min(columns[at].grow, spare // (len(growing) - turn))
        widths[at] += more
        spare -= more
    return widths, gap + spare // joints


def side_by_side(placed: Sequence[tuple[Cell, int, Align]], gap: int) -> Content:
    """Cells side by side, each in its room. Made in one go: tables are drawn many times a second."""
    line, spans, length = list[str](), list[Span](), 0
    for at, (pieces, room, align) in enumerate(placed):
        most = MAX_CHARACTERS * (room + 1)
        if any(len(text) > most for text, _ in pieces):  # measuring them takes longer than they are worth
            pieces = tuple((text[:most], style) for text, style in pieces)
        missing = room - sum(cell_len(text) for text, _ in pieces)
        if missing < 0:
            pieces, missing = _cut(pieces, room), 0
        before = (gap if at else 0) + (missing if align == "right" else 0)
        line.append(" " * before)
        length += before
        for text, style in pieces:
            line.append(text)
            if style:
                spans.append(Span(length, length + len(text), style))
            length += len(text)
        if align == "left":
            line.append(" " * missing)
            length += missing
    plain = "".join(line)
    if not plain.isprintable() and ANY_UNSAFE.search(plain) is not None:
        return side_by_side([(_escape_cell(pieces), room, align) for pieces, room, align in placed], gap)
    return Content(plain, spans=spans)


def _escape_cell(pieces: Cell) -> Cell:
    """With what a terminal would obey as escapes, which take room."""
    return tuple((printable(text), style) for text, style in pieces)


def _cut(pieces: Cell, room: int) -> Cell:
    """Return the part that fits in `room`, with an ellipsis at its end."""
    cut = list[tuple[str, str]]()
    for text, style in pieces:
        width = cell_len(text)
        if width >= room:
            shortened = set_cell_size(text, room - 1) + "…" if room > 0 else ""
            return (*cut, (shortened, style))
        cut.append((text, style))
        room -= width
    return tuple(cut)


__all__ = ["Cell", "Column", "Listing", "Row", "Table", "cell"]


_MIN_UNPINNED = 3
"""Rows that scroll beneath those that stay on top, however many these are."""


@dataclass(frozen=True, slots=True)
class Row:
    """key: stays the same as long as the row means the same thing. One cell for each column; where there are fewer,
    the last one takes the room of those that lack."""

    key: str
    cells: tuple[Cell, ...]


class Listing(Sequence[Row]):
    """Rows that are made when they are looked at, for tables of thousands. The same listing may be shown again after
    it changed."""

    @abstractmethod
    def find(self, key: str) -> int | None:
        """Where the row of that key is; None where there is none."""


class Table(ScrollView, can_focus=True):
    """columns: until `show` gives others. empty: what to say where there is no row."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--header", "table--cursor", "table--empty"}
    DEFAULT_CSS = """
    Table { height: 1fr; width: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; overflow-x: hidden; }
    Table > .table--header { color: $muted; text-style: bold; }
    Table > .table--cursor { background: $panel; }
    Table:focus > .table--cursor { background: $block-cursor-background; }
    Table > .table--empty { color: $muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", id="row.up", tooltip="Go up a row", show=False, system=True),
        Binding("down,j", "move(1)", "Down", id="row.down", tooltip="Go down a row", show=False, system=True),
        Binding("pageup", "page(-1)", "Page up", id="row.page_up", tooltip="Go up a page", show=False, system=True),
        Binding(
            "pagedown", "page(1)", "Page down", id="row.page_down", tooltip="Go down a page", show=False, system=True
        ),
        Binding(
            "home", "move(-1000000)", "First", id="row.first", tooltip="Go to the first row", show=False, system=True
        ),
        Binding("end", "move(1000000)", "Last", id="row.last", tooltip="Go to the last row", show=False, system=True),
        Binding("enter", "choose", "Open", id="row.open", tooltip="Open the row", show=False, system=True),
    ]

    @dataclass
    class Moved(Message):
        """The cursor is on another row."""

        table: Table
        key: str

    @dataclass
    class Chosen(Message):
        """A row is to be opened: by Enter, or by clicking twice."""

        table: Table
        key: str

    @dataclass
    class HeaderClicked(Message):
        """A title was clicked. column: its number among all columns, shown or not."""

        table: Table
        column: int

    def __init__(self, columns: Sequence[Column], *, empty: str = "", id: str | None = None) -> None:
        self._styles: dict[tuple[str, tuple[str, ...]], RichStyle] = {}
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._rows: Sequence[Row] = ()
        self._length = 0
        self._drawn: dict[int, Row] = {}
        self._empty = empty
        self._cursor: str | None = None
        self._cursor_at = 0
        self._to_pin = 0

    # -- content ----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Row]:
        """The rows shown."""
        return self._rows

    @property
    def shown_columns(self) -> Sequence[int]:
        """The numbers of the columns that there is room for."""
        return fitting_columns(self._columns, self.scrollable_content_region.width)

    @property
    def cursor_key(self) -> str | None:
        """The key of the row under the cursor; None until it is first moved."""
        return self._cursor

    def show(
        self,
        rows: Sequence[Row],
        *,
        empty: str | None = None,
        columns: Sequence[Column] | None = None,
        pinned: int = 0,
    ) -> None:
        """Replace the rows; `empty` replaces what is said where there is none, `columns` the columns.

        pinned: that many of the first rows stay on top while the others scroll beneath them.
        """
        if pinned != self._to_pin:
            self._to_pin = pinned
            self.refresh()
        if columns is not None and tuple(columns) != self._columns:
            self._columns = tuple(columns)
            self.refresh()
        self._rows = rows if isinstance(rows, Listing) else tuple(rows)
        if empty is not None and empty != self._empty:
            self._empty = empty
            self._resize()
        self._follow()
        if self._length != len(self._rows):
            if self.has_focus and not (self._length and self._rows):
                self.screen.refresh_bindings()
            self._length = len(self._rows)
            self._resize()
            return
        seen = {at: y for y in range(1, self.size.height) if (at := self._row_at(y)) < self._length}
        self._drawn = {at: self._drawn[at] for at in seen if at in self._drawn}
        for at, y in seen.items():
            if self._rows[at] != self._drawn.get(at):
                self.refresh(Region(0, y, self.size.width, 1))

    def _follow(self) -> None:
        """The cursor stays on its row, and that on its line where rows come in above it; on the row that took its place
        where it is gone."""
        if self._cursor is None:
            return
        before, found = self._cursor_at, self._index()
        if found is None:
            self._cursor_at = max(0, min(before, len(self._rows) - 1))
            self._cursor = self._rows[self._cursor_at].key if self._rows else None
            return
        self._cursor_at = found
        last = self._first + self.size.height - 2
        dragged = self._first > 0 or (found > last and not self._to_pin)
        if found != before and self._first + self._pinned <= before <= last and dragged:
            self.call_after_refresh(self.scroll_to, y=self._first + found - before, animate=False, force=True)

    def on_resize(self) -> None:
        """Wrap the text of the empty table again."""
        self._resize()

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self._rows) + 1 if self._rows else max(1, len(self._notice())))
        self.refresh()

    def _notice(self) -> list[str]:
        width = max(10, self.scrollable_content_region.width)
        lines = (textwrap.wrap(line, width, break_on_hyphens=False) for line in self._empty.split("\n"))
        return list(chain.from_iterable(lines))

    @property
    def _first(self) -> int:
        """The number of the first row that is seen."""
        return round(self.scroll_offset.y)

    @property
    def _pinned(self) -> int:
        """How many rows stay on top: not all that is seen, so that the others can be looked at."""
        return min(self._to_pin, max(0, self.size.height - 1 - _MIN_UNPINNED))

    def _row_at(self, y: int) -> int:
        """The number of the row on line `y` of the table, from 1."""
        return y - 1 if y <= self._pinned else y - 1 + self._first

    def _index(self) -> int | None:
        """Where the cursor's row is; most often where it was."""
        key, rows = self._cursor, self._rows
        if key is None:
            return None
        if self._cursor_at < len(rows) and rows[self._cursor_at].key == key:
            return self._cursor_at
        if isinstance(rows, Listing):
            return rows.find(key)
        return next((at for at, row in enumerate(rows) if row.key == key), None)

    # -- drawing ----------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """The header stays; rows scroll beneath it."""
        width = self.scrollable_content_region.width
        if not self._rows:
            notice = self._notice()
            return self._strip(Content(notice[y] if y < len(notice) else ""), "table--empty")
        if y == 0:
            titles = tuple(cell(column.title) for column in self._columns)
            return self._strip(self.line(titles, width), "table--header")
        at = self._row_at(y)
        if at >= len(self._rows):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        row = self._drawn[at] = self._rows[at]
        return self._strip(self.line(row.cells, width), *(("table--cursor",) if row.key == self._cursor else ()))

    def _laid_out(self, width: int) -> tuple[list[int], list[int], int]:
        """The columns shown, their widths, and the cells between two."""
        shown = fitting_columns(self._columns, width)
        return shown, *spread([self._columns[at] for at in shown], width)

    def line(self, cells: Sequence[Cell], width: int) -> Content:
        """The cells of one row in `width`: columns that do not fit are left out, the growing one takes the rest."""
        shown, widths, gap = self._laid_out(width)
        placed = [(at, room) for at, room in zip(shown, widths, strict=True) if at < len(cells)]
        if len(placed) < len(shown):
            last, room = placed[-1]
            placed[-1] = last, room + sum(widths[len(placed) :]) + gap * (len(shown) - len(placed))
        return for_terminal(
            self.app, side_by_side([(cells[at], room, self._columns[at].align) for at, room in placed], gap)
        )

    def _strip(self, content: Content, *components: str) -> Strip:
        """The line in the table's colours: its spans, which never overlap, each with its style."""
        width, plain, at = self.size.width, content.plain, 0
        segments = list[Segment]()
        for span in content.spans:
            if span.start > at:
                segments.append(Segment(plain[at : span.start], self._style("", components)))
            segments.append(Segment(plain[span.start : span.end], self._style(str(span.style), components)))
            at = span.end
        segments.append(Segment(plain[at:], self._style("", components)))
        return Strip(segments).adjust_cell_length(width, self._style("", components))

    def _style(self, style: str, components: tuple[str, ...]) -> RichStyle:
        """A style over that of a part of the table; worked out once, as most of drawing would be that."""
        if (found := self._styles.get((style, components))) is None:
            base = component_style(self, *components)
            found = (base + Style.parse(style) if style else base).rich_style
            self._styles[style, components] = found
        return found

    def notify_style_update(self) -> None:
        """Another theme, or the focus came or went."""
        self._styles.clear()
        super().notify_style_update()

    # -- cursor -----------------------------------------------------------------------------------------------------

    def move_to(self, index: int) -> None:
        """Put the cursor on row `index`, as near as there are rows."""
        if not self._rows:
            return
        index = min(max(0, index), len(self._rows) - 1)
        before = self._index()
        self._cursor, self._cursor_at = self._rows[index].key, index
        for at in {index, index if before is None else before}:
            self.refresh(Region(0, at + 1 if at < self._pinned else at + 1 - self._first, self.size.width, 1))
        if index >= self._pinned:
            highest, lowest = index - self._pinned, index - self.size.height + 2
            self.scroll_to(y=min(max(self._first, lowest), highest), animate=False, force=True)
        elif index == 0:
            self.scroll_home(animate=False, force=True)
        self.post_message(self.Moved(self, self._cursor))

    def let_go(self) -> None:
        """Put the cursor on no row, and show the first ones."""
        self._cursor, self._cursor_at = None, 0
        self.scroll_home(animate=False, force=True)
        self.refresh()

    def action_move(self, by: int) -> None:
        """Up or down."""
        index = self._index()
        self.move_to(0 if index is None and by == 1 else (index or 0) + by)

    def action_page(self, by: int) -> None:
        """Up or down by what is seen."""
        self.action_move(by * max(1, self.size.height - 2))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether there is a row to open."""
        return action != "choose" or bool(self._rows)

    def action_choose(self) -> None:
        """Open the row under the cursor, the first where it is nowhere yet."""
        if self._cursor is None:
            self.move_to(0)
        if self._cursor is not None:
            self.post_message(self.Chosen(self, self._cursor))

    def on_click(self, event: events.Click) -> None:
        """Select the row that was clicked; two clicks open it. A click on a title posts a message."""
        if event.y == 0 and self._rows:
            self._title_clicked(event.x)
        elif event.y > 0 and (at := self._row_at(event.y)) < len(self._rows):
            self.move_to(at)
            if event.chain == 2:
                self.action_choose()

    def _title_clicked(self, x: int) -> None:
        shown, widths, gap = self._laid_out(self.scrollable_content_region.width)
        right = 0
        for column, room in zip(shown, widths, strict=True):
            right += room + gap
            if x < right:
                self.post_message(self.HeaderClicked(self, column))
                return


class OpeningTable(Table):
    """A table whose rows open a page: Enter, or two clicks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding("enter", "choose", "Open", id="row.open", tooltip="Open the row", primary=True),
    ]
