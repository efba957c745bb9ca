"""The tables of the API screen: keys, dialects, clients, failures; what a row of each says."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical

from console import text
from console.api.http.scopes import SCOPES
from console.link.api import ClientReading, DialectReading, Failure, FailureCount, KeyReading
from console.text import local_time
from console.tui.widgets.glyphs import is_ascii, to_ascii
from console.tui.widgets.panel import set_title
from console.tui.widgets.table import Column, Row, Table, cell

KEY_COLUMNS = (
    Column("key", 10, grow=24),
    Column("may", 9, grow=6),
    Column("last used", 9, "right"),
    Column("requests", 8, "right"),
    Column("tokens in", 9, "right", drop=1),
    Column("out", 6, "right", drop=1),
    Column("made", 10, "right", drop=2),
)
DIALECT_COLUMNS = (
    Column("dialect", 16, grow=9),
    Column("state", 6),
    Column("requests", 8, "right", drop=1),
    Column("routes", 10, grow=100, drop=2),
)
CLIENT_COLUMNS = (
    Column("client", 20, grow=60),
    Column("now", 4, "right"),
    Column("requests", 8, "right"),
    Column("since", 8, "right"),
)
FAILURE_COLUMNS = (
    Column("time", 8),
    Column("status", 6, "right"),
    Column("code", 16, grow=10, drop=1),
    Column("what", 32, grow=120),
    Column("client", 15, grow=20, drop=2),
    Column("path", 12, grow=14, drop=3),
)


class TablePanel(Vertical):
    """A table with a title in its frame. id: the table's is that and "-table"."""

    DEFAULT_CSS = """
    TablePanel { height: 3; width: 1fr; }
    """

    def __init__(self, title: str, columns: Sequence[Column], *, empty: str, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = title
        self._table = Table(columns, empty=empty, id=f"{id}-table")
        self._height = 0

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield self._table

    @property
    def table(self) -> Table:
        """The table."""
        return self._table

    def show(self, rows: Sequence[Row], *, lines: int, room: int) -> None:
        """Show the rows in a frame as high as `lines` of them, and no higher than `room`."""
        self._table.show(rows)
        height = min(room, (lines + 1 if lines else 1) + self.gutter.height)
        if height != self._height:
            self._height = height
            self.styles.height = height

    def say(self, title: str) -> None:
        """Set the title in the frame; draw it only where it changed."""
        set_title(self, to_ascii(title) if is_ascii(self.app) else title)


def key_row(key: KeyReading, now: float) -> Row:
    """Return a row with the key's scopes and its use."""
    may = [scope for scope in SCOPES if scope in key.scopes]
    return Row(
        key.name,
        (
            cell(key.name, "bold"),
            cell(", ".join(may), "$warning" if "admin" in may else ""),
            cell("never" if key.last_used_at is None else ago(now - key.last_used_at), "$muted"),
            cell(f"{key.requests:,}"),
            cell(text.count(key.prompt_tokens)),
            cell(text.count(key.output_tokens)),
            cell("--api-key" if key.made_at is None else day(key.made_at), "$muted"),
        ),
    )


def dialect_rows(dialect: DialectReading, width: int) -> list[Row]:
    """On or off, and its routes, in as many rows as they take at `width`."""
    state = ("● on", "$worker-busy") if dialect.on else ("○ off", "$muted")
    cells = (dialect.title, "bold" if dialect.on else "$muted"), state, (f"{dialect.requests:,}", "")
    lines = textwrap.wrap(" ".join(dialect.routes), width, break_long_words=False, break_on_hyphens=False)
    first, *more = lines or [""]
    rows = [Row(dialect.name, (*(cell(*each) for each in cells), cell(first, "$muted")))]
    return rows + [
        Row(f"{dialect.name} {routes}", (cell(""), cell(""), cell(""), cell(routes, "$muted"))) for routes in more
    ]


def client_row(client: ClientReading, now: float) -> Row:
    """Who asks, with what, and how much of it now."""
    quiet = "" if client.under_way else "$muted"
    return Row(
        name := text.client_name(client.address, client.key, client.program),
        (
            cell(name, "bold" if client.under_way else "$muted"),
            cell(str(client.under_way), "$request-decode" if client.under_way else "$muted"),
            cell(f"{client.requests:,}", quiet),
            cell(ago(now - client.since), "$muted"),
        ),
    )


def failure_row(failure: Failure, key: str) -> Row:
    """Return a row: time, error and client."""
    style = "$error" if failure.status >= 500 else "$warning"
    return Row(
        key,
        (
            cell(local_time(failure.at), "$muted"),
            cell(str(failure.status), style),
            cell(failure.code, style),
            cell(failure.message),
            cell(text.client_name(failure.client, failure.key, failure.program), "$muted"),
            cell(failure.path, "$muted"),
        ),
    )


def failures_title(counts: Sequence[FailureCount], room: int) -> str:
    """ "Failures: 19 × 429 queue_full, 4 × 401 invalid_api_key and 2 more kinds", as many as there is room for."""
    title = "Failures"
    for at, count in enumerate(counts):
        longer = f"{title}{', ' if at else ': '}{count.count:,} × {count.status} {count.code}"
        left = len(counts) - at - 1
        rest = f" and {text.plural(left, 'more kind')}" if left else ""
        if len(longer) + len(rest) > room:
            return f"{title} and {text.plural(left + 1, 'more kind')}" if at else title
        title = longer
    return title


def ago(seconds: float) -> str:
    """How long ago, in the largest unit that fits: "4 s", "12 min", "3 h", "41 d"."""
    for unit, scale in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{int(seconds // scale)} {unit}"
    return f"{max(0, int(seconds))} s"


def day(at: float) -> str:
    """The date of a unix time."""
    return local_time(at, "%Y-%m-%d")
