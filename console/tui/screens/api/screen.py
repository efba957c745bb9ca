"""API: where it listens, who may ask, who does, in which dialects, and what went wrong."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.events import MouseMove
from textual.style import Style
from textual.widget import Widget

from console import text
from console.link.api import SETTINGS_KEY, ApiReport, DialectReading, Failure, KeyLimits, Scope
from console.link.protocol import ApiStatus
from console.settings.addresses import is_loopback, reachable, unix_path
from console.tui.keymap import API_SWITCH, READOUT, ConsoleBinding
from console.tui.screens.api.exposure import confirm_exposure
from console.tui.screens.api.forms import AddressScreen, KeyScreen, NewKeyScreen
from console.tui.screens.api.tables import (
    CLIENT_COLUMNS,
    DIALECT_COLUMNS,
    FAILURE_COLUMNS,
    KEY_COLUMNS,
    TablePanel,
    client_row,
    dialect_rows,
    failure_row,
    failures_title,
    key_row,
)
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_ascii
from console.tui.widgets.graph import Curve, Graph, Scale, Span, moment_text
from console.tui.widgets.panel import set_title
from console.tui.widgets.plot import column_of, column_under, columns, draw, moment_of, next_moment, small_graph
from console.tui.widgets.table import Row, Table
from engine.errors import EngineError
from engine.snapshot import Second, Snapshot
from engine.text.printable import printable, printable_json

# The head of the API screen: where it listens, how much it is asked, and a line that asks it.

_CURVE_CELLS, _CURVE_STEP_S, _CURVE_BOUND = 30, 2, 0.5
"""Columns, their seconds, and the requests per second that the upper edge is at least."""
NO_KEYS = "No keys: anyone who can connect may use the API"
_GAP = "   "


@dataclass(frozen=True, slots=True)
class _View:
    status: ApiStatus
    report: ApiReport
    curl: str
    read_only: bool


class ApiHead(Widget):
    """Three lines."""

    DEFAULT_CSS = """
    ApiHead {
        height: 5; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis;
        link-style: none; link-color: $accent; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    .-short ApiHead, .-narrow ApiHead { height: 4; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "API"
        self._view: _View | None = None
        self._cursor: float | None = None

    def show(self, status: ApiStatus, report: ApiReport, curl: str, *, read_only: bool = False) -> None:
        """Draw the head again, where anything changed."""
        before, self._view = self.render(), _View(status, report, curl, read_only)
        self._redraw(before)

    def point(self, at: float | None) -> None:
        """Show the requests of that moment (unix time) next to the curve, and its time in the frame; None: neither."""
        before, self._cursor = self.render(), at
        self._redraw(before)

    def move_cursor(self, by: int) -> None:
        """Point at the next moment earlier (-1) or later (1), beginning with the newest; after that at none."""
        if history := self._history:
            oldest, newest = history[0].at, history[-1].at
            at = next_moment(self._cursor, by, oldest=oldest, newest=newest, seconds_per_column=_CURVE_STEP_S)
            self.post_message(Graph.Pointed(at))

    def on_mouse_move(self, event: MouseMove) -> None:
        """Say which moment of the curve is under the mouse."""
        offset, history = event.get_content_offset(self), self._history
        line = None if offset is None else self.render().split()[offset.y : offset.y + 1]
        found = column_under(line[0], offset.x) if offset is not None and line else None
        at = None if found is None else moment_of(found[1], history[-1].at, _CURVE_STEP_S)
        self.post_message(Graph.Pointed(at))

    def on_leave(self) -> None:
        """No moment is under the mouse."""
        self.post_message(Graph.Pointed(None))

    @property
    def _history(self) -> list[Second]:
        return [] if self._view is None else traffic_history(self._view.report)

    def _redraw(self, before: Content) -> None:
        if not self.render().is_same(before):
            self.refresh()
        at, history = self._cursor, self._history
        set_title(self, "API" if at is None or not history else f"API · {moment_text(at, history[-1].at)}")

    def render(self) -> Content:
        """Where, how much, how to ask."""
        if self._view is None:
            return Content("")
        status, report = self._view.status, self._view.report
        width = self.content_size.width
        lines = (
            place_line(status, width),
            traffic_line(report, width, ascii_only=is_ascii(self.app), cursor=self._cursor),
            curl_row(self._view.curl, read_only=self._view.read_only),
        )
        return for_terminal(self.app, Content("\n").join(lines))


def place_line(status: ApiStatus, width: int) -> Content:
    """Return the line about the server: listening or not, where, and for which clients."""
    if status.error is not None and not status.running:
        state = Content.styled(f"✖ off: {status.error.message}", "$worker-failed")
    elif status.stopping:
        state = Content.styled("◒ stopping", "$warning")
    elif status.running:
        state = Content.styled("● on", "$worker-busy")
    else:
        state = Content.styled("○ off", "$muted")
    address = Content.styled(status.url, "bold $foreground" if status.running else "$muted")
    users = f"{text.plural(status.clients, 'client')}, {text.plural(status.connections, 'connection')}"
    used = (Content.styled(users, "$muted"),) if status.running else ()
    parts = [state, _link(address, "screen.address"), _who(status), *used]
    return _as_fits(parts, width)


def _who(status: ApiStatus) -> Content:
    if status.key_required:
        return Content.styled("✓ key required", "$success")
    if is_loopback(status.host):
        return Content.styled("no key (local only)", "$muted")
    return Content.styled("✖ open to the network without a key", "bold $error")


def traffic_history(report: ApiReport) -> list[Second]:
    """Return the requests of each second of the last minute, as those that run."""
    first = int(report.at) + 1 - len(report.per_second)
    return [Second(at=float(first + at), running=count) for at, count in enumerate(report.per_second)]


def traffic_line(report: ApiReport, width: int, *, ascii_only: bool, cursor: float | None = None) -> Content:
    """Return the line about requests: running, per minute, failed. cursor: where to read the curve (unix time)."""
    failures = report.failures_per_min
    curve, reading = _curve(report, cursor, ascii_only=ascii_only)
    return _as_fits(
        [
            Content.assemble((str(report.under_way), "bold"), " active"),
            Content.assemble(
                (f"{report.requests_per_min:,}", "bold"),
                " requests/min",
                " " if len(curve) else "",
                curve,
            ),
            *reading,
            Content.styled(f"{failures:,} failed/min", "$warning" if failures else "$muted"),
            Content.styled(f"{report.requests:,} total", "$muted"),
        ],
        width,
    )


def curl_row(curl: str, *, read_only: bool = False) -> Content:
    """The line, cut where it is too long: what is copied is all of it."""
    if not curl:
        hint = "" if read_only else " d switches one on."
        return Content.styled(f"All dialects are off: clients get a 404.{hint}", "$warning")
    return Content.assemble(_link(Content.styled("c copy: ", "$accent"), "screen.copy"), (curl, "$muted"))


def _curve(report: ApiReport, cursor: float | None, *, ascii_only: bool) -> tuple[Content, list[Content]]:
    """The last minute in requests per second, two seconds to a cell, and the value under the cursor."""
    history = traffic_history(report)
    means = columns(history, _CURVE_CELLS, _CURVE_STEP_S, lambda second: float(second.running))
    highest = max((mean for mean in means if mean is not None), default=0.0)
    if not highest:
        return Content(""), []
    cells = draw(means, (), max(_CURVE_BOUND, highest), 1, ascii_only=ascii_only)[0]
    runs = groupby(cells, lambda each: each.ink)
    parts = [("".join(each.char for each in run), "$graph-tokens" if ink else "") for ink, run in runs]
    back = None if cursor is None else column_of(cursor, history[-1].at, _CURVE_STEP_S)
    graph = small_graph(Content.assemble(*parts), back)
    if back is None or not 0 <= back < _CURVE_CELLS:
        return graph, []
    mean = means[-1 - back]
    return graph, [Content.assemble(("–" if mean is None else f"{mean:.1f}", "reverse"), "/s")]


def _as_fits(parts: Sequence[Content], width: int) -> Content:
    """The first of them and as many more as `width` has room for; the first is cut where it must be."""
    line, *more = parts
    for part in more:
        if (longer := Content.assemble(line, _GAP, part)).cell_length > width:
            break
        line = longer
    return line


def _link(content: Content, action: str) -> Content:
    return content.stylize(Style.from_meta({"@click": action}))


_TITLE_MARGIN = 6
_MIN_ROUTES, _OTHER_CELLS = 20, 53
_ONE_ROW = 1000
"""Cells of routes: more than any terminal has."""
_FRAME_LINES = 7
"""Status line, tabs, head and footer."""
_SHARES = {"keys": 0.3, "clients": 0.22, "failures": 0.22}
_SHARES_BESIDE = {"keys": 0.4, "clients": 0.4, "failures": 0.25}


class ApiScreen(ConsoleScreen):
    """The whole of the HTTP side on one screen."""

    MODE = "api"
    AUTO_FOCUS = "#keys-table"

    BINDINGS: ClassVar[list[BindingType]] = [
        replace(API_SWITCH, primary=True),
        Binding("c", "copy", "Copy curl", id="api.copy", tooltip="Copy a curl command for a chat request"),
        ConsoleBinding(
            "l", "address", "Address", id="api.address", mutates=True, tooltip="Change the listen address or port"
        ),
        ConsoleBinding(
            "w", "make_key", "New key", id="api.key.make", mutates=True, tooltip="Create a key for a client"
        ),
        ConsoleBinding(
            "x,delete",
            "revoke_key",
            "Revoke",
            id="api.key.revoke",
            mutates=True,
            tooltip="Revoke the selected key",
            key_display="x",
        ),
        ConsoleBinding(
            "d", "dialect", "Dialect", id="api.dialect", mutates=True, tooltip="Switch the selected dialect on or off"
        ),
        *READOUT,
    ]

    def __init__(self) -> None:
        super().__init__()
        self._report = ApiReport()
        self._status = ApiStatus()
        self._failures: dict[str, Failure] = {}
        self._curl = ""

    def compose_body(self) -> ComposeResult:
        """The server, its keys, clients and failures, each as high as its rows; dialects and traffic have the rest."""
        yield ApiHead(id="api-head")
        with Container(id="api-users"):
            yield TablePanel("Keys", KEY_COLUMNS, empty=NO_KEYS, id="keys")
            yield TablePanel("Clients", CLIENT_COLUMNS, empty="No clients in the last minute", id="clients")
        yield TablePanel("Failures", FAILURE_COLUMNS, empty="No failed requests", id="failures")
        with Container(id="api-traffic"):
            yield TablePanel("Dialects", DIALECT_COLUMNS, empty="No dialects", id="dialects")
            with Container(id="api-graph", classes="panel"):
                yield Graph(Scale(text.count, least=4), Curve(lambda at: at.running, "$graph-tokens", "requests/s"))

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer what has a command to copy, a key to revoke or a dialect to switch."""
        return super().key_states(view) | {
            "api.copy": bool(self._curl),
            "api.key.revoke": any(key.name != SETTINGS_KEY for key in self._report.keys),
            "api.dialect": bool(self._report.dialects),
            **dict.fromkeys((each.id or "" for each in READOUT), any(self._report.per_second)),
        }

    def update_body(self, view: View) -> None:
        """The server as it is now."""
        snapshot, api = view.snapshot, view.api
        self._status, self._report = api, self.link.api.report()
        report = self._report
        self._curl = curl_line(
            msgspec.structs.replace(api, host=reachable(api.host)).url,
            self._model(snapshot),
            dialects=report.dialects,
            with_key=api.key_required,
        )
        self.query_one(ApiHead).show(api, report, self._curl, read_only=view.is_read_only)
        keys, clients = len(report.keys), len(report.clients)
        if self.has_class("-wide"):  # side by side
            keys = clients = max(keys, clients)
        self._show("keys", [key_row(key, snapshot.at) for key in report.keys], keys)
        table = self._table("keys")
        table.show(table.rows, empty=NO_KEYS if view.is_read_only else f"{NO_KEYS}. w: create key")
        self._show("clients", [client_row(client, snapshot.at) for client in report.clients], clients)
        self._show_failures(report)
        # By the screen: the first frame is drawn before the table has a size.
        width = self.size.width // (2 if self.has_class("-wide") else 1)
        room = max(_MIN_ROUTES, width - _OTHER_CELLS) if self.has_class("-tall") else _ONE_ROW
        dialects = [row for each in report.dialects for row in dialect_rows(each, room)]
        self._table("dialects").show(dialects)
        if self.has_class("-wide"):
            self._show_traffic(report)

    def _show(self, panel: str, rows: Sequence[Row], lines: int) -> None:
        """Show rows in a panel as high as `lines` of them, within its share of the screen."""
        share = (_SHARES_BESIDE if self.has_class("-wide") else _SHARES)[panel]
        room = round(share * (self.size.height - _FRAME_LINES))
        self.query_one(f"#{panel}", TablePanel).show(rows, lines=lines, room=room)

    def _table(self, panel: str) -> Table:
        return self.query_one(f"#{panel}", TablePanel).table

    def _show_traffic(self, report: ApiReport) -> None:
        """Requests of each second of the last minute."""
        title = Content.assemble(("■ ", "$graph-tokens"), ("requests/s", "$muted"))
        if not any(report.per_second):
            title = Content.styled("No requests in the last minute. c copies a command that sends one.", "$muted")
        self.query_one(Graph).show(title, Span(history=traffic_history(report)))

    def action_readout(self, by: int) -> None:
        """Read the value of another moment, in the graph where there is one, else in the curve of the head."""
        plot = self.query_one(Graph) if self.has_class("-wide") else self.query_one(ApiHead)
        plot.move_cursor(by)

    def on_graph_pointed(self, event: Graph.Pointed) -> None:
        """Show the value of that moment, and in the frame its time."""
        self.query_one(Graph).point(event.at)
        self.query_one(ApiHead).point(event.at)
        set_title(self.query_one("#api-graph"), "" if event.at is None else text.local_time(event.at))

    def _show_failures(self, report: ApiReport) -> None:
        """Newest first, each known by its moment."""
        self._failures = {f"{failure.at} {failure.client} {failure.path}": failure for failure in report.failures}
        rows = [failure_row(each, key) for key, each in self._failures.items()]
        self._show("failures", rows, len(rows))
        title = failures_title(report.failure_counts, self.size.width - _TITLE_MARGIN)
        self.query_one("#failures", TablePanel).say(title)

    def _model(self, snapshot: Snapshot) -> str:
        return snapshot.status.spec.name if snapshot.status.spec is not None else ""

    # -- what the keys do -------------------------------------------------------------------------------------------

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter: switch a dialect, or show a key's limits or a failure in full."""
        if event.table.id == "dialects-table":
            if not self.console.refuses_changes():
                self.action_dialect()
        elif chosen := next(
            (key for key in self._report.keys if event.table.id == "keys-table" and key.name == event.key), None
        ):
            self.notify(chosen.limits.in_words() or "No limits.", title=chosen.name, markup=False)
        elif failure := self._failures.get(event.key):
            asked = f"{failure.method} {failure.path} from {failure.client}"
            key = f" with the key {failure.key}" if failure.key else ""
            title = f"{failure.status} {failure.code}"
            self.notify(f"{failure.message}\n{asked}{key}", title=title, markup=False, timeout=12)

    def action_copy(self) -> None:
        """The curl line, whole."""
        if not self._curl:
            self.notify("All dialects are off. Switch one on first (d on the API screen).", severity="warning")
            return
        self.app.copy_to_clipboard(self._curl)
        key = f"; key from ${KEY_VARIABLE}" if self._status.key_required else ""
        self.notify(f"Copied a curl command{key}")

    def action_address(self) -> None:
        """Ask where to listen, then listen there."""
        self.app.push_screen(AddressScreen(self._status), self._listen)

    def _listen(self, there: tuple[str, int] | None) -> None:
        if there is None:
            return
        host, port = there

        def go() -> None:
            where = f"{host} port {port}" if port else f"a free port of {host}"
            done = f"The API listens on {where}" if self._status.running else f"The API will listen on {where}"
            self.perform(self.link.api.listen(host, port), done=done)

        confirm_exposure(self.app, host, self._status, go=go)

    def action_make_key(self) -> None:
        """Ask for a name and scopes, make the key, show it once."""
        existing = frozenset(key.name for key in self._report.keys)
        self.app.push_screen(KeyScreen(existing), self._make)

    def _make(self, wanted: tuple[str, tuple[Scope, ...], KeyLimits] | None) -> None:
        if wanted is not None:
            self.run_worker(self._make_key(*wanted), group="keys", exit_on_error=False)

    async def _make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits) -> None:
        try:
            made = await self.link.api.make_key(name, scopes, limits)
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False, timeout=8)
            return
        self.app.push_screen(NewKeyScreen(made))

    def action_revoke_key(self) -> None:
        """Ask once, then refuse the key under the cursor."""
        name = self._table("keys").cursor_key
        if name is None:
            self.notify("Select a key first.", severity="warning")
        elif name == SETTINGS_KEY:
            self.notify("That key comes from --api-key: change it there and restart.", severity="warning")
        else:
            last = len(self._report.keys) == 1
            after = "This is the last key; without it no key is required." if last else "Its clients will be refused."
            question = ConfirmScreen(f"Revoke the key {name}?", after, yes="Revoke", no="Keep")
            self._ask(question, lambda: self.perform(self.link.api.revoke_key(name), done=f"{name} revoked"))

    def action_dialect(self) -> None:
        """The dialect under the cursor, off after a question, or on."""
        table = self._table("dialects")
        name = (table.cursor_key or "").partition(" ")[0]
        chosen = next((each for each in self._report.dialects if each.name == name), None)
        if chosen is None:
            table.focus()
            table.move_to(0)
            self.notify("Select a dialect first.")
            return
        switch, title = self.link.api.switch_dialect, chosen.title
        if not chosen.on:
            self.perform(switch(chosen.name, True), done=f"{title} is on")
            return
        question = ConfirmScreen(f"Switch {title} off?", "Its clients will get a 404.", yes="Switch off", no="Cancel")
        self._ask(question, lambda: self.perform(switch(chosen.name, False), done=f"{title} is off"))

    def _ask(self, question: ConfirmScreen, go: Callable[[], None]) -> None:
        self.app.push_screen(question, lambda sure: go() if sure else None)


