"""The parts of the program that said something, with how many lines each has; one of them, or all, is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical

from console.widgets.table import Column, Row, Table, cell

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
