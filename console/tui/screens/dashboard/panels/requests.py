"""Requests: the live ones first, then the last that ended."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult
from textual.message import Message

from console import text
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.screens.requests.table import empty_text, prompt_progress
from console.tui.view import View
from console.tui.widgets.panel import set_subtitle
from console.tui.widgets.states import request_state
from console.tui.widgets.table import Cell, Column, Row, Table, cell
from engine.snapshot import RequestRow

_BAR = 16
_ORDER = {"decode": 0, "prefill": 1, "queued": 2, "finished": 3}
_LIVE_COLUMNS = (
    Column("id", 12, grow=12),
    Column("from", 6, drop=2),
    Column("state", 11),
    Column("worker", 6, drop=1),
    Column("progress", _BAR, drop=3),
    Column("in", 9, "right"),
    Column("out", 6, "right"),
    Column("waited", 6, "right"),
    Column("TTFT", 6, "right"),
    Column("ITL", 6, "right"),
    Column("tok/s", 5, "right"),
)


class RequestsPanel(DashboardPanel):
    """The request table, with the counts in its frame."""

    NAME = "requests-panel"
    TITLE = "Requests"
    PLACE = "bottom"
    ORDER = 10

    DEFAULT_CSS = """
    RequestsPanel { height: 1fr; }
    """

    @dataclass
    class Opened(Message):
        """The operator wants to see a request in detail."""

        row: RequestRow

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, RequestRow] = {}

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield Table(_LIVE_COLUMNS, id="request-table")

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    def show(self, view: View) -> None:
        """Show the requests of `view`."""
        snapshot = view.snapshot
        ordered = sorted(snapshot.requests, key=lambda row: _ORDER[row.state])
        self._rows = {row.id: row for row in ordered}
        live = sum(row.state != "finished" for row in ordered)
        empty = empty_text(view)
        self.table.show([request_row(row) for row in ordered], empty=empty, pinned=live)
        set_subtitle(self, f"{snapshot.running} running, {snapshot.queued} queued")

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Post the request: Enter, or two clicks."""
        event.stop()
        if (row := self._rows.get(event.key)) is not None:
            self.post_message(self.Opened(row))


def request_row(row: RequestRow) -> Row:
    """One request's cells. During prefill `in` counts the prompt tokens computed so far."""
    ended = row.state == "finished"
    quiet = "$request-done" if ended else ""
    state = request_state(row)
    cells: tuple[Cell, ...] = (
        cell(row.id, "$muted"),
        cell(row.source, quiet),
        cell(f"{state.glyph} {state.word}", state.style),
        cell(row.worker or "–", quiet),
        _progress(row),
        cell(prompt_progress(row), "$request-prefill" if row.state == "prefill" else quiet),
        cell(str(row.output_tokens), quiet),
        cell(text.seconds(row.queued_s), "$request-queued" if row.state == "queued" else quiet),
        cell(text.seconds(row.ttft_s), quiet),
        cell(text.seconds(row.itl_s), quiet),
        cell(text.rate(row.tokens_per_s), quiet if ended else "bold"),
    )
    return Row(row.id, cells)


def _progress(row: RequestRow) -> Cell:
    """A bar of the prompt's tokens computed, then of the tokens it may give; nothing once it ended."""
    if row.state in ("queued", "finished"):
        return ()
    prefill = row.state == "prefill"
    done, total = (row.computed_tokens, row.prompt_tokens) if prefill else (row.output_tokens, row.max_tokens)
    if not total:
        return ()
    filled = min(_BAR, round(done / total * _BAR))
    style = "$request-prefill" if prefill else "$request-decode"
    return (("━" * filled, style), ("━" * (_BAR - filled), "$gpu-free"))
