"""The table of the Requests screen: thousands of rows, of which those are drawn that are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

from console import text
from console.link.status import CHAT
from console.text import local_time
from console.tui.screens.requests.groups import client_of, group_columns, group_row
from console.tui.screens.requests.request_list import RequestList, key_of
from console.tui.view import View, oldest_queued_s
from console.tui.widgets.states import request_state
from console.tui.widgets.table import Cell, Column, Listing, OpeningTable, Row, cell
from engine.snapshot import RequestRow, Snapshot

_PROMPT = 9
_BAR = 10


def prompt_progress(row: RequestRow) -> str:
    """Its prompt tokens, with how many of them are computed while they are."""
    if row.state != "prefill":
        return str(row.prompt_tokens)
    done = f"{row.computed_tokens}/{row.prompt_tokens}"
    return done if len(done) <= _PROMPT else prompt_percent(row)


def prompt_percent(row: RequestRow) -> str:
    """How much of its prompt is computed: "100%" is all of it."""
    return f"{int(row.prompt_computed * 100)}%"


def place_text(row: RequestRow) -> str:
    """Its place in the queue and the expected wait, as far as they are known: "#3 ~12 s"."""
    place = "" if row.queue_position is None else f"#{row.queue_position}"
    wait = "" if row.expected_wait_s is None else f"~{text.duration(row.expected_wait_s)}"
    return " ".join(filter(None, (place, wait)))


def progress_bar(row: RequestRow, width: int = _BAR) -> Cell:
    """Its place in the queue, then a bar of the prompt's tokens computed, then of the tokens it may give."""
    if row.state == "queued":
        return ((place, "$request-queued"),) if (place := text.clip(place_text(row), width)) else ()
    prefill = row.state == "prefill"
    if row.state == "finished" or not (row.prompt_tokens if prefill else row.max_tokens):
        return ()
    share = row.prompt_computed if prefill else row.output_tokens / row.max_tokens
    filled = min(width, round(share * width))
    style = "$request-prefill" if prefill else "$request-decode"
    return (("━" * filled, style), ("━" * (width - filled), "$gpu-free"))


def empty_text(view: View, curl: Callable[[], str] = str) -> str:
    """Return why there is no request, and how to send one from here. curl: returns a command that sends one, "" for
    none; called where requests are waited for alone, as a link that is being opened has no answer."""
    snapshot, api, standing = view.snapshot, view.api, view.link_status
    state, chat = snapshot.status.state, ", or press 3 to chat" if standing.allows(CHAT) else ""
    if standing.reach == "recording":
        return "No requests at this time of the recording."
    if standing.stale:
        return f"No data from {standing.name}."
    if standing.reach == "starting":
        return standing.starting_text
    if state == "loading":
        return "Requests appear here once the model is loaded."
    if state not in ("ready", "draining", "idle"):
        return "Requests appear here once a model is loaded."
    if snapshot.draining_since is not None:
        return "Draining: new requests are refused." + ("" if standing.read_only else " Press D to accept them again.")
    if api.stopping:
        return "The API is stopping: new requests are refused."
    if api.running:
        return f"Waiting for requests at {api.url}. Press c to copy a curl command{chat}.\n{curl()}".rstrip()
    if standing.read_only:
        return "No requests. The API is off."
    failed = f" ({api.error.message.rstrip('.')})" if api.error is not None else ""
    return f"No requests yet. The API is off{failed}: press a to switch it on{chat}."


_COLUMNS = (
    Column("when", 8),
    Column("id", 8, grow=4),
    Column("client", 18, grow=26, drop=5),
    Column("model", 10, grow=12, drop=7),
    Column("state", 11),
    Column("progress", _BAR, drop=4),
    Column("worker", 7, drop=3),
    Column("in", 9, "right", drop=1),
    Column("cached", 7, "right", drop=8),
    Column("out", 5, "right"),
    Column("waited", 7, "right", drop=6),
    Column("TTFT", 6, "right"),
    Column("ITL", 6, "right"),
    Column("tok/s", 6, "right"),
    Column("took", 6, "right", drop=2),
)
COLUMN_NAMES = tuple(column.title for column in _COLUMNS)


class RequestRows(Listing):
    """A RequestList as rows of a table."""

    def __init__(self, requests: RequestList) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [table_row(self._requests[each]) for each in range(*at.indices(len(self)))]
        return table_row(self._requests[at])

    def find(self, key: str) -> int | None:
        """Where the row of that key is."""
        return self._requests.find(key)


class RequestTable(OpeningTable):
    """Requests, sorted and filtered as `requests` is."""

    def __init__(self, requests: RequestList, *, id: str | None = None) -> None:
        super().__init__(_COLUMNS, id=id)
        self.requests = requests
        self._listing = RequestRows(requests)

    def show_requests(self, empty: str) -> None:
        """Show the list, or its groups, as they are now. empty: what to say where there is no row."""
        if self.requests.shows_groups:
            groups = [group_row(group) for group in self.requests.groups()]
            self.show(groups, empty=empty, columns=group_columns(self.requests.grouping))
            return
        self.show(self._listing, empty=empty, columns=columns(self.requests))

    @property
    def chosen(self) -> RequestRow | None:
        """The request under the cursor."""
        if self.cursor_key is None or self.requests.shows_groups:
            return None
        return self.requests.get(self.cursor_key)


def columns(requests: RequestList) -> tuple[Column, ...]:
    """The columns, the one sorted by with its direction."""
    glyph = "↓" if requests.descending else "↑"
    return tuple(
        replace(column, title=f"{column.title}{glyph}") if column.title == requests.column else column
        for column in _COLUMNS
    )


def table_row(row: RequestRow) -> Row:
    """One request's cells. What ended is quiet, but for how it ended."""
    ended = row.state == "finished"
    quiet = "$request-done" if ended else ""
    state = request_state(row)
    cells: tuple[Cell, ...] = (
        cell(clock(row.created_at), "$muted"),
        cell(text.request_id(row.id), quiet),
        cell(client_of(row) or "–", quiet),
        cell(row.model or "–", quiet),
        cell(f"{state.glyph} {state.word}", state.style),
        progress_bar(row),
        cell(row.worker or "–", quiet),
        cell(prompt_progress(row), "$request-prefill" if row.state == "prefill" else quiet),
        cell("–" if row.worker is None else str(row.cached_tokens), quiet),
        cell(str(row.output_tokens), quiet),
        cell(text.waited(row.queued_s), "$request-queued" if row.state == "queued" else quiet),
        cell(text.seconds(row.ttft_s), quiet),
        cell(text.seconds(row.itl_s), quiet),
        cell(text.rate(row.tokens_per_s), quiet if ended else "bold"),
        cell(text.seconds(row.age_s), quiet),
    )
    return Row(key_of(row), cells)


def clock(at: float) -> str:
    """Hours, minutes and seconds here; "–" where it is not known when."""
    return local_time(at) if at else "–"


def count_text(requests: RequestList, snapshot: Snapshot) -> str:
    """Return the counts: shown, running, queued and since when, ended."""
    shown, oldest = len(requests), oldest_queued_s(snapshot)
    waits = f" (oldest {text.seconds(oldest)})" if oldest is not None else ""
    parts = [f"{snapshot.running} running", f"{snapshot.queued} queued{waits}", f"{requests.ended:,} ended"]
    if requests.filtered:
        parts.insert(0, f"{shown:,} shown")
    return " · ".join(parts)
