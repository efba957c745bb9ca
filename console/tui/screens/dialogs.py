"""One question before something is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label

# One line is asked of the operator: a title, a name, a path.


class LineScreen(ModalScreen[str | None]):
    """The line, without blanks around it; None where the operator left. accept: what the button says."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Cancel", id="line.leave", tooltip="Close without a change", show=False),
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
                yield Button("Cancel (esc)", id="leave", compact=True)

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


T = TypeVar("T")


class _Question(ModalScreen[T]):
    """buttons: what each says, by its id; "no" has the focus, so Enter changes nothing."""

    AUTO_FOCUS = "#no"

    def __init__(self, title: str, question: str, buttons: Mapping[str, str]) -> None:
        super().__init__()
        self._title = title
        self._question = question
        self._buttons = buttons

    def compose(self) -> ComposeResult:
        """The question and its buttons."""
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield Label(self._question, markup=False)
            with Horizontal(classes="dialog-buttons"):
                for answer, label in self._buttons.items():
                    yield Button(label, id=answer, compact=True)


class ConfirmScreen(_Question[bool]):
    """True: do it. yes, no: what the buttons say; Enter means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="confirm.yes", tooltip="Do it", show=False),
        Binding("n,escape", "answer(False)", "No", id="confirm.no", tooltip="Leave it", show=False),
    ]

    def __init__(self, title: str, question: str, *, yes: str, no: str) -> None:
        super().__init__(title, question, {"yes": f"{yes} (y)", "no": f"{no} (n)"})

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """The keys' way."""
        self.dismiss(yes)


StopApi = Literal["finish", "cut", ""]
"""finish: let requests that run end first; cut: end them now; "": leave the API on."""


class StopApiScreen(_Question[StopApi]):
    """How to switch the API off while requests run; Enter leaves it on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "answer('finish')", "Finish", id="stop.finish", tooltip="Finish running requests", show=False),
        Binding("y", "answer('cut')", "Cut", id="stop.cut", tooltip="Cut running requests off", show=False),
        Binding("n,escape", "answer('')", "No", id="stop.no", tooltip="Leave the API on", show=False),
    ]

    def __init__(self, title: str) -> None:
        buttons = {"finish": "Finish them first (f)", "cut": "Cut them off now (y)", "no": "Keep it on (n)"}
        question = (
            "Finish: new requests are refused, and the API goes off when\nthe last running one has its answer.\n"
            "Cut off: clients get an error in place of the rest."
        )
        super().__init__(title, question, buttons)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        answers: dict[str | None, StopApi] = {"finish": "finish", "cut": "cut"}
        self.dismiss(answers.get(event.button.id, ""))

    def action_answer(self, answer: StopApi) -> None:
        """The keys' way."""
        self.dismiss(answer)
