"""Table: rows with a cursor that stays on its row while rows come and go. Only lines that changed are drawn anew."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

from console.widgets.glyphs import fitted

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
    align: Literal["left", "right"] = "left"
    grow: int = 0
    drop: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """key: stays the same as long as the row means the same thing. One cell for each column; where there are fewer,
    the last one takes the room of those that lack."""

    key: str
    cells: tuple[Cell, ...]


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

    def __init__(self, columns: Sequence[Column], *, empty: str = "", id: str | None = None) -> None:
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._rows: tuple[Row, ...] = ()
        self._empty = empty
        self._cursor: str | None = None

    # -- content ----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows shown."""
        return self._rows

    @property
    def cursor_key(self) -> str | None:
        """The key of the row under the cursor; None until somebody moved it there."""
        return self._cursor

    def show(self, rows: Sequence[Row], *, empty: str | None = None, columns: Sequence[Column] | None = None) -> None:
        """Replace the rows; `empty` replaces what is said where there is none, `columns` the columns."""
        if columns is not None and tuple(columns) != self._columns:
            self._columns = tuple(columns)
            self.refresh()
        before, self._rows = self._rows, tuple(rows)
        if empty is not None and empty != self._empty:
            self._empty = empty
            self._resize()
        if self._cursor is not None and self._index() is None:
            old = next((at for at, row in enumerate(before) if row.key == self._cursor), 0)
            self._cursor = self._rows[min(old, len(self._rows) - 1)].key if self._rows else None
        if len(before) != len(self._rows):
            self._resize()
            return
        for at, (old_row, new_row) in enumerate(zip(before, self._rows, strict=True)):
            if old_row != new_row:
                self.refresh_line(at + 1)

    def on_resize(self) -> None:
        """What is said where there is no row wraps anew."""
        self._resize()

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self._rows) + 1 if self._rows else max(1, len(self._notice())))
        self.refresh()

    def _notice(self) -> list[str]:
        return textwrap.wrap(self._empty, max(10, self.scrollable_content_region.width))

    def _index(self) -> int | None:
        return next((at for at, row in enumerate(self._rows) if row.key == self._cursor), None)

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
        at = y - 1 + round(self.scroll_offset.y)
        if at >= len(self._rows):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        row = self._rows[at]
        return self._strip(self.line(row.cells, width), *(("table--cursor",) if row.key == self._cursor else ()))

    def line(self, cells: Sequence[Cell], width: int) -> Content:
        """The cells of one row in `width`: columns that do not fit are left out, the growing one takes the rest."""
        shown = fitting(self._columns, width)
        widths, gap = spread([self._columns[at] for at in shown], width)
        placed = [(at, room) for at, room in zip(shown, widths, strict=True) if at < len(cells)]
        if len(placed) < len(shown):
            last, room = placed[-1]
            placed[-1] = last, room + sum(widths[len(placed) :]) + gap * (len(shown) - len(placed))
        parts = [_fit(Content.assemble(*cells[at]), room, self._columns[at].align) for at, room in placed]
        line = Content(" " * gap).join(parts)
        return fitted(self.app, line)

    def _strip(self, content: Content, *components: str) -> Strip:
        style = self.get_visual_style(*components) if components else self.visual_style
        return Visual.to_strips(self, content, self.size.width, 1, style, pad=True, apply_selection=False)[0]

    # -- cursor -----------------------------------------------------------------------------------------------------

    def move_to(self, index: int) -> None:
        """Put the cursor on row `index`, as near as there are rows."""
        if not self._rows:
            return
        index = min(max(0, index), len(self._rows) - 1)
        before = self._index()
        self._cursor = self._rows[index].key
        for line in {index, index if before is None else before}:
            self.refresh_line(line + 1)
        self.scroll_to_region(Region(0, index, 1, 2), animate=False, force=True, x_axis=False)
        self.post_message(self.Moved(self, self._cursor))

    def action_move(self, by: int) -> None:
        """Up or down."""
        index = self._index()
        self.move_to(0 if index is None and by == 1 else (index or 0) + by)

    def action_page(self, by: int) -> None:
        """Up or down by what is seen."""
        self.action_move(by * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        """Open the row under the cursor, the first where it is nowhere yet."""
        if self._cursor is None:
            self.move_to(0)
        if self._cursor is not None:
            self.post_message(self.Chosen(self, self._cursor))

    def on_click(self, event: events.Click) -> None:
        """The row that was clicked; twice opens it."""
        if event.y > 0 and (at := event.y - 1 + round(self.scroll_offset.y)) < len(self._rows):
            self.move_to(at)
            if event.chain == 2:
                self.action_choose()


def fitting(columns: Sequence[Column], width: int) -> list[int]:
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


def _fit(content: Content, room: int, align: Literal["left", "right"]) -> Content:
    content = content.truncate(room, ellipsis=True)
    missing = room - content.cell_length
    return content.pad_left(missing) if align == "right" else content.pad_right(missing)
