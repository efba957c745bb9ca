"""Requests: the live ones first, then the last that ended."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from console.link import ApiStatus
from console.standing import Standing
from console.widgets import text
from console.widgets.redraw import subtitle
from console.widgets.states import request_state
from console.widgets.table import Cell, Column, Row, Table, cell
from engine.snapshot import RequestRow, Snapshot

_BAR = 16
_PROMPT = 9
_ORDER = {"decode": 0, "prefill": 1, "queued": 2, "finished": 3}
_COLUMNS = (
    Column("id", 12, grow=12),
    Column("from", 6, drop=2),
    Column("state", 11),
    Column("worker", 6, drop=1),
    Column("progress", _BAR, drop=3),
    Column("in", _PROMPT, "right"),
    Column("out", 6, "right"),
    Column("waited", 6, "right"),
    Column("TTFT", 6, "right"),
    Column("ITL", 6, "right"),
    Column("tok/s", 5, "right"),
)


class RequestsPanel(Vertical):
    """The request table, with the counts in its frame."""

    DEFAULT_CSS = """
    RequestsPanel { height: 1fr; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "Requests"
        self._rows: dict[str, RequestRow] = {}

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield Table(_COLUMNS, id="request-table")

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    def show(self, snapshot: Snapshot, api: ApiStatus, standing: Standing) -> None:
        """The requests now."""
        ordered = sorted(snapshot.requests, key=lambda row: _ORDER[row.state])
        self._rows = {row.id: row for row in ordered}
        live = sum(row.state != "finished" for row in ordered)
        empty = no_requests(snapshot, api, standing)
        self.table.show([request_row(row) for row in ordered], empty=empty, pinned=live)
        subtitle(self, f"{snapshot.running} running, {snapshot.queued} queued")

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Look at one closely."""
        from console.screens.request import RequestScreen

        event.stop()
        if (row := self._rows.get(event.key)) is not None:
            self.app.push_screen(RequestScreen(row))


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
        cell(prompt_shown(row), "$request-prefill" if row.state == "prefill" else quiet),
        cell(str(row.output_tokens), quiet),
        cell(text.seconds(row.queued_s), "$request-queued" if row.state == "queued" else quiet),
        cell(text.seconds(row.ttft_s), quiet),
        cell(text.seconds(row.itl_s), quiet),
        cell(text.rate(row.tokens_per_s), quiet if ended else "bold"),
    )
    return Row(row.id, cells)


def prompt_shown(row: RequestRow) -> str:
    """Its prompt tokens, with how many of them are computed while they are."""
    if row.state != "prefill":
        return str(row.prompt_tokens)
    done = f"{row.computed_tokens}/{row.prompt_tokens}"
    return done if len(done) <= _PROMPT else f"{row.computed_tokens / row.prompt_tokens:.0%}"


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


def no_requests(snapshot: Snapshot, api: ApiStatus, standing: Standing) -> str:
    """Why there is no request, and what can be done here to have one."""
    state, chat = snapshot.status.state, "" if standing.read_only else ", or press 3 to chat"
    if standing.reach == "recording":
        return "No requests at this time of the recording."
    if standing.stale:
        return f"Nothing is known of requests: no data from {standing.name}."
    if standing.reach == "starting":
        return "Starting …"
    if state == "loading":
        return "Requests appear here once the model is loaded."
    if state not in ("ready", "draining", "idle"):
        return "Requests appear here once a model is loaded."
    if api.stopping:
        return "The API is stopping: new requests are refused."
    if api.running:
        return f"Waiting for requests at {api.url}. A curl command is on the API screen (6){chat}."
    if standing.read_only:
        return "No requests. The API is off."
    failed = f" ({api.error.message.rstrip('.')})" if api.error is not None else ""
    return f"No requests yet. The API is off{failed}: press a to switch it on{chat}."
