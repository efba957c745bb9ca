"""Logs: lines of the engine, its workers and the API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, Static

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.logs.log_lines import LEVEL_NAMES, LEVELS, LogLines, line_text
from console.tui.screens.logs.view import LogView
from console.tui.screens.save_dialog import save_file, suggested_path
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.table import Column, Row, Table, cell

# The sources of lines, with their counts; one of them, or all, is chosen.

ALL = "all"
_COLUMNS = (Column("from", 8, grow=8), Column("lines", 6, "right"))


class LogSources(Vertical):
    """The list. The row under its cursor is the source that is shown."""

    DEFAULT_CSS = """
    LogSources { width: 24; height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__(id="sources", classes="panel")
        self.border_title = "Sources"
        self._table = Table(_COLUMNS, id="source-table")
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield self._table

    @property
    def table(self) -> Table:
        """The table."""
        return self._table

    def show(self, counts: Sequence[tuple[str, int]], chosen: str) -> None:
        """Each source's lines; `chosen` is "" for all."""
        if (shown := (tuple(counts), chosen)) != self._shown:
            self._shown = shown
            total = sum(count for _, count in counts)
            named = [(ALL, total), *counts]
            self._table.show([_row(name, count, name == (chosen or ALL)) for name, count in named])


def _row(name: str, count: int, chosen: bool) -> Row:
    mark, style = ("▸ ", "bold $primary") if chosen else ("  ", "")
    return Row(name, (cell(f"{mark}{name}", style), cell(f"{count:,}", style or "$muted")))


class LogsScreen(ConsoleScreen):
    """The log, filtered by level, by source and by a word."""

    MODE = "logs"
    AUTO_FOCUS = "LogView"

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "slash",
            "find",
            "Find",
            id="logs.filter",
            primary=True,
            tooltip="Search: show only matching lines",
            key_display="/",
        ),
        Binding("v", "level", "Level", id="logs.level", tooltip="Hide the lowest level; again: hide more, then none"),
        Binding("w", "warning(1)", "Warning", id="logs.warning", tooltip="Go to the next warning or error"),
        Binding(
            "h", "access", "Access", id="logs.access", tooltip="Show or hide the access lines, one per HTTP request"
        ),
        Binding("s", "sources", "Source", id="logs.source", tooltip="Show only one source"),
        Binding("f,G,end", "follow", "Follow", id="logs.bottom", tooltip="Go to the newest line and follow it"),
        Binding("c", "copy", "Copy", id="logs.copy", tooltip="Copy the selected line, or the newest one"),
        Binding("e", "export", "Export", id="logs.export", tooltip="Save the lines that are shown to a file"),
        Binding(
            "W",
            "warning(-1)",
            "Warning before",
            id="logs.warning.before",
            tooltip="Go to the previous warning or error",
            show=False,
        ),
        Binding("g,home", "top", "Top", id="logs.top", tooltip="Go to the oldest line", show=False),
        Binding("escape", "leave", "Clear", id="logs.leave", tooltip="Clear the filters", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0
        self._state = Content("")

    def compose_body(self) -> ComposeResult:
        """Sources next to the lines; under them the search word and the filter."""
        with Horizontal(id="log-body"):
            yield LogSources()
            yield LogView()
        with Horizontal(id="log-foot"):
            yield Input(placeholder="/ search", id="word", compact=True)
            yield Static(id="log-state", markup=False)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to copy and to save while lines are shown."""
        return super().key_states(view) | dict.fromkeys(("logs.copy", "logs.export"), bool(self._view.lines.shown))

    def update_body(self, view: View) -> None:
        """Add the lines since the last frame. Lines and alerts are seen where this screen is, not just made ahead."""
        if self.is_current:
            self.console.alerts.mark_log_seen(view)
        if view.published.log_total == self._seen:
            return
        before, (self._seen, entries) = self._seen, self.link.logs(self._seen)
        if self._seen < before:  # a recording that was wound back
            self._view.clear()
            self._seen, entries = self.link.logs(0)
        if entries or self._seen < before:
            self._view.add(entries)
            self._say()

    @property
    def _view(self) -> LogView:
        return self.query_one(LogView)

    def _say(self) -> None:
        """Show the filter, and whether new lines are followed."""
        view = self._view
        self.query_one(LogSources).show(view.lines.sources(), view.lines.wanted.source)
        state = state_line(view.lines, follows=view.follows, unseen=view.unseen)
        if not state.is_same(self._state):
            self._state = state
            self.query_one("#log-state", Static).update(for_terminal(self.app, state))

    def _filter(
        self,
        *,
        level: int | None = None,
        source: str | None = None,
        word: str | None = None,
        access: bool | None = None,
    ) -> None:
        self._view.filter(level=level, source=source, word=word, access=access)
        self._say()

    # -- what happens -----------------------------------------------------------------------------------------------

    def on_log_view_changed(self) -> None:
        """It follows, or holds still."""
        self._say()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as it is typed."""
        self._filter(word=event.value)

    def on_input_submitted(self) -> None:
        """Back to the lines, filter kept."""
        self._view.focus()

    def on_table_moved(self, event: Table.Moved) -> None:
        """The source under the cursor."""
        self._filter(source="" if event.key == ALL else event.key)

    def on_table_chosen(self) -> None:
        """Back to the lines, source kept."""
        self._close_sources()

    def action_find(self) -> None:
        """Type a word."""
        self.query_one("#word", Input).focus()

    def action_sources(self) -> None:
        """To the sources, and back."""
        table = self.query_one(LogSources).table
        if table.has_focus:
            self._close_sources()
            return
        self.query_one(LogSources).add_class("-open")
        table.focus()

    def _close_sources(self) -> None:
        self._view.focus()
        self.query_one(LogSources).remove_class("-open")

    def action_leave(self) -> None:
        """All lines again; whether access lines are among them stays as it was chosen."""
        self.query_one("#word", Input).value = ""
        table = self.query_one(LogSources).table
        if table.cursor_key is not None:
            table.move_to(0)
        self._filter(level=LEVELS[0], source="", word="")
        self._close_sources()

    def action_level(self) -> None:
        """The next higher level that leaves lines out, then all."""
        lines = self._view.lines
        levels = [LEVELS[0], *(level for level in LEVELS[1:] if lines.has_below(level) or level == lines.wanted.level)]
        self._filter(level=levels[(levels.index(lines.wanted.level) + 1) % len(levels)])

    def action_access(self) -> None:
        """Access lines among the others, or not."""
        self._filter(access=not self._view.lines.wanted.access)

    def action_warning(self, by: int) -> None:
        """Choose the next or previous warning or error."""
        if self._view.choose_warning(by):
            self._view.focus()
        else:
            self.notify("No warnings or errors.")

    def action_top(self) -> None:
        """Oldest."""
        self._view.scroll_home(animate=False)

    def action_follow(self) -> None:
        """Newest."""
        self._view.follow()
        self._view.focus()

    def action_copy(self) -> None:
        """The chosen line, whole."""
        shown = self._view.lines.shown
        line = self._view.chosen or (shown[-1] if shown else None)
        if line is None:
            self.notify("No line to copy.", severity="warning")
            return
        self.app.copy_to_clipboard(line_text(line))
        self.notify("Copied the selected line" if self._view.chosen is not None else "Copied the newest line")

    def action_export(self) -> None:
        """Save the lines that are shown where the operator says."""
        lines = self._view.lines
        if not lines.shown:
            self.notify("No line to save.", severity="warning")
            return
        shown, count = lines.as_text(), text.plural(len(lines.shown), "line")

        def content() -> bytes:
            return "".join(f"{line}\n" for line in shown).encode("utf-8", "replace")

        path = suggested_path(time.strftime("ericllm-log-%Y%m%d-%H%M%S.txt"))
        save_file(self.app, f"Save {count} of the log", path, content, saved=f"Saved {count}")


def state_line(lines: LogLines, *, follows: bool, unseen: int) -> Content:
    """ "● following  120 of 5,000 lines  hidden: info 4,612, access 268"."""
    if follows:
        state = Content.styled("● following", "$success")
    else:
        news = f", {unseen:,} new" if unseen else ""
        state = Content.styled(f"■ paused{news}, f follows", "bold $warning")
    wanted = lines.wanted
    shown = f"{len(lines.shown):,} of " if len(lines.shown) < len(lines) else ""
    source = f", {wanted.source}" if wanted.source else ""
    parts = [state, Content.styled(f"{shown}{len(lines):,} lines{source}", "$muted")]
    hidden = [f"{name} {count:,}" for name, count in lines.hidden()]
    if hidden:
        parts.append(Content.styled(f"hidden: {', '.join(hidden)}", "$warning"))
    elif wanted.level > LEVELS[0]:
        parts.append(Content.styled(f"{LEVEL_NAMES[wanted.level]} and above", "$muted"))
    return Content("  ").join(parts)
