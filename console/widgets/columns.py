"""Columns of a table: what a cell is, which columns there is room for, and a line made of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from textual.content import Content, Span

from console.printable_filter import MAX_CHARACTERS
from engine.text.printable import ANY_UNSAFE, printable

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
        return side_by_side([(_escaped(pieces), room, align) for pieces, room, align in placed], gap)
    return Content(plain, spans=spans)


def _escaped(pieces: Cell) -> Cell:
    """With what a terminal would obey as escapes, which take room."""
    return tuple((printable(text), style) for text, style in pieces)


def _cut(pieces: Cell, room: int) -> Cell:
    """What fits in `room`, with an ellipsis at its end."""
    cut = list[tuple[str, str]]()
    for text, style in pieces:
        width = cell_len(text)
        if width >= room:
            kept = set_cell_size(text, room - 1) + "…" if room > 0 else ""
            return (*cut, (kept, style))
        cut.append((text, style))
        room -= width
    return tuple(cut)
