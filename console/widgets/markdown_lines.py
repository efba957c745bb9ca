"""Pieces of Markdown as lines of a given width. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content

from console.widgets.markdown_blocks import Code, Piece, Rule, Table

Highlight = Callable[[str, str], Content]
"""(code, language) -> the same text with styles."""

NARROWEST = 8
_BETWEEN = "  "
_ACROSS = "─"


def lay_out(piece: Piece, width: int, highlight: Highlight) -> list[Content]:
    """The lines of a piece, none wider than `width` cells, but for what is left of them where that leaves no room."""
    room = max(NARROWEST, width - max(piece.first.cell_length, piece.rest.cell_length))
    lines = [] if piece.gap is None else [piece.gap]
    for number, line in enumerate(_body(piece, room, highlight)):
        lines.append((piece.rest if number else piece.first) + line)
    return lines


def _body(piece: Piece, room: int, highlight: Highlight) -> list[Content]:
    match piece:
        case Code():
            styled = highlight(piece.body.plain, piece.language)
            return [_band(line, room, piece.style) for line in _folded(styled, room - 2)]
        case Table():
            return _table(piece.rows, room)
        case Rule():
            return [Content.styled(_ACROSS * room, ".rule")]
        case _:
            lines = piece.body.wrap(room)
            return [line.stylize_before(f".{piece.style}") for line in lines] if piece.style else lines


def _folded(code: Content, room: int) -> list[Content]:
    """Lines as they are, what is too long going on beneath."""
    return [part for line in code.split(allow_blank=True) for part in line.expand_tabs(4).fold(room)]


def _band(line: Content, room: int, style: str) -> Content:
    """A line on a ground of its own that goes all across."""
    return line.pad(1, max(0, room - 1 - line.cell_length)).stylize_before(f".{style}")


def _table(rows: Sequence[Sequence[Content]], room: int) -> list[Content]:
    columns = max(map(len, rows))
    natural = [
        max((cell.cell_length for row in rows for cell in row[n : n + 1]), default=1) or 1 for n in range(columns)
    ]
    widths = fitting(natural, room - len(_BETWEEN) * (columns - 1))
    head, *others = ([*row, *[Content("")] * (columns - len(row))] for row in rows)
    across = Content.styled(_BETWEEN.join(_ACROSS * width for width in widths), ".rule")
    lines = [*(line.stylize_before(".strong") for line in _row(head, widths)), across]
    for row in others:
        lines += _row(row, widths)
    return lines


def fitting(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns that together take no more than `room`, where each may be one: narrow ones keep theirs, wide
    ones share what is left."""
    widths = [0] * len(natural)
    left = max(room, len(natural))
    for done, column in enumerate(sorted(range(len(natural)), key=natural.__getitem__)):
        widths[column] = min(natural[column], left // (len(natural) - done))
        left -= widths[column]
    return widths


def _row(cells: Sequence[Content], widths: Sequence[int]) -> list[Content]:
    """The lines of a row, its cells wrapped in their columns."""
    wrapped = [cell.wrap(width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [lines_[number] if number < len(lines_) else Content("") for lines_ in wrapped]
        padded = [part.pad_right(max(0, width - part.cell_length)) for part, width in zip(parts, widths, strict=True)]
        lines.append(Content(_BETWEEN).join(padded))
    return lines
