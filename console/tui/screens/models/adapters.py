"""The LoRA adapters of one model: which are attached where, and attaching and detaching them while it serves."""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.view import View
from console.tui.widgets.panel import set_title
from console.tui.widgets.table import Column, Row, Table, cell
from engine.snapshot import AdapterReading, ModelReading

_COLUMNS = (Column("adapter", 12, grow=20), Column("state", 20, grow=60), Column("size", 9, "right"))
_NONE = "No adapters yet. Requests select an adapter by its name as model."


class AdaptersScreen(Dialog[None]):
    """model: the key of the model in view."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "x,delete", "detach", "Detach", id="adapters.detach", mutates=True, tooltip="Detach the selected adapter"
        ),
        Binding("escape", "dismiss", "Close", id="adapters.close", tooltip="Close the adapters"),
    ]

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def compose(self) -> ComposeResult:
        """The adapters above a box for one more."""
        with Vertical(classes="dialog adapters"):
            yield Table(_COLUMNS, empty=_NONE, id="adapter-table")
            yield Input(placeholder="Folder, or name=folder · Enter attach", id="adapter", compact=True)

    def on_mount(self) -> None:
        """Never empty."""
        self.redraw()

    def _reading(self, view: View) -> ModelReading | None:
        """Return the model; None once it is unloaded."""
        return next((model for model in view.published.models if model.key == self._model), None)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to detach where an adapter is attached."""
        model = self._reading(view)
        return super().key_states(view) | {"adapters.detach": model is not None and bool(model.adapters)}

    def show_view(self, view: View) -> None:
        """Show the adapters of the model."""
        model = self._reading(view)
        if model is None:
            self.dismiss()
            return
        set_title(self.query_one(".adapters"), f"Adapters of {model.name}")
        self.query_one(Input).display = not view.is_read_only
        self.query_one(Table).show([_row(adapter, model) for adapter in model.adapters])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Attach what was typed."""
        event.stop()
        name, named, folder = event.value.strip().partition("=")
        if not named:
            name, folder = PurePath(name).name, name
        if name and folder and (model := self._reading(self.console.view)) is not None:
            event.input.value = ""
            command = self.console.link.attach(name.strip(), folder.strip(), model.name)
            self.console.perform(command, done=f"{name.strip()} attached")

    def action_detach(self) -> None:
        """Let go of the adapter under the cursor."""
        chosen, model = self.query_one(Table).cursor_key, self._reading(self.console.view)
        if chosen is None or model is None:
            self.notify("Select an adapter first.", severity="warning")
            return

        def detach() -> None:
            self.console.perform(self.console.link.detach(chosen, model.name), done=f"{chosen} detached")

        if not model.running + model.queued:
            detach()
            return
        question = ConfirmScreen(
            f"Detach {chosen}? {text.plural(model.running + model.queued, 'request')} of {model.name} not finished.",
            "Requests that use it finish; new ones for it get a 404.",
            yes="Detach",
            no="Keep",
        )
        self.app.push_screen(question, lambda sure: detach() if sure else None)


def _row(adapter: AdapterReading, model: ModelReading) -> Row:
    if adapter.error is not None:
        state = cell(f"✖ {adapter.error.message}", "$error")
    else:
        whole = adapter.workers >= model.target_workers
        mark, style = ("✓", "$success") if whole else ("◔", "$worker-loading")
        state = cell(f"{mark} on {adapter.workers} of {text.plural(model.target_workers, 'worker')}", style)
    size = text.size(adapter.size_bytes) if adapter.size_bytes else "–"
    return Row(adapter.name, (cell(adapter.name, "bold"), state, cell(size, "$muted")))