# A shell line that sends a request to the served model, for the clipboard.

KEY_VARIABLE = "ERICLLM_API_KEY"


def curl_line(base: str, model: str, *, dialects: Iterable[DialectReading], with_key: bool) -> str:
    """Return one line for a shell: the example of the first dialect that is on, "" where none is.

    base: as "http://127.0.0.1:8000", or "unix:PATH".  with_key: send a key, which the line names by a variable.
    """
    asked = next((dialect for dialect in dialects if dialect.on and dialect.example_path), None)
    if asked is None:
        return ""
    path, body = printable(asked.example_path), asked.example_body
    return curl_command(base, path, {"model": model, **body} if model else body, with_key=with_key)


def curl_command(base: str, path: str, body: Mapping[str, object], *, with_key: bool) -> str:
    """Return one line for a shell that sends `body` to a path of the server at `base`, as `curl_line` has them."""
    key = [f'-H "Authorization: Bearer ${KEY_VARIABLE}"'] if with_key else []
    return " ".join(
        [
            "curl",
            *(["--unix-socket", shlex.quote(file)] if (file := unix_path(base)) else []),
            shlex.quote(("http://localhost" if file else base) + path),
            *key,
            '-H "Content-Type: application/json"',
            "-d",
            shlex.quote(printable_json(json.dumps(body, ensure_ascii=False))),
        ]
    )
