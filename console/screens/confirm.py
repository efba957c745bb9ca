"""One question before something is lost."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Label


class ConfirmScreen(ModalScreen[bool]):
    """True: do it. yes, no: what the buttons say; Enter means no."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="confirm.yes", tooltip="Do it", show=False),
        Binding("n,escape", "answer(False)", "No", id="confirm.no", tooltip="Leave it", show=False),
    ]

    def __init__(self, title: str, question: str, *, yes: str, no: str) -> None:
        super().__init__()
        self._title = title
        self._question = question
        self._labels = {"yes": f"{yes} (y)", "no": f"{no} (n)"}

    def compose(self) -> ComposeResult:
        """The question, two buttons."""
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield Label(self._question, markup=False)
            with Horizontal(classes="dialog-buttons"):
                for answer, label in self._labels.items():
                    yield Button(label, id=answer, compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """The keys' way."""
        self.dismiss(yes)
