"""The results of benches that are remembered, a row each, the newest first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from console.bench.text import span
from console.links.benches import BenchEntry
from console.widgets.table import Column, Row, Table, cell
from console.widgets.text import clip

NO_RESULT = "No result is kept yet. Press b to measure something."
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


class BenchHistoryTable(Table):
    """Its keys are the results' numbers."""

    def __init__(self) -> None:
        super().__init__(_COLUMNS, empty=NO_RESULT, id="bench-history")

    def show_entries(self, entries: Sequence[BenchEntry], marked: Collection[int]) -> None:
        """In the order given."""
        self.show([_row(entry, entry.id in marked) for entry in entries])

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
        cell(moment(entry.started), "$muted"),
        cell(entry.bench, "bold"),
        ((cut, "$warning"), (entry.headline or "nothing", "")),
        cell(model, ""),
        cell(entry.settings, "$muted"),
        cell(span(entry.duration_s), "$muted"),
    )
    return Row(str(entry.id), cells)


def moment(started: str) -> str:
    """ "2026-03-01 12:30", by the clock of who looks; what is no time, as it begins."""
    try:
        return f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # another instance may say anything
        return clip(started, _TIME_CELLS)
