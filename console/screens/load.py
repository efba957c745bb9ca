"""The form of a load on a page of its own, where there is no room beside the table."""

from __future__ import annotations

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen

from console.widgets.clicks import clickable
from console.widgets.model_panel import Edits, ModelPanel
from engine.models.catalog import ModelEntry

How = Literal["load", "beside", "forget"]


class LoadScreen(ModalScreen[How | None]):
    """What to do with the model and the values in `edits`; None: nothing."""

    AUTO_FOCUS = "LoadFormView"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "R", "forget", "Reset", id="models.forget", tooltip="Forget the values that this model was loaded with"
        ),
        Binding("escape", "dismiss", "Close", id="load.close", tooltip="Back to the models"),
    ]

    def __init__(self, entry: ModelEntry, edits: Edits) -> None:
        super().__init__()
        self._entry = entry
        self._edits = edits

    def compose(self) -> ComposeResult:
        """The panel alone."""
        with VerticalScroll(classes="dialog load", can_focus=False):
            yield ModelPanel(self._edits)

    def on_mount(self) -> None:
        """Filled at once."""
        hint = Content(", ").join(
            (
                clickable("Enter loads it", "screen.load_model(False)"),
                clickable("b beside", "screen.load_model(True)"),
                clickable("R resets", "screen.forget"),
                clickable("esc closes", "screen.dismiss"),
            )
        )
        self.query_one(ModelPanel).show(self._entry, hint, None)

    def action_load_model(self, beside: bool) -> None:
        """With these values."""
        self.dismiss("beside" if beside else "load")

    def action_forget(self) -> None:
        """Without any."""
        self.dismiss("forget")
