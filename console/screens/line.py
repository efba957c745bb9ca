"""One line is asked of the operator: a title, a name, a path."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label


class LineScreen(ModalScreen[str | None]):
    """The line, without blanks around it; None where the operator left. accept: what the button says."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", id="line.leave", tooltip="Leave it as it was", show=False),
    ]

    def __init__(self, title: str, value: str = "", *, accept: str, placeholder: str = "") -> None:
        super().__init__()
        self._title = title
        self._value = value
        self._accept = accept
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        """A title, a field, two buttons."""
        with Vertical(classes="dialog line"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield Input(self._value, placeholder=self._placeholder, compact=True)
            with Horizontal(classes="dialog-buttons"):
                yield Button(f"{self._accept} (enter)", id="accept", compact=True)
                yield Button("Leave (esc)", id="leave", compact=True)

    def on_input_submitted(self) -> None:
        """Enter."""
        self._use()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "accept":
            self._use()
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """As it was."""
        self.dismiss(None)

    def _use(self) -> None:
        if line := self.query_one(Input).value.strip():
            self.dismiss(line)
