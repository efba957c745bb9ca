"""Pieces of Markdown as lines of a given width. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

# What Markdown says, as blocks of pieces one beneath the other: lists and quotes are flat, with what stands left of
# each line. Pure.

BULLETS = "•◦▪"
BAR = "▌ "

_CONTAINERS = frozenset({"list_item_open", "blockquote_open"})
_APART = frozenset({"paragraph_open", "heading_open", "fence", "code_block", "table_open", "hr", "html_block"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is wrapped. first, rest: what stands left of its first line, and of the others.

    style: of its lines as a whole, a component class.  gap: what stands left of the empty line above it, None where
    there is none.
    """

    body: Content
    first: Content
    rest: Content
    gap: Content | None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Code(Piece):
    """Text that is not wrapped at words. language: as it was named, "" for none."""

    language: str = ""


@dataclass(frozen=True, slots=True)
class Table(Piece):
    """Cells, row by row, the first of them the head; `body` is empty."""

    rows: tuple[tuple[Content, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Rule(Piece):
    """A line across."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the document's own level. line: where in the text it begins."""

    line: int
    pieces: tuple[Piece, ...]


def blocks(markdown: str, *, first: bool = True) -> list[Block]:
    """The blocks of a text. first: nothing stands above it."""
    walk = _Walk()
    found: list[Block] = []
    for tokens in _of_one_block(_parser().parse(markdown)):
        made = tuple(walk.pieces(tokens, apart=not first or bool(found)))
        if made:
            lines = tokens[0].map
            found.append(Block(lines[0] if lines else 0, made))
    return found


@cache
def _parser() -> MarkdownIt:
    """Stateless once it is made."""
    return MarkdownIt("gfm-like", {"linkify": False})


def _of_one_block(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of each block of the document's own level."""
    run: list[Token] = []
    depth = 0
    for token in tokens:
        run.append(token)
        depth += token.nesting
        if depth == 0:
            yield run
            run = []


@dataclass(slots=True)
class _Container:
    """A list item or a quote. first: what stands left of its first line, once."""

    first: Content
    rest: Content
    begun: bool = False


@dataclass(slots=True)
class _List:
    """number: of the next item; None in a list of bullets."""

    number: int | None


@dataclass(slots=True)
class _Walk:
    """Over the tokens of one block."""

    _containers: list[_Container] = field(default_factory=list)
    _lists: list[_List] = field(default_factory=list)
    _gap: bool = False
    _style: str = ""

    def pieces(self, tokens: Sequence[Token], *, apart: bool) -> Iterator[Piece]:
        """Top to bottom. apart: an empty line stands above the block."""
        self._gap = apart
        rest = iter(tokens)
        for token in rest:
            if token.type in _APART and not token.hidden and self._containers and self._containers[-1].begun:
                self._gap = True
            if token.type == "table_open":
                yield self._table(_until(rest, "table_close"))
            elif token.nesting == 0:
                yield from self._leaf(token)
            elif token.nesting > 0:
                self._open(token)
            else:
                self._close(token)

    def _open(self, token: Token) -> None:
        match token.type:
            case "heading_open":
                self._style = token.tag
            case "bullet_list_open":
                self._lists.append(_List(None))
            case "ordered_list_open":
                start = token.attrGet("start")
                self._lists.append(_List(1 if start is None else int(start)))
            case "list_item_open":
                marker = self._marker()
                self._containers.append(_Container(marker, Content(" " * marker.cell_length)))
            case "blockquote_open":
                bar = Content.styled(BAR, ".quote")
                self._containers.append(_Container(bar, bar))

    def _marker(self) -> Content:
        item = self._lists[-1]
        if item.number is None:
            return Content.styled(f"{BULLETS[(len(self._lists) - 1) % len(BULLETS)]} ", ".bullet")
        item.number += 1
        return Content.styled(f"{item.number - 1}. ", ".bullet")

    def _close(self, token: Token) -> None:
        match token.type:
            case "heading_close":
                self._style = ""
            case "bullet_list_close" | "ordered_list_close":
                self._lists.pop()
            case "list_item_close" | "blockquote_close":
                self._containers.pop()

    def _leaf(self, token: Token) -> Iterator[Piece]:
        match token.type:
            case "inline":
                style = self._style or ("quoted" if any(each.rest.plain == BAR for each in self._containers) else "")
                yield Piece(inline(token), *self._sides(), style)
            case "fence" | "code_block":
                language = token.info.split()[0] if token.info.strip() else ""
                yield Code(Content(token.content.rstrip("\n")), *self._sides(), "code", language)
            case "html_block":
                yield Piece(Content(token.content.rstrip("\n")), *self._sides())
            case "hr":
                yield Rule(Content(""), *self._sides(), "rule")

    def _table(self, tokens: Sequence[Token]) -> Table:
        rows: list[list[Content]] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(inline(token))
        return Table(Content(""), *self._sides(), "", tuple(map(tuple, rows)))

    def _sides(self) -> tuple[Content, Content, Content | None]:
        """Left margin of the next piece: of its first line, of the others, and of the empty line above."""
        rest = Content("").join(each.rest for each in self._containers)
        first = Content("").join(each.rest if each.begun else each.first for each in self._containers)
        beyond = Content("").join(each.rest for each in self._containers if each.begun)
        gap = beyond if self._gap else None
        self._gap = False
        for each in self._containers:
            each.begun = True
        return first, rest, gap


def _until(tokens: Iterator[Token], kind: str) -> list[Token]:
    """The tokens before the next of that kind, which is taken too."""
    found: list[Token] = []
    for token in tokens:
        if token.type == kind:
            break
        found.append(token)
    return found


def inline(token: Token) -> Content:
    """The text of a paragraph, a heading or a cell, with the styles of its parts."""
    text: list[str] = []
    spans: list[Span] = []
    open_at: list[tuple[int, str | Style, str]] = []
    length = 0

    def add(piece: str) -> None:
        nonlocal length
        text.append(piece)
        length += len(piece)

    for child in token.children or ():
        match child.type:
            case "text":
                add(re.sub(r"\s+", " ", child.content))
            case "softbreak":
                add(" ")
            case "hardbreak":
                add("\n")
            case "code_inline":
                spans.append(Span(length, length + len(child.content), ".code_inline"))
                add(child.content)
            case "html_inline":
                add(child.content)
            case "image":
                spans.append(Span(length, length + len(child.content), ".em"))
                add(child.content)
            case "em_open" | "strong_open" | "s_open":
                open_at.append((length, f".{child.type.removesuffix('_open')}", ""))
            case "link_open":
                href = str(child.attrGet("href") or "")
                open_at.append((length, Style.from_meta({"@click": f"link({href!r})"}), href))
            case "em_close" | "strong_close" | "s_close" | "link_close":
                start, style, href = open_at.pop()
                spans.append(Span(start, length, style))
                if href and href != "".join(text)[start:]:
                    spans.append(Span(length, length + len(href) + 3, ".address"))
                    add(f" ({href})")
    return Content("".join(text), spans=spans)


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
            return [_band(line, room, piece.style) for line in _fold(styled, room - 2)]
        case Table():
            return _table(piece.rows, room)
        case Rule():
            return [Content.styled(_ACROSS * room, ".rule")]
        case _:
            lines = piece.body.wrap(room)
            return [line.stylize_before(f".{piece.style}") for line in lines] if piece.style else lines


def _fold(code: Content, room: int) -> list[Content]:
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
    widths = column_widths(natural, room - len(_BETWEEN) * (columns - 1))
    head, *others = ([*row, *[Content("")] * (columns - len(row))] for row in rows)
    across = Content.styled(_BETWEEN.join(_ACROSS * width for width in widths), ".rule")
    lines = [*(line.stylize_before(".strong") for line in _row(head, widths)), across]
    for row in others:
        lines += _row(row, widths)
    return lines


def column_widths(natural: Sequence[int], room: int) -> list[int]:
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
