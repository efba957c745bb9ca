"""A bench under way: what it is at, how far it is, and its table as it grows."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from console.bench.news import BenchProgress
from console.bench.text import span
from console.links.benches import BenchReport
from console.widgets.bars import meter
from console.widgets.bench_table import table_of
from console.widgets.glyphs import fitted
from console.widgets.table import Table

NO_ROW = "The first row is being measured."
_AFTER = 30
"""Cells behind the bar, for what is left."""


class BenchProgressPanel(Vertical):
    """Two lines and a table."""

    def __init__(self) -> None:
        super().__init__()
        self._report = BenchReport()

    def compose(self) -> ComposeResult:
        """Head, then rows."""
        yield Static(id="bench-head", markup=False)
        yield Table((), empty=NO_ROW, id="bench-rows")

    def on_resize(self) -> None:
        """The bar is as long as there is room."""
        self.show(self._report)

    def show(self, report: BenchReport) -> None:
        """How it stands."""
        self._report = report
        progress = report.progress
        head = Content("\n").join((_state(report), _bar(progress, self.size.width)))
        self.query_one("#bench-head", Static).update(fitted(self.app, head))
        if progress is not None:
            columns, rows = table_of(progress.keys, progress.columns, progress.rows)
            self.query_one(Table).show(rows, columns=columns)


def fraction(progress: BenchProgress | None) -> float:
    """How far it is, 0..1; what warms up does not count."""
    if progress is None or not progress.total or progress.doing == "warming up":
        return 0.0
    return min(1.0, progress.done / progress.total)


def brief(report: BenchReport) -> str:
    """In a few words, for a screen that is about something else."""
    progress = report.progress
    left = "" if progress is None or progress.left_s is None else f", {span(progress.left_s)} left"
    return f"bench {report.bench} {fraction(progress):.0%}{left}"


def _bar(progress: BenchProgress | None, width: int) -> Content:
    share = fraction(progress)
    left = "" if progress is None or progress.left_s is None else f"about {span(progress.left_s)} left"
    line = meter(share, max(8, width - _AFTER), "$worker-loading")
    return Content.assemble(line, (f"{share:>6.0%}", "bold"), (f"  {left}", "$muted"))


def _state(report: BenchReport) -> Content:
    words = "stopping" if report.state == "stopping" else "measuring"
    return Content.assemble(
        (f"◔ {words} {report.bench}", "bold $worker-loading"),
        *((f"  ·  {part}", "$foreground") for part in _parts(report.progress)),
        (f"  ·  {report.model}", "$muted"),
    )


def _parts(progress: BenchProgress | None) -> list[str]:
    if progress is None:
        return []
    repeat = f"repeat {progress.repeat + 1} of {progress.repeats}" if progress.repeats > 1 else ""
    done = f"{progress.done:,} of {progress.total:,}" if progress.doing != "warming up" else ""
    return [part for part in (progress.doing, done, repeat) if part]
