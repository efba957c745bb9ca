"""One result of a bench: its table, a plot of any of its numbers, what others got, and all that one must know."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.bench.export import csv_text, plot
from console.bench.result import BenchResult, encode_result
from console.bench.text import heading_text, published_text, span
from console.link.benches import BenchEntry
from console.text import clip
from console.tui.screens.base import Dialog
from console.tui.screens.benches.plot import bars, plottable_columns
from console.tui.screens.save_dialog import save_file, suggested_path
from console.tui.widgets.bench import table_of
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import after_layout
from console.tui.widgets.table import Column, OpeningTable, Row, Table, cell

# The results of benches that are remembered, a row each, the newest first.

NO_RESULT = "No results yet."
_TIME_CELLS = 16
_COLUMNS = (
    Column("", 1),
    Column("#", 4, "right", drop=2),
    Column("started", _TIME_CELLS),
    Column("bench", 7),
    Column("found", 33, grow=30),
    Column("model", 12, grow=20, drop=4),
    Column("with", 18, grow=40, drop=5),
    Column("took", 10, "right", drop=1),
)


class BenchHistoryTable(OpeningTable):
    """Its keys are the results' numbers."""

    def __init__(self) -> None:
        super().__init__(_COLUMNS, empty=NO_RESULT, id="bench-history")

    def show_entries(self, entries: Sequence[BenchEntry], marked: Collection[int], *, read_only: bool = False) -> None:
        """In the order given. read_only: no bench can be run from here."""
        empty = NO_RESULT if read_only else f"{NO_RESULT} Press n to run a benchmark."
        self.show([_row(entry, entry.id in marked) for entry in entries], empty=empty)

    @property
    def chosen(self) -> int | None:
        """The number of the result under the cursor."""
        key = self.cursor_key
        return int(key) if key is not None else None


def _row(entry: BenchEntry, is_marked: bool) -> Row:
    model = entry.model if entry.target == "engine" else f"{entry.model} at {entry.target}"
    cut = "" if entry.complete else "◇ "
    cells = (
        cell("●" if is_marked else "", "bold $primary"),
        cell(str(entry.id), "$muted"),
        cell(local_minute(entry.started), "$muted"),
        cell(entry.bench, "bold"),
        ((cut, "$warning"), (entry.headline or "nothing", "")),
        cell(model, ""),
        cell(entry.settings, "$muted"),
        cell(span(entry.duration_s), "$muted"),
    )
    return Row(str(entry.id), cells)


def local_minute(started: str) -> str:
    """ "2026-03-01 12:30", by the clock of who looks; what is no time, as it begins."""
    try:
        return f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # another instance may say anything
        return clip(started, _TIME_CELLS)


_CUT = "Ended early; partial results."
_NAME_LENGTH = 40


class BenchResultScreen(Dialog[None]):
    """number: of the result in the history."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "p,right,l", "number(1)", "Next number", id="bench.next", tooltip="Plot the next number", key_display="→"
        ),
        Binding(
            "P,left,h",
            "number(-1)",
            "Previous number",
            id="bench.before",
            tooltip="Plot the previous number",
            key_display="←",
        ),
        Binding(
            "w",
            "write",
            "Save files",
            id="bench.write",
            tooltip="Save the result as JSON and CSV, and its plot as SVG",
        ),
        Binding("escape,q", "dismiss", "Close", id="bench.result.close", tooltip="Close the result", key_display="esc"),
    ]

    def __init__(self, number: int, result: BenchResult) -> None:
        super().__init__()
        self._result = result
        self._kept_as = number
        self._number = 0

    def compose(self) -> ComposeResult:
        """Top to bottom."""
        result = self._result
        columns, rows = table_of(result.keys, result.columns, result.rows)
        with VerticalScroll(id="bench-page") as page:
            page.border_title = Content(f"{result.name} of {local_minute(result.started)}, #{self._kept_as}")
            yield Static(for_terminal(self.app, Content(heading_text(result))), id="bench-about", markup=False)
            table = Table(columns, empty="Nothing was measured.")
            table.can_focus = False
            table.styles.height = len(rows) + 1
            table.show(rows)
            yield table
            yield Static(id="bench-bars", markup=False)
            yield Static(for_terminal(self.app, _notes(result)), id="bench-notes", markup=False)
            yield Static(for_terminal(self.app, _published(result)), id="bench-published", markup=False)

    def on_mount(self) -> None:
        """Once there is a width."""
        after_layout(self, self._draw)

    def on_resize(self) -> None:
        """Bars are as long as there is room."""
        after_layout(self, self._draw)

    def _draw(self) -> None:
        numbers = plottable_columns(self._result)
        width = self.query_one(VerticalScroll).scrollable_content_region.width
        if not numbers or not width:
            return
        column = numbers[self._number % len(numbers)]
        unit = f", {column.unit}" if column.unit else ""
        better = f"  {column.better} is better" if column.better else ""
        title = Content.assemble((f"{column.title}{unit}", "bold $primary"), (better, "$muted"))
        lines = [title, *bars(self._result, column, width)]
        self.query_one("#bench-bars", Static).update(for_terminal(self.app, Content("\n").join(lines)))

    def action_number(self, by: int) -> None:
        """Another number."""
        self._number += by
        self._draw()

    def action_write(self) -> None:
        """Save the result for programs, and its plot, where the operator says."""
        result, numbers = self._result, plottable_columns(self._result)
        column = numbers[self._number % len(numbers)].name if numbers else ""
        name = re.sub(r"\W+", "-", result.name)[:_NAME_LENGTH]  # another instance may call it a path
        others = {".csv": lambda: csv_text(result).encode(), ".svg": lambda: plot(result, column).encode()}
        path = suggested_path(f"bench-{name}-{self._kept_as}.json")
        save_file(
            self.app,
            "Save the result (JSON; CSV and SVG next to it)",
            path,
            lambda: encode_result(result),
            others=others,
        )


def _notes(result: BenchResult) -> Content:
    cut = [Content.styled(f"◇ {_CUT}", "$warning")] if not result.complete else []
    return Content("\n").join((*cut, *map(Content, result.notes)))


def _published(result: BenchResult) -> Content:
    return Content.styled(published_text(result) if result.published else "", "$muted")
