"""The API screen's forms: another address, a new key, and the one look at it."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Button, Input, Label, Static

from console.api.http.scopes import SCOPES
from console.link.api import KeyLimits, NewKey, Scope
from console.link.protocol import ApiStatus
from console.settings.addresses import checked_host
from console.tui.screens.base import Dialog, accept_key
from console.tui.widgets.table import Column, Row, Table, cell
from engine.text.printable import printable

_CLOSE = Binding("escape", "dismiss", "Cancel", id="form.close", tooltip="Close without a change")
_SCOPE_COLUMNS = (Column("Scopes", 9), Column("space: toggle", 40, grow=30))
_SCOPE_WORDS: dict[Scope, str] = {
    "use": "use models: completions, chat, model list",
    "load": "load models: those that requests name",
    "watch": "read status: snapshot, log, metrics",
    "admin": "full control: load models, create keys",
}


_LIMITS = {"requests_per_min": "requests/min", "tokens_per_min": "tokens/min", "concurrent": "concurrent"}


def _complain(form: Screen[Any], sentence: str) -> None:
    """Show what is wrong with a form."""
    form.query_one("#problem", Static).update(Content.styled(sentence, "$error"))


class AddressScreen(Dialog[tuple[str, int] | None]):
    """Listen address instead of where `status` says; None to stay there."""

    AUTO_FOCUS = "#host"
    BINDINGS: ClassVar[list[BindingType]] = [accept_key("Listen"), _CLOSE]

    def __init__(self, status: ApiStatus) -> None:
        super().__init__()
        self._status = status

    def compose(self) -> ComposeResult:
        """Address and port."""
        with Vertical(classes="dialog api-form") as page:
            page.border_title = "Listen address"
            with Horizontal(classes="api-field"):
                yield Label("address", classes="api-label")
                yield Input(self._status.host, placeholder="127.0.0.1", id="host", compact=True)
            with Horizontal(classes="api-field"):
                yield Label("port", classes="api-label")
                yield Input(str(self._status.port), placeholder="8000; 0: any free port", id="port", compact=True)
            yield Static(
                "127.0.0.1: this machine only. 0.0.0.0: the network. Running requests continue. "
                "The address at start is in Settings (8).",
                classes="api-note",
            )
            yield Static(id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Listen (enter)", id="listen", compact=True)
                yield Button("Cancel (esc)", id="close", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "listen":
            self.action_accept()
        else:
            self.dismiss()

    def action_accept(self) -> None:
        """Listen there, or say what is wrong."""
        host, port = (self.query_one(box, Input).value.strip() for box in ("#host", "#port"))
        try:
            host = checked_host(host)
        except ValueError as error:
            reason = str(error)
            _complain(self, f"{host}: {reason}." if host else f"{reason[:1].upper()}{reason[1:]}.")
            return
        if not port.isdecimal() or int(port) > 65_535:
            _complain(self, "Ports are 0 to 65535.")
        else:
            self.dismiss((host, int(port)))


class KeyScreen(Dialog[tuple[str, tuple[Scope, ...], KeyLimits] | None]):
    """A name, scopes and limits for a new key; None for no key. existing: names that there are."""

    AUTO_FOCUS = "#key-name"
    BINDINGS: ClassVar[list[BindingType]] = [accept_key("Create"), _CLOSE]

    def __init__(self, existing: frozenset[str]) -> None:
        super().__init__()
        self._existing = existing
        self._scopes: set[Scope] = {"use"}

    def compose(self) -> ComposeResult:
        """The name above what it may do."""
        with Vertical(classes="dialog api-form") as page:
            page.border_title = "New key"
            with Horizontal(classes="api-field"):
                yield Label("name", classes="api-label -long")
                yield Input(placeholder="label, such as an app name", id="key-name", max_length=40, compact=True)
            yield _Scopes()
            for limit, what in _LIMITS.items():
                with Horizontal(classes="api-field"):
                    yield Label(what, classes="api-label -long")
                    yield Input(placeholder="any", id=_input_of(limit), max_length=9, type="integer", compact=True)
            yield Static(id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Create (enter)", id="make", compact=True)
                yield Button("Cancel (esc)", id="close", compact=True)

    def on_mount(self) -> None:
        """Never empty."""
        self._show()

    def on_table_moved(self, event: Table.Moved) -> None:
        """Only a cursor."""
        event.stop()

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Switch the scope under the cursor."""
        event.stop()
        self._scopes ^= {scope for scope in SCOPES if scope == event.key}
        self._show()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "make":
            self.action_accept()
        else:
            self.dismiss()

    def _show(self) -> None:
        self.query_one(_Scopes).show([_scope_row(scope, scope in self._scopes) for scope in SCOPES])

    def action_accept(self) -> None:
        """Create the key, or say what is wrong."""
        name = self.query_one("#key-name", Input).value.strip()
        if not name:
            _complain(self, "Enter a name for the key.")
        elif name in self._existing:
            _complain(self, f"A key {name} already exists.")
        elif not self._scopes:
            _complain(self, "Select at least one scope.")
        elif wrong := next((what for limit, what in _LIMITS.items() if not self._number(limit).isdecimal()), ""):
            _complain(self, f"{wrong} must be a number, or empty for no limit.")
        else:
            limits = KeyLimits(**{limit: int(self._number(limit)) for limit in _LIMITS})
            self.dismiss((name, tuple(scope for scope in SCOPES if scope in self._scopes), limits))

    def _number(self, limit: str) -> str:
        return self.query_one(f"#{_input_of(limit)}", Input).value.strip() or "0"


class _Scopes(Table):
    """Scopes of a key, each of which can be switched."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "choose", "Toggle", id="key.scope", tooltip="Toggle the scope"),
    ]

    def __init__(self) -> None:
        super().__init__(_SCOPE_COLUMNS, id="scopes")


class NewKeyScreen(Dialog[None]):
    """The one look at a new key."""

    AUTO_FOCUS = "#copy"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy", id="key.copy", tooltip="Copy the new key"),
        Binding(
            "escape,q",
            "dismiss",
            "Close",
            id="key.close",
            tooltip="Close; the key is not shown again",
            key_display="esc",
        ),
    ]

    def __init__(self, made: NewKey) -> None:
        super().__init__()
        self._made = made

    def compose(self) -> ComposeResult:
        """The key, alone on its line so that it can be selected as well."""
        with Vertical(classes="dialog api-form"):
            yield Label(f"Key {self._made.name} created", classes="dialog-title", markup=False)
            yield Label("Shown only once: copy it now.", markup=False)
            yield Static(self._made.key, id="key", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Copy (c)", id="copy", compact=True)
                yield Button("Close (esc)", id="close", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "copy":
            self.action_copy()
        else:
            self.dismiss()

    def action_copy(self) -> None:
        """To the clipboard, by way of the terminal."""
        self.app.copy_to_clipboard(printable(self._made.key))  # one line, whatever another instance made
        self.notify(f"Key {self._made.name} copied", markup=False)


def _scope_row(scope: Scope, on: bool) -> Row:
    mark = f"✓ {scope}" if on else f"○ {scope}"
    style = "bold $success" if on else "$muted"
    return Row(scope, (cell(mark, style), cell(_SCOPE_WORDS[scope], "" if on else "$muted")))


def _input_of(limit: str) -> str:
    return f"key-{limit.replace('_', '-')}"
