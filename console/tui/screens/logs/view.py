"""The log: newest at the end, followed until the operator scrolls up or chooses a line. Only what is seen is drawn."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from rich.cells import chop_cells
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

from console import text
from console.text import local_time
from console.tui.screens.logs.log_lines import LEVEL_NAMES, Line, LogLines, level_of
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.table import component_style
from engine.snapshot import LogEntry

SOURCE_CELLS = 8
_BEFORE = 8 + 2 + 5 + 2 + SOURCE_CELLS + 1
_MIN_CELLS = 20
_STYLES = {"debug": "$muted", "info": "", "warn": "$warning", "error": "bold $error"}
_EMPTY = "No log lines yet."
_NONE_WANTED = "No line matches the filters. Esc clears it, h shows access lines."


class LogView(ScrollView, can_focus=True):
    """Lines of the log, long ones wrapped. It follows new ones unless it was scrolled up or a line is chosen."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"log--cursor", "log--empty"}
    DEFAULT_CSS = """
    LogView {
        height: 1fr; width: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: scroll;
        background: $background;
        & > .log--cursor { background: $panel; }
        &:focus > .log--cursor { background: $block-cursor-background; }
        & > .log--empty { color: $muted; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", id="log.up", tooltip="Select the previous line", show=False, system=True),
        Binding("down,j", "move(1)", "Down", id="log.down", tooltip="Select the next line", show=False, system=True),
        Binding("pageup", "page(-1)", "Page up", id="log.page_up", tooltip="Go up a page", show=False, system=True),
        Binding(
            "pagedown", "page(1)", "Page down", id="log.page_down", tooltip="Go down a page", show=False, system=True
        ),
    ]

    class Changed(Message):
        """Another line is chosen, or the following began or ended."""

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self.border_title = "Log"
        self._lines = LogLines()
        self._end = 0
        self._width = 0
        self._chosen: Line | None = None
        self._follows = True
        self._unseen = 0

    # -- what is in it ----------------------------------------------------------------------------------------------

    @property
    def lines(self) -> LogLines:
        """All lines, and which are wanted."""
        return self._lines

    @property
    def follows(self) -> bool:
        """True if the view scrolls to new lines."""
        return self._follows

    @property
    def unseen(self) -> int:
        """Wanted lines that came since it stopped following."""
        return self._unseen

    @property
    def chosen(self) -> Line | None:
        """The line under the cursor."""
        return self._chosen

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Append lines. What is looked at stays where it is."""
        top = self._first_row
        added = self._lines.add(entries)
        self._place(added)
        if self._chosen is not None and self._chosen.row < self._first_row:
            self._chosen = None
        self._unseen = 0 if self._follows else self._unseen + len(added)
        self._resize(removed=self._first_row - top)

    def clear(self) -> None:
        """Show no line any more."""
        self._lines.clear()
        self._chosen, self._unseen = None, 0
        self._place_all()
        self._resize()

    def filter(
        self,
        *,
        level: int | None = None,
        source: str | None = None,
        word: str | None = None,
        access: bool | None = None,
    ) -> None:
        """Show other lines, the newest of them."""
        if self._lines.want(level=level, source=source, word=word, access=access):
            self._place_all()
            self.follow()

    def follow(self) -> None:
        """Go to the newest line and stay there."""
        self._chosen, self._follows, self._unseen = None, True, 0
        self._resize()
        self.post_message(self.Changed())

    # -- where lines are --------------------------------------------------------------------------------------------

    @property
    def _first_row(self) -> int:
        return self._lines.shown[0].row if self._lines.shown else self._end

    def _place(self, lines: Iterable[Line]) -> None:
        """Wrap lines, once it is known how wide, and give them rows after all others."""
        if not self._width:
            return
        room = max(_MIN_CELLS, self._width - _BEFORE)
        for line in lines:
            if line.width != room:
                line.rows, line.width = wrap_message(line.message, room), room
            line.row = self._end
            self._end += len(line.rows)

    def _place_all(self) -> None:
        self._end = 0
        self._place(self._lines.shown)

    def _resize(self, *, removed: int = 0) -> None:
        """removed: rows that were taken away at the beginning."""
        self.virtual_size = Size(0, max(1, self._end - self._first_row))
        if self._follows:
            self.call_after_refresh(self._keep_up)
        elif removed:
            self.scroll_to(y=max(0.0, self.scroll_y - removed), animate=False, force=True)
        self.refresh()

    def _keep_up(self) -> None:
        if self._follows:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)

    def on_resize(self) -> None:
        """Wrap the lines to the width; the line at the top stays there."""
        width = self.scrollable_content_region.width
        if width != self._width:
            at_top = self._line_at(0)
            self._width = width
            self._place_all()
            self._resize()
            if at_top is not None and not self._follows:
                self.scroll_to(y=at_top[0].row - self._first_row, animate=False, force=True)
        elif self._follows:
            self.call_after_refresh(self._keep_up)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """At the end it follows, unless a line is chosen; above it holds still."""
        super().watch_scroll_y(old_value, new_value)
        follows = self._chosen is None and round(new_value) >= self.max_scroll_y
        if follows != self._follows:
            self._follows = follows
            if follows:
                self._unseen = 0
            self.post_message(self.Changed())

    def _line_at(self, y: int) -> tuple[Line, int] | None:
        """The line seen at row `y` of the widget, and which of its rows that is."""
        shown = self._lines.shown
        row = self._first_row + round(self.scroll_y) + y
        if not shown or row >= self._end:
            return None
        line = shown[bisect_right(shown, row, key=lambda each: each.row) - 1]
        return line, row - line.row

    # -- drawing ----------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """One row of a line."""
        if not self._lines.shown:
            notice = _NONE_WANTED if len(self._lines) else _EMPTY
            return self._strip(Content(notice if y == 0 else ""), "log--empty")
        found = self._line_at(y)
        if found is None:
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        line, part = found
        return self._strip(row_content(line, part), *(("log--cursor",) if line is self._chosen else ()))

    def _strip(self, content: Content, *components: str) -> Strip:
        content = for_terminal(self.app, content)
        return Visual.to_strips(
            self, content, self.size.width, 1, component_style(self, *components), pad=True, apply_selection=False
        )[0]

    # -- choosing a line --------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Select the previous line or below; at first the lowest that is seen."""
        shown = self._lines.shown
        if not shown:
            return
        if self._chosen is None:
            found = self._line_at(max(0, self.scrollable_content_region.height - 1))
            self._choose(found[0] if found is not None else shown[-1])
            return
        index = bisect_right(shown, self._chosen.row, key=lambda each: each.row) - 1 + by
        self._choose(shown[min(max(0, index), len(shown) - 1)])

    def choose_warning(self, by: int) -> bool:
        """Choose the next (1) or previous (-1) warning or error, the newest where no line is chosen; False where there
        is none. After the last comes the first."""
        found = [line for line in self._lines.shown if line.entry.level >= logging.WARNING]
        if not found:
            return False
        if self._chosen is None:
            self._choose(found[-1])
            return True
        rows = [line.row for line in found]
        at = bisect_right(rows, self._chosen.row) if by > 0 else bisect_left(rows, self._chosen.row) - 1
        self._choose(found[at % len(found)])
        return True

    def action_page(self, by: int) -> None:
        """Scroll by what is seen."""
        self.scroll_relative(y=by * max(1, self.scrollable_content_region.height - 1), animate=False, force=True)

    def on_click(self, event: events.Click) -> None:
        """Choose the line that was clicked."""
        offset = event.get_content_offset(self)
        if offset is not None and (found := self._line_at(offset.y)) is not None:
            self._choose(found[0])

    def _choose(self, line: Line) -> None:
        self._chosen, self._follows = line, False
        region = Region(0, line.row - self._first_row, 1, len(line.rows))
        self.scroll_to_region(region, animate=False, force=True, x_axis=False)
        self.refresh()
        self.post_message(self.Changed())


