"""API: where it listens, who may ask, who does, in which dialects, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from console.addresses import reachable
from console.curl import KEY_VARIABLE, curl_line
from console.exposure import before_exposing
from console.link import ApiStatus
from console.links.api import SETTINGS_KEY, ApiReport, Failure, KeyLimits, Scope
from console.screens.api_forms import AddressScreen, KeyScreen, NewKeyScreen
from console.screens.base import ConsoleScreen
from console.screens.confirm import ConfirmScreen
from console.widgets.api_head import ApiHead
from console.widgets.api_tables import (
    CLIENT_COLUMNS,
    DIALECT_COLUMNS,
    FAILURE_COLUMNS,
    KEY_COLUMNS,
    TablePanel,
    client_row,
    dialect_row,
    failure_row,
    failures_title,
    key_row,
)
from console.widgets.table import Row, Table
from engine.errors import EngineError
from engine.snapshot import Snapshot

_TITLE_MARGIN = 6


class ApiScreen(ConsoleScreen):
    """The whole of the HTTP side on one screen."""

    MODE = "api"
    AUTO_FOCUS = "#keys-table"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy curl", id="api.copy", tooltip="Copy a curl line that asks the model"),
        Binding("l", "address", "Address", id="api.address", tooltip="Listen at another address or port"),
        Binding("w", "make_key", "New key", id="api.key.make", tooltip="Make a key for a client"),
        Binding(
            "x,delete",
            "revoke_key",
            "Revoke",
            id="api.key.revoke",
            tooltip="Revoke the selected key",
            key_display="x",
        ),
        Binding("d", "dialect", "Dialect", id="api.dialect", tooltip="Switch the selected dialect on or off"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._report = ApiReport()
        self._status = ApiStatus()
        self._failures: dict[str, Failure] = {}
        self._curl = ""

    def compose_body(self) -> ComposeResult:
        """The server, then who may ask and how, then who does, then what went wrong."""
        yield ApiHead(id="api-head")
        with Container(id="api-rules"):
            yield TablePanel("Keys", KEY_COLUMNS, empty="No keys: whoever reaches it may ask. w makes one.", id="keys")
            yield TablePanel("Dialects", DIALECT_COLUMNS, empty="There are no dialects.", id="dialects")
        yield TablePanel("Clients", CLIENT_COLUMNS, empty="Nobody asked within the last minute.", id="clients")
        yield TablePanel("Failures", FAILURE_COLUMNS, empty="No request failed.", id="failures")

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """The server as it is now."""
        self._status, self._report = api, self.link.api.report()
        report = self._report
        self._curl = curl_line(
            msgspec.structs.replace(api, host=reachable(api.host)).url,
            self._model(snapshot),
            dialects=[dialect.name for dialect in report.dialects if dialect.on],
            with_key=api.key_required,
        )
        self.query_one(ApiHead).show(api, report, self._curl)
        self._show("keys", [key_row(key, snapshot.at) for key in report.keys])
        self._show("dialects", [dialect_row(dialect) for dialect in report.dialects])
        self._show("clients", [client_row(client, snapshot.at) for client in report.clients])
        self._show_failures(report)

    def _show(self, panel: str, rows: Sequence[Row]) -> None:
        self.query_one(f"#{panel}", TablePanel).table.show(rows)

    def _show_failures(self, report: ApiReport) -> None:
        """Newest first, each known by its moment."""
        self._failures = {f"{failure.at} {failure.client} {failure.path}": failure for failure in report.failures}
        self._show("failures", [failure_row(each, key) for key, each in self._failures.items()])
        title = failures_title(report.failure_counts, self.size.width - _TITLE_MARGIN)
        self.query_one("#failures", TablePanel).say(title)

    def _model(self, snapshot: Snapshot) -> str:
        return snapshot.status.spec.name if snapshot.status.spec is not None else ""

    # -- what the keys do -------------------------------------------------------------------------------------------

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter: a dialect is switched, a key's limits or a failure are told in full."""
        if event.table.id == "dialects-table":
            self.action_dialect()
        elif chosen := next(
            (key for key in self._report.keys if event.table.id == "keys-table" and key.name == event.key), None
        ):
            self.notify(chosen.limits.in_words() or "It has no limits.", title=chosen.name, markup=False)
        elif failure := self._failures.get(event.key):
            asked = f"{failure.method} {failure.path} from {failure.client}"
            key = f" with the key {failure.key}" if failure.key else ""
            title = f"{failure.status} {failure.code}"
            self.notify(f"{failure.message}\n{asked}{key}", title=title, markup=False, timeout=12)

    def action_copy(self) -> None:
        """The curl line, whole."""
        if not self._curl:
            self.notify("No dialect is on: there is nothing to ask.", severity="warning")
            return
        self.app.copy_to_clipboard(self._curl)
        key = f"; it takes the key from ${KEY_VARIABLE}" if self._status.key_required else ""
        self.notify(f"Copied a curl line{key}")

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

        before_exposing(self.app, host, self._status, go=go)

    def action_make_key(self) -> None:
        """Ask for a name and scopes, make the key, show it once."""
        taken = frozenset(key.name for key in self._report.keys)
        self.app.push_screen(KeyScreen(taken), self._make)

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
        name = self.query_one("#keys", TablePanel).table.cursor_key
        if name is None:
            self.notify("Choose a key with the arrow keys first.", severity="warning")
        elif name == SETTINGS_KEY:
            self.notify("That key comes from --api-key: change it there, and start again.", severity="warning")
        else:
            last = len(self._report.keys) == 1
            after = "It is the last one: nobody needs a key then." if last else "Its clients are refused from then on."
            question = ConfirmScreen(f"Revoke the key {name}?", after, yes="Revoke", no="Keep")
            self._ask(question, lambda: self.perform(self.link.api.revoke_key(name), done=f"{name} is revoked"))

    def action_dialect(self) -> None:
        """The dialect under the cursor, off after a question, or on."""
        table = self.query_one("#dialects", TablePanel).table
        chosen = next((each for each in self._report.dialects if each.name == table.cursor_key), None)
        if chosen is None:
            table.focus()
            table.move_to(0)
            self.notify("Choose a dialect with the arrow keys; d switches it.")
            return
        switch, title = self.link.api.switch_dialect, chosen.title
        if not chosen.on:
            self.perform(switch(chosen.name, True), done=f"{title} is on")
            return
        question = ConfirmScreen(
            f"Switch {title} off?", "Its clients get a 404 that says so.", yes="Switch off", no="Leave it on"
        )
        self._ask(question, lambda: self.perform(switch(chosen.name, False), done=f"{title} is off"))

    def _ask(self, question: ConfirmScreen, go: Callable[[], None]) -> None:
        self.app.push_screen(question, lambda sure: go() if sure else None)
