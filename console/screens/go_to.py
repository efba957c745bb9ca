"""Where to go in a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

_HINT = "14:02 or 14:02:11, +90 or -90 seconds from either end, or 50%"


class GoToScreen(ModalScreen[float | None]):
    """Gives the unix time that was asked for. understood: that of what was typed, None for what is no time."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", id="go_to.close", tooltip="Stay where it is", show=False),
    ]

    def __init__(self, understood: Callable[[str], float | None]) -> None:
        super().__init__()
        self._understood = understood

    def compose(self) -> ComposeResult:
        """A box and what may be written in it."""
        with Vertical(classes="dialog go-to") as page:
            page.border_title = "Go to"
            yield Input(placeholder="14:02", id="time", compact=True)
            yield Label(_HINT, id="hint", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go, or say what would be understood."""
        event.stop()
        at = self._understood(event.value)
        if at is None:
            self.query_one("#hint", Label).update(f"That is no time: {_HINT}")
        else:
            self.dismiss(at)