def row_content(line: Line, part: int) -> Content:
    """Row `part` of a line: the first has all that is known of it, the others go on below its message."""
    word = LEVEL_NAMES[level_of(line.entry)]
    style, message = _STYLES[word], line.rows[part]
    if part:
        return Content.assemble(" " * _BEFORE, (message, style))
    return Content.assemble(
        (local_time(line.entry.at), "$muted"),
        "  ",
        (f"{word:<5}", style),
        "  ",
        (f"{text.clip(line.source, SOURCE_CELLS):<{SOURCE_CELLS}} ", "$primary"),
        (message, style),
    )


def wrap_message(message: str, width: int) -> tuple[str, ...]:
    """A message in rows of at most `width` cells, cut at spaces where that can be; one row at least."""
    if len(message) <= width and message.isascii() and "\n" not in message:
        return (message,)
    rows: list[str] = []
    for part in message.splitlines():
        rows += _cut(part, width) if part.isascii() else chop_cells(part, width) or [part]  # of no width at all
    return tuple(rows) or ("",)


def _cut(part: str, width: int) -> Iterator[str]:
    """ASCII alone, where a character is a cell: `textwrap` takes far longer, and there are thousands of lines."""
    start = 0
    while len(part) - start > width:
        space = part.rfind(" ", start + 1, start + width + 1)
        end, after = (space, space + 1) if space > 0 else (start + width, start + width)
        yield part[start:end]
        start = after
    yield part[start:]
