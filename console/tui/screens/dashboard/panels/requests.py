"""Requests: the live ones, and below them the last that ended where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult
from textual.message import Message

from console import text
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.screens.requests.groups import client_of
from console.tui.screens.requests.row_actions import RequestActions
from console.tui.screens.requests.table import empty_text, progress_bar, prompt_progress
from console.tui.view import View, oldest_queued_s
from console.tui.widgets.panel import set_frame
from console.tui.widgets.states import request_state
from console.tui.widgets.table import Cell, Column, OpeningTable, Row, Table, cell
from engine.snapshot import RequestRow, Snapshot

_BAR = 16
_ORDER = {"decode": 0, "prefill": 1, "queued": 2, "finished": 3}
_LIVE_COLUMNS = (
    Column("id", 12, grow=4),
    Column("client", 12, grow=24, drop=4),
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
        self._shows_ended = False

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield OpeningTable(_LIVE_COLUMNS, id="request-table")

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    @property
    def chosen(self) -> RequestRow | None:
        """The request under the cursor."""
        return self._rows.get(self.table.cursor_key or "")

    def toggle_ended(self) -> None:
        """Show the requests that ended, or only the live ones."""
        self._shows_ended = not self._shows_ended

    def show(self, view: View) -> None:
        """Show the requests of `view`. One that ends under the cursor stays, so that no key is about another one."""
        ordered = sorted(view.snapshot.requests, key=lambda row: _ORDER[row.state])
        live = sum(row.state != "finished" for row in ordered)
        ended = len(ordered) - live
        cursor = self.table.cursor_key
        rows = [row for row in ordered if self._shows_ended or row.state != "finished" or row.id == cursor]
        self._rows = {row.id: row for row in rows}
        empty = "" if rows else self._empty_text(view, ended)
        self.table.show([request_row(row) for row in rows], empty=empty, pinned=live)
        set_frame(self, self.TITLE, _counts(view.snapshot, ended, self._shows_ended))

    def _empty_text(self, view: View, ended: int) -> str:
        if ended:
            return f"{empty_text(view)} v shows the last {ended:,} that ended."
        screen = self.screen
        return empty_text(view, lambda: screen.example_curl(view) if isinstance(screen, RequestActions) else "")

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Post the request: Enter, or two clicks."""
        event.stop()
        if (row := self._rows.get(event.key)) is not None:
            self.post_message(self.Opened(row))


def _counts(snapshot: Snapshot, ended: int, shows_ended: bool) -> str:
    """Running, queued and since when, ended and the key that shows or hides them."""
    waits = f" (oldest {text.seconds(oldest)})" if (oldest := oldest_queued_s(snapshot)) is not None else ""
    hint = f", {ended:,} ended (v {'hides' if shows_ended else 'shows'})" if ended else ""
    return f"{snapshot.running} running, {snapshot.queued} queued{waits}{hint}"


def request_row(row: RequestRow) -> Row:
    """One request's cells. During prefill `in` counts the prompt tokens computed so far."""
    ended = row.state == "finished"
    quiet = "$request-done" if ended else ""
    state = request_state(row)
    cells: tuple[Cell, ...] = (
        cell(text.request_id(row.id), "$muted"),
        cell(client_of(row) or "–", quiet),
        cell(f"{state.glyph} {state.word}", state.style),
        cell(row.worker or "–", quiet),
        progress_bar(row, _BAR),
        cell(prompt_progress(row), "$request-prefill" if row.state == "prefill" else quiet),
        cell(str(row.output_tokens), quiet),
        cell(text.waited(row.queued_s), "$request-queued" if row.state == "queued" else quiet),
        cell(text.seconds(row.ttft_s), quiet),
        cell(text.seconds(row.itl_s), quiet),
        cell(text.rate(row.tokens_per_s), quiet if ended else "bold"),
    )
    return Row(row.id, cells)
