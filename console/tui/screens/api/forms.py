"""The API screen's forms: another address, a new key, and the one look at it."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, Label, Static

from console.api.http.scopes import SCOPES
from console.link.api import KeyLimits, NewKey, Scope
from console.link.protocol import ApiStatus
from console.tui.widgets.table import Column, Row, Table, cell
from engine.text.printable import printable

_CLOSE = Binding("escape", "dismiss", "Close", id="form.close", tooltip="Close without doing anything", show=False)
_SCOPE_COLUMNS = (Column("it may", 9), Column("space, or two clicks, switches", 40, grow=30))
_SCOPE_WORDS: dict[Scope, str] = {
    "use": "ask models: completions, chat, the list of models",
    "watch": "look at everything, change nothing: snapshot, log, metrics",
    "admin": "do everything, also load models and make keys",
}


_LIMITS = {"requests_per_min": "requests/min", "tokens_per_min": "tokens/min", "concurrent": "at once"}


def _complain(form: Screen[Any], sentence: str) -> None:
    """Show what is wrong with a form."""
    form.query_one("#problem", Static).update(Content.styled(sentence, "$error"))


class AddressScreen(ModalScreen[tuple[str, int] | None]):
    """Where to listen instead of where `status` says; None to stay there."""

    AUTO_FOCUS = "#host"
    BINDINGS: ClassVar[list[BindingType]] = [_CLOSE]

    def __init__(self, status: ApiStatus) -> None:
        super().__init__()
        self._status = status

    def compose(self) -> ComposeResult:
        """Address and port."""
        with Vertical(classes="dialog api-form") as page:
            page.border_title = "Where to listen"
            page.border_subtitle = "enter listens there, esc closes"
            with Horizontal(classes="api-field"):
                yield Label("address", classes="api-label")
                yield Input(self._status.host, placeholder="127.0.0.1", id="host", compact=True)
            with Horizontal(classes="api-field"):
                yield Label("port", classes="api-label")
                yield Input(str(self._status.port), placeholder="8000, 0 for any free one", id="port", compact=True)
            yield Static(
                "127.0.0.1 is this machine alone, 0.0.0.0 every machine that reaches it. Requests under way go on. "
                "The settings (8) say where it listens when it is started again.",
                classes="api-note",
            )
            yield Static(id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Listen (enter)", id="listen", compact=True)
                yield Button("Close (esc)", id="close", compact=True)

    def on_input_submitted(self) -> None:
        """Enter in either."""
        self._answer()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "listen":
            self._answer()
        else:
            self.dismiss()

    def _answer(self) -> None:
        host, port = (self.query_one(box, Input).value.strip() for box in ("#host", "#port"))
        if not host:
            _complain(self, "Type an address, as 127.0.0.1 or 0.0.0.0.")
        elif not port.isdecimal() or int(port) > 65_535:
            _complain(self, "A port is a number from 0 to 65535.")
        else:
            self.dismiss((host, int(port)))


class KeyScreen(ModalScreen[tuple[str, tuple[Scope, ...], KeyLimits] | None]):
    """A name, scopes and limits for a new key; None for no key. existing: names that there are."""

    AUTO_FOCUS = "#key-name"
    BINDINGS: ClassVar[list[BindingType]] = [_CLOSE]

    def __init__(self, existing: frozenset[str]) -> None:
        super().__init__()
        self._existing = existing
        self._scopes: set[Scope] = {"use"}

    def compose(self) -> ComposeResult:
        """The name above what it may do."""
        with Vertical(classes="dialog api-form") as page:
            page.border_title = "New key"
            page.border_subtitle = "enter makes it, esc closes"
            with Horizontal(classes="api-field"):
                yield Label("name", classes="api-label -long")
                yield Input(placeholder="who will use it", id="key-name", max_length=40, compact=True)
            yield _Scopes()
            for limit, what in _LIMITS.items():
                with Horizontal(classes="api-field"):
                    yield Label(what, classes="api-label -long")
                    yield Input(placeholder="any", id=_input_of(limit), max_length=9, type="integer", compact=True)
            yield Static(id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Make it (enter)", id="make", compact=True)
                yield Button("Close (esc)", id="close", compact=True)

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

    def on_input_submitted(self) -> None:
        """Enter in the name."""
        self._answer()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "make":
            self._answer()
        else:
            self.dismiss()

    def _show(self) -> None:
        self.query_one(_Scopes).show([_scope_row(scope, scope in self._scopes) for scope in SCOPES])

    def _answer(self) -> None:
        name = self.query_one("#key-name", Input).value.strip()
        if not name:
            _complain(self, "Type a name for the key.")
        elif name in self._existing:
            _complain(self, f"There is a key called {name} already.")
        elif not self._scopes:
            _complain(self, "A key that may do nothing is of no use: switch one of the three on.")
        elif wrong := next((what for limit, what in _LIMITS.items() if not self._number(limit).isdecimal()), ""):
            _complain(self, f"{wrong} is a number, or nothing for any.")
        else:
            limits = KeyLimits(**{limit: int(self._number(limit)) for limit in _LIMITS})
            self.dismiss((name, tuple(scope for scope in SCOPES if scope in self._scopes), limits))

    def _number(self, limit: str) -> str:
        return self.query_one(f"#{_input_of(limit)}", Input).value.strip() or "0"


class _Scopes(Table):
    """Scopes of a key, each of which can be switched."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "choose", "Switch", id="key.scope", tooltip="Let the key do this, or not", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(_SCOPE_COLUMNS, id="scopes")


class NewKeyScreen(ModalScreen[None]):
    """The one look at a new key."""

    AUTO_FOCUS = "#copy"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy", id="key.copy", tooltip="Copy the new key", show=False),
        Binding(
            "escape,q", "dismiss", "Close", id="key.close", tooltip="Close; the key is not shown again", show=False
        ),
    ]

    def __init__(self, made: NewKey) -> None:
        super().__init__()
        self._made = made

    def compose(self) -> ComposeResult:
        """The key, alone on its line so that it can be selected as well."""
        with Vertical(classes="dialog api-form"):
            yield Label(f"The key {self._made.name} is made.", classes="dialog-title", markup=False)
            yield Label("It is shown this once, and only a digest is kept: copy it now.", markup=False)
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
        self.notify(f"Copied the key {self._made.name}", markup=False)


def _scope_row(scope: Scope, on: bool) -> Row:
    mark = f"✓ {scope}" if on else f"○ {scope}"
    style = "bold $success" if on else "$muted"
    return Row(scope, (cell(mark, style), cell(_SCOPE_WORDS[scope], "" if on else "$muted")))


def _input_of(limit: str) -> str:
    return f"key-{limit.replace('_', '-')}"
