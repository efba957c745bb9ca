"""One question before something is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, TypeVar

from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label

from console.tui.screens.base import Dialog, accept_key

# One line is asked of the operator: a title, a name, a path.


class LineScreen(Dialog[str | None]):
    """The line, without blanks around it; None where the operator left. accept: what the button says."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        accept_key("OK"),
        Binding("escape", "leave", "Cancel", id="line.leave", tooltip="Close without a change"),
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

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "accept":
            self.action_accept()
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """As it was."""
        self.dismiss(None)

    def action_accept(self) -> None:
        """Return the line, once one is typed."""
        if line := self.query_one(Input).value.strip():
            self.dismiss(line)


T = TypeVar("T")


class _Question(Dialog[T]):
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

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The keys, in the words of this question's buttons."""
        return {key: self._in_words(active) for key, active in super().active_bindings.items()}

    def _in_words(self, active: ActiveBinding) -> ActiveBinding:
        label = self._buttons.get((active.binding.id or "").rpartition(".")[2])
        if label is None:
            return active
        words = label.rpartition(" (")[0]
        return active._replace(binding=replace(active.binding, description=words, tooltip=words))


class ConfirmScreen(_Question[bool]):
    """True: do it. yes, no: what the buttons say; Enter means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="confirm.yes", tooltip="Confirm"),
        Binding("n,escape", "answer(False)", "No", id="confirm.no", tooltip="Close without a change", key_display="n"),
    ]

    def __init__(self, title: str, question: str, *, yes: str, no: str) -> None:
        super().__init__(title, question, {"yes": f"{yes} (y)", "no": f"{no} (n)"})

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """The keys' way."""
        self.dismiss(yes)


FinishOrCut = Literal["finish", "cut", ""]
"""finish: let requests that run end first; cut: end them now; "": change nothing."""


class FinishOrCutScreen(_Question[FinishOrCut]):
    """How to do what ends requests that run: after them, or at once. finish, cut, no: what the buttons say; Enter means
    no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "answer('finish')", "Finish", id="stop.finish", tooltip="Finish running requests"),
        Binding("y", "answer('cut')", "Cut", id="stop.cut", tooltip="Cancel running requests"),
        Binding("n,escape", "answer('')", "No", id="stop.no", tooltip="Close without a change", key_display="n"),
    ]

    def __init__(self, title: str, question: str, *, finish: str, cut: str, no: str) -> None:
        super().__init__(title, question, {"finish": f"{finish} (f)", "cut": f"{cut} (y)", "no": f"{no} (n)"})

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        answers: dict[str | None, FinishOrCut] = {"finish": "finish", "cut": "cut"}
        self.dismiss(answers.get(event.button.id, ""))

    def action_answer(self, answer: FinishOrCut) -> None:
        """The keys' way."""
        self.dismiss(answer)
