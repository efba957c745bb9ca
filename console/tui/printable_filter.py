"""A line filter that lets no control character and no link in a widget's cells reach the terminal."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from engine.text.printable import ANY_UNSAFE

MAX_CHARACTERS = 8
"""Of one cell, the marks and joiners among them, which take none: a family of emoji has seven in two."""

_MAX_UNCOUNTED = 256
"""Characters of a piece of a line that are not counted against its cells."""


class PrintableFilter(LineFilter):
    """Drops unsafe characters, OSC 8 links and floods of marks from every line of every widget; cells stay as wide as
    they were.

    It is the last guard: text that a person should see escaped goes through `printable` before it is laid out. An
    unsafe character takes no cell, so none is left for its escape here. Textual keeps a filtered line with the line.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return `segments` themselves where they are clean."""
        for text, style, _ in segments:
            if not text.isprintable() or len(text) > _MAX_UNCOUNTED or (style is not None and style.link):
                return [_clean(segment) for segment in segments]
        return segments


def _clean(segment: Segment) -> Segment:
    text, style, control = segment
    if style is not None and style.link:
        style = style.update_link(None)
    cells = cell_len(text)
    if ANY_UNSAFE.search(text) is not None:
        text = _of_width(ANY_UNSAFE.sub("", text), cells)
    if len(text) > MAX_CHARACTERS * (cells + 1):
        text = _of_width("".join(filter(cell_len, text)), cells)
    return Segment(text, style, control)


def _of_width(text: str, cells: int) -> str:
    """`text` in as many cells as before: characters that nothing parts any more may join to fewer, wider ones. Blanks
    where that cannot be, as a joiner at the end swallows them."""
    sized = set_cell_size(text, cells)
    return sized if cell_len(sized) == cells else " " * cells
