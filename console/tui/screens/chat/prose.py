"""Markdown in one widget, which may grow at its end: only what changed is parsed, laid out and drawn again.

Textual's Markdown mounts a widget for each block and list item: 19 ms of CPU against 8 for a layout of a long chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import ClassVar

from textual.content import Content
from textual.geometry import Region, Size
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget

from console.tui.screens.chat.markdown import Block, Code, blocks, lay_out
from console.tui.widgets.glyphs import for_terminal
from engine.text.printable import printable_lines

# Code in the colours of its language, at a cost that is bounded: a model says what the code is, and what language.
#
# A lexer is regular expressions, whose time may grow with the square of what they read, and of a rare language faster;
# nothing interrupts them, and no other thread runs meanwhile. So code is coloured in parts, each by itself: a string
# that goes on in the next part loses its colour there.

MAX_PART = 2000
"""Characters of one part. The worst that is known takes 0.2 s."""

MAX_PARTS = 5
"""Coloured of one block of code; the rest is plain."""

_LANGUAGES = """
bash c c# c++ clojure cmake console cpp cs csharp css dart diff docker dockerfile elixir erlang fortran go
graphql groovy haskell hcl html http ini java javascript js json jsx julia kotlin latex less lua make makefile
markdown matlab md nasm nginx nim objective-c ocaml perl php powershell protobuf ps1 py pycon python python3 r
rb rs ruby rust sass scala scss sh shell sql swift terraform tex toml ts tsx typescript vim vue xml yaml yml zig
zsh
"""
LANGUAGES = frozenset(_LANGUAGES.split())
"""Those whose lexers were tried with what they are slowest at."""


def highlight_code(code: str, language: str, theme: type[HighlightTheme]) -> Content:
    """Return `code`, its lines as they were, as far as it is coloured."""
    if language.lower() not in LANGUAGES:
        return Content(code)
    parts = [
        _colour(part, language.lower(), theme)  # type: ignore[arg-type]  # a class can be hashed
        if number < MAX_PARTS and len(part) <= MAX_PART
        else Content(part)
        for number, part in enumerate(_parts(code))
    ]
    return Content("\n").join(parts)


@lru_cache(maxsize=64)
def _colour(part: str, language: str, theme: type[HighlightTheme]) -> Content:
    """Remembered: of an answer that grows, only the last part is new."""
    return highlight(f"{part}\n", language=language, theme=theme)


def _parts(code: str) -> Iterator[str]:
    """Whole lines of up to MAX_PART characters together, or one that is longer."""
    part: list[str] = []
    length = 0
    for line in code.split("\n"):
        if part and length + len(line) >= MAX_PART:
            yield "\n".join(part)
            part, length = [], 0
        part.append(line)
        length += len(line) + 1
    yield "\n".join(part)


_LINE_END = re.compile(r"\r\n|\n|\r")

GROWN_LINES = 4
"""Lines by which a text under way grows at once, so that its screen is laid out and scrolled less often."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """The beginning, which later text cannot change: number of its blocks, characters and lines."""

    blocks: int = 0
    characters: int = 0
    lines: int = 0


class Prose(Widget):
    """Shows Markdown. One widget however much there is, so that a screen with long answers is as quick as any."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"h{level}" for level in range(1, 7)),
        *("em", "strong", "s", "code_inline", "code", "quote", "quoted", "bullet", "rule", "address"),
    }
    DEFAULT_CSS = """
    Prose {
        width: 1fr;
        height: auto;
        & > .h1 { color: $markdown-h1-color; text-style: bold underline; }
        & > .h2 { color: $markdown-h2-color; text-style: bold underline; }
        & > .h3 { color: $markdown-h3-color; text-style: bold; }
        & > .h4, & > .h5, & > .h6 { text-style: bold; }
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
        & > .code_inline { color: $text-warning; background: $foreground 8%; }
        & > .code { background: $foreground 8%; }
        & > .quote { color: $primary; }
        & > .quoted { color: $muted; }
        & > .bullet { color: $primary; }
        & > .rule { color: $muted; }
        & > .address { color: $muted; }
    }
    """

    @dataclass
    class LinkPressed(Message):
        """A link was clicked."""

        prose: Prose
        href: str

    def __init__(self, markdown: str = "", *, grows: bool = False, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._grows = grows
        self._source = ""
        self._blocks: list[Block] = []
        self._settled = _Settled()
        self._lines: list[Content] = []
        self._width = 0
        self._strips: dict[int, Strip] = {}
        self.update(markdown, grows=grows)

    @property
    def source(self) -> str:
        """The Markdown that is shown."""
        return self._source

    def update(self, markdown: str, *, grows: bool = False) -> None:
        """Show another text. grows: there will be more of it, so some room is kept beneath."""
        if grows != self._grows:
            self._grows = grows
            self.refresh(layout=True)
        self._source = ""
        self._blocks = []
        self._settled = _Settled()
        self.append(markdown)

    def append(self, markdown: str) -> None:
        """There is more of it: what may change is the end, and it alone is read again."""
        self._source += printable_lines(_LINE_END.sub("\n", markdown))
        tail = self._source[self._settled.characters :]
        found = blocks(tail, first=not self._settled.blocks)
        self._blocks[self._settled.blocks :] = found
        laid_out = [self._lay_out(block) for block in found] if self._width else []
        if self._width:
            self._show([line for lines in laid_out for line in lines])
        else:
            self.refresh(layout=True)
        settled = _settled(tail, found)
        self._settled = _Settled(
            self._settled.blocks + settled,
            self._settled.characters + (_start_of(tail, found[settled].line) if settled else 0),
            self._settled.lines + sum(map(len, laid_out[:settled])),
        )

    def _show(self, lines: list[Content]) -> None:
        """These lines stand where the end begins: draw what differs from before."""
        begin = self._settled.lines
        old = self._lines[begin:]
        same = next((n for n, (a, b) in enumerate(zip(old, lines, strict=False)) if not a.is_same(b)), None)
        first = begin + (min(len(old), len(lines)) if same is None else same)
        rows, count = self._rows, len(self._lines)
        self._lines[begin:] = lines
        for row in [y for y in self._strips if y >= first]:
            del self._strips[row]
        if rows != self._rows:
            self.refresh(layout=True, repaint=False)
        if changed := max(count, len(self._lines)) - first:
            self.refresh(Region(0, first, self._width, changed))

    @property
    def _rows(self) -> int:
        count = len(self._lines)
        return -(-count // GROWN_LINES) * GROWN_LINES if self._grows else count

    def _lay_out(self, block: Block) -> list[Content]:
        return [
            for_terminal(self.app, line) if not isinstance(piece, Code) else line
            for piece in block.pieces
            for line in lay_out(piece, self._width, self._highlight)
        ]

    def _lay_out_all(self, width: int) -> None:
        self._width = width
        laid_out = [self._lay_out(block) for block in self._blocks]
        self._lines = [line for lines in laid_out for line in lines]
        self._settled = replace(self._settled, lines=sum(map(len, laid_out[: self._settled.blocks])))
        self._strips.clear()

    def _highlight(self, code: str, language: str) -> Content:
        if not language:
            return Content(code)
        theme = HighlightTheme
        if self.app.native_ansi_color:
            theme = ANSIDarkHighlightTheme if self.app.current_theme.dark else ANSILightHighlightTheme
        return highlight_code(code, language, theme)

    # -- Textual's side ----------------------------------------------------------------------------------------------

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """As wide as there is room."""
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Lines at that width."""
        if width and width != self._width:
            self._lay_out_all(width)
        return self._rows

    def render_line(self, y: int) -> Strip:
        """One line, drawn once as long as nothing about it changes."""
        width = self.size.width
        if width != self._width:
            self._lay_out_all(width)
        if y >= len(self._lines):
            return Strip.blank(width, self.visual_style.rich_style)
        if (selection := self.text_selection) is not None:
            return self._draw(y, selection)
        if (strip := self._strips.get(y)) is None:
            strip = self._strips[y] = self._draw(y)
        return strip

    def _draw(self, y: int, selection: Selection | None = None) -> Strip:
        line, style = self._lines[y], self.visual_style
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            selected = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            line = line.stylize(selected, start, len(line.plain) if end == -1 else end)
        strips = Visual.to_strips(self, line, self._width, 1, style, apply_selection=False, pad=True)
        strip = strips[0] if strips else Strip.blank(self._width, style.rich_style)
        return strip.apply_offsets(0, y)

    def notify_style_update(self) -> None:
        """Colours changed."""
        super().notify_style_update()
        self._strips.clear()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text that is selected, as it is shown."""
        return selection.extract("\n".join(line.plain for line in self._lines)), "\n"

    def action_link(self, href: str) -> None:
        """A link was clicked."""
        self.post_message(self.LinkPressed(self, href))


def _settled(text: str, found: Sequence[Block]) -> int:
    """How many of the blocks of a text are settled: those before the last whose first line has come to its end."""
    lines = sum(1 for _ in _LINE_END.finditer(text))
    return max((n for n, block in enumerate(found) if block.line < lines), default=0)


def _start_of(text: str, line: int) -> int:
    """Where a line begins, as Markdown counts lines."""
    return next(islice(_LINE_END.finditer(text), line - 1, None)).end() if line else 0
