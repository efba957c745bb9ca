"""One result of a bench: its table, a plot of any of its numbers, what others got, and all that one must know."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from console.bench.csv_file import write_csv
from console.bench.result import BenchResult, write_result
from console.bench.svg import plot
from console.bench.text import heading_text, published_text
from console.widgets.bench_history import moment
from console.widgets.bench_plot import bars, plotted
from console.widgets.bench_table import table_of
from console.widgets.glyphs import fitted
from console.widgets.key_row import KeyRow
from console.widgets.table import Table
from engine.errors import EngineError
from engine.files import replace_file

_CUT = "It ended early: these are the numbers that there were by then."
_NAME_LENGTH = 40


class BenchResultScreen(ModalScreen[None]):
    """number: of the result in the history."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "p,right,l", "number(1)", "Next number", id="bench.next", tooltip="Plot the next number", key_display="→"
        ),
        Binding(
            "P,left,h",
            "number(-1)",
            "Number before",
            id="bench.before",
            tooltip="Plot the number before",
            key_display="←",
        ),
        Binding(
            "w",
            "write",
            "Write files",
            id="bench.write",
            tooltip="Write the result as JSON and CSV, and its plot as SVG, into the current folder",
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
            page.border_title = Content(f"{result.name} of {moment(result.started)}, number {self._kept_as}")
            yield Static(fitted(self.app, Content(heading_text(result))), id="bench-about", markup=False)
            table = Table(columns, empty="Nothing was measured.")
            table.can_focus = False
            table.styles.height = len(rows) + 1
            table.show(rows)
            yield table
            yield Static(id="bench-bars", markup=False)
            yield Static(fitted(self.app, _notes(result)), id="bench-notes", markup=False)
            yield Static(fitted(self.app, _published(result)), id="bench-published", markup=False)
        yield KeyRow()

    def on_mount(self) -> None:
        """Once there is a width."""
        self.call_after_refresh(self._draw)

    def on_resize(self) -> None:
        """Bars are as long as there is room."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        numbers = plotted(self._result)
        width = self.query_one(VerticalScroll).scrollable_content_region.width
        if not numbers or not width:
            return
        column = numbers[self._number % len(numbers)]
        unit = f", {column.unit}" if column.unit else ""
        better = f"  {column.better} is better" if column.better else ""
        title = Content.assemble((f"{column.title}{unit}", "bold $primary"), (better, "$muted"))
        lines = [title, *bars(self._result, column, width)]
        self.query_one("#bench-bars", Static).update(fitted(self.app, Content("\n").join(lines)))

    def action_number(self, by: int) -> None:
        """Another number."""
        self._number += by
        self._draw()

    def action_write(self) -> None:
        """Beside where the console was started."""
        self.run_worker(self._write(), group="write", exclusive=True, exit_on_error=False)

    async def _write(self) -> None:
        numbers = plotted(self._result)
        column = numbers[self._number % len(numbers)].name if numbers else ""
        name = re.sub(r"\W+", "-", self._result.name)[:_NAME_LENGTH]  # another instance may call it a path
        stem = Path.cwd() / f"bench-{name}-{self._kept_as}"
        try:
            await asyncio.to_thread(_write_files, stem, self._result, column)
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
        except OSError as error:
            self.notify(f"{stem}.svg cannot be written: {error.strerror}", severity="error", markup=False)
        else:
            self.notify(f"Saved {stem}.json, .csv and .svg", markup=False)


def _write_files(stem: Path, result: BenchResult, column: str) -> None:
    write_result(stem.with_suffix(".json"), result)
    write_csv(stem.with_suffix(".csv"), result)
    replace_file(stem.with_suffix(".svg"), plot(result, column).encode())


def _notes(result: BenchResult) -> Content:
    cut = [Content.styled(f"◇ {_CUT}", "$warning")] if not result.complete else []
    return Content("\n").join((*cut, *map(Content, result.notes)))


def _published(result: BenchResult) -> Content:
    return Content.styled(published_text(result) if result.published else "", "$muted")
