"""What a bench asks: the engine, or a server by its address, with the dialect that it speaks."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Label, Select

from console.bench.about import ASKED
from console.bench.draft import BenchDraft
from console.links.benches import BenchServer
from console.widgets.glyphs import fitted

_ENGINE = "or a server: http://host:port"
_BOXES = {"url": "#place-url", "dialect": "#place-dialect", "model": "#place-model", "key": "#place-key"}


class BenchPlace(Vertical):
    """An address, empty for the engine; below it what more is needed of a server. What is typed goes into the draft.

    elsewhere: where the engine is, "" for this process. Only the engine can be asked there.
    """

    class Changed(Message):
        """Something else is to be asked."""

    def __init__(self, draft: BenchDraft, elsewhere: str = "") -> None:
        super().__init__()
        self._draft = draft
        self._elsewhere = elsewhere

    def compose(self) -> ComposeResult:
        """One line, and one more for a server."""
        server = self._draft.server
        with Horizontal():
            yield Label("target", classes="place-first")
            yield Input(
                server.url,
                placeholder=f"the engine of {self._elsewhere}" if self._elsewhere else "this engine",
                id="place-url",
                compact=True,
                disabled=bool(self._elsewhere),
            )
            yield Label("", id="place-hint", classes="hint", markup=False)
        with Horizontal(id="place-server"):
            yield Label("dialect", classes="place-first")
            yield Select(
                [(name, name) for name in ASKED],
                value=server.dialect,
                allow_blank=False,
                compact=True,
                id="place-dialect",
            )
            yield Label("model", classes="place-label")
            yield Input(server.model, placeholder="the first listed", id="place-model", compact=True)
            yield Label("key", classes="place-label")
            yield Input(server.key, placeholder="none", password=True, id="place-key", compact=True)

    def on_mount(self) -> None:
        """As it is in the draft."""
        self._show()

    def go_to_address(self) -> None:
        """To where a server is named."""
        self.query_one("#place-url").focus()

    def go_to(self, setting: str) -> bool:
        """To the one that is wrong; whether there is such a one."""
        if setting not in _BOXES:
            return False
        self.query_one(_BOXES[setting]).add_class("-wrong").focus()
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        """Typed."""
        event.stop()
        event.input.remove_class("-wrong")
        self._changed()

    def on_select_changed(self, event: Select.Changed) -> None:
        """Chosen."""
        event.stop()
        event.select.remove_class("-wrong")
        self._changed()

    def _changed(self) -> None:
        dialect: Select[str] = self.query_one("#place-dialect", Select)
        self._draft.server = BenchServer(
            url=self._text("#place-url"),
            dialect=str(dialect.value),
            model=self._text("#place-model"),
            key=self._text("#place-key"),
        )
        self._show()
        self.post_message(self.Changed())

    def _show(self) -> None:
        server = self._draft.server
        self.query_one("#place-server").display = bool(server.url)
        hint = "" if self._elsewhere else ASKED[server.dialect] if server.url else _ENGINE
        self.query_one("#place-hint", Label).update(fitted(self.app, Content(hint)))

    def _text(self, box: str) -> str:
        return self.query_one(box, Input).value.strip()
