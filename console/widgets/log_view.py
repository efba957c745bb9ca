"""The log: newest at the end, followed unless the operator scrolled up, filtered by level and by a word."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.widgets import RichLog

from engine.snapshot import LogEntry

MAX_LINES = 5000
_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warn", logging.ERROR: "error"}
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


class LogView(RichLog):
    """Lines of the log. Component classes colour the levels."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "log--time",
        "log--info",
        "log--warning",
        "log--error",
        "log--debug",
        "log--source",
    }

    DEFAULT_CSS = """
    LogView {
        height: 1fr;
        scrollbar-size: 1 1;
        background: $background;
        &:focus { background-tint: transparent; }
        & > .log--time { color: $muted; }
        & > .log--source { color: $primary; }
        & > .log--debug { color: $muted; }
        & > .log--info { color: $foreground; }
        & > .log--warning { color: $warning; }
        & > .log--error { color: $error; text-style: bold; }
    }
    """

    def __init__(self) -> None:
        super().__init__(max_lines=MAX_LINES, wrap=True, markup=False, highlight=False, classes="panel")
        self.border_title = "Log"
        self._entries: deque[LogEntry] = deque(maxlen=MAX_LINES)
        self._level = logging.DEBUG
        self._word = ""

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Append lines."""
        self._entries.extend(entries)
        for entry in entries:
            if self._wanted(entry):
                self.write(self._line(entry), scroll_end=self.is_vertical_scroll_end)
        self._say()

    def filter(self, *, level: int | None = None, word: str | None = None) -> None:
        """Show only lines of at least `level` that contain `word`."""
        self._level = self._level if level is None else level
        self._word = self._word if word is None else word.casefold()
        self.clear()
        for entry in self._entries:
            if self._wanted(entry):
                self.write(self._line(entry), scroll_end=True)
        self._say()

    @property
    def level(self) -> int:
        """The least level shown."""
        return self._level

    def _wanted(self, entry: LogEntry) -> bool:
        return entry.level >= self._level and self._word in f"{entry.source} {entry.message}".casefold()

    def _say(self) -> None:
        shown = (
            sum(map(self._wanted, self._entries)) if self._word or self._level > logging.DEBUG else len(self._entries)
        )
        self.border_subtitle = f"{shown} of {len(self._entries)} lines · {_NAMES[self._level]} and above"

    def _line(self, entry: LogEntry) -> Text:
        word = _NAMES[max((level for level in LEVELS if level <= entry.level), default=logging.DEBUG)]
        part = "warning" if word == "warn" else word
        stamp = time.strftime("%H:%M:%S", time.localtime(entry.at))
        return Text.assemble(
            (stamp, self.get_component_rich_style("log--time", partial=True)),
            "  ",
            (f"{word:<5}", self.get_component_rich_style(f"log--{part}", partial=True)),
            "  ",
            (f"{entry.source:<7}", self.get_component_rich_style("log--source", partial=True)),
            " ",
            (entry.message, self.get_component_rich_style(f"log--{part}", partial=True)),
        )
