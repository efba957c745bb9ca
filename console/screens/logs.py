"""Logs: what the engine, its workers and the API said."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console.link import ApiStatus
from console.screens.base import ConsoleScreen
from console.widgets.log_view import LEVELS, LogView
from engine.snapshot import Snapshot


class LogsScreen(ConsoleScreen):
    """The log with a filter."""

    MODE = "logs"
    AUTO_FOCUS = "LogView"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Filter", id="logs.filter", tooltip="Show only lines with a word", key_display="/"),
        Binding("v", "level", "Level", id="logs.level", tooltip="Show fewer levels, then all again"),
        Binding("g", "top", "Top", id="logs.top", tooltip="Go to the oldest line", show=False),
        Binding("G,end", "bottom", "Bottom", id="logs.bottom", tooltip="Go to the newest line and follow it"),
        Binding("escape", "leave", "Leave", id="logs.leave", tooltip="Clear the filter", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    def compose_body(self) -> ComposeResult:
        """The lines; the filter's box under them."""
        yield LogView()
        yield Input(placeholder="Filter: / then a word. Escape clears it.", id="word")

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """What came since the last look."""
        if snapshot.log_total == self._seen:
            return
        self._seen, entries = self.link.logs(self._seen)
        if entries:
            self.query_one(LogView).add(entries)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as it is typed."""
        self.query_one(LogView).filter(word=event.value)

    def on_input_submitted(self) -> None:
        """Back to the lines, filter kept."""
        self.query_one(LogView).focus()

    def action_find(self) -> None:
        """Type a word."""
        self.query_one("#word", Input).focus()

    def action_leave(self) -> None:
        """All lines again."""
        self.query_one("#word", Input).value = ""
        self.query_one(LogView).focus()

    def action_level(self) -> None:
        """The next higher level, then all."""
        view = self.query_one(LogView)
        view.filter(level=LEVELS[(LEVELS.index(view.level) + 1) % len(LEVELS)])

    def action_top(self) -> None:
        """Oldest."""
        self.query_one(LogView).scroll_home(animate=False)

    def action_bottom(self) -> None:
        """Newest."""
        self.query_one(LogView).scroll_end(animate=False)
