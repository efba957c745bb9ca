"""Asks before answers are cut off."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Label

from console.widgets import text


class QuitScreen(ModalScreen[bool]):
    """True: quit. unfinished: requests queued or running."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Quit", id="quit.yes", tooltip="Quit now", show=False),
        Binding("n,escape", "answer(False)", "Stay", id="quit.no", tooltip="Go on", show=False),
    ]

    def __init__(self, unfinished: int) -> None:
        super().__init__()
        self._unfinished = unfinished

    def compose(self) -> ComposeResult:
        """One question, two buttons."""
        verb = "is" if self._unfinished == 1 else "are"
        with Vertical(classes="dialog"):
            yield Label(f"{text.plural(self._unfinished, 'request')} {verb} not finished.", classes="dialog-title")
            yield Label("They get a few seconds to end, then they are cut off. Quit?")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Quit (y)", id="yes", compact=True)
                yield Button("Stay (n)", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, leave: bool) -> None:
        """The keys' way."""
        self.dismiss(leave)
