"""One question before something is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, TypeVar

from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from console.tui.screens.base import Dialog, accept_key

# One line is asked of the operator: a title, a name, a path.


class LineScreen(Dialog[str | None]):
    """The line, without blanks around it; None where the operator left. accept: what the button says.

    explain: makes a line beneath the field from what is typed, None for no such line.
    """

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        accept_key("OK"),
        Binding("escape", "leave", "Cancel", id="line.leave", tooltip="Close without a change"),
    ]

    def __init__(
        self,
        title: str,
        value: str = "",
        *,
        accept: str,
        placeholder: str = "",
        explain: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self._explain = explain
        self._title = title
        self._value = value
        self._accept = accept
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        """A title, a field, two buttons."""
        with Vertical(classes="dialog line"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield Input(self._value, placeholder=self._placeholder, compact=True)
            if self._explain is not None:
                yield Static(self._explain(self._value), id="explained", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button(f"{self._accept} (enter)", id="accept", compact=True)
                yield Button("Cancel (esc)", id="leave", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "accept":
            self.action_accept()
        else:
            self.action_leave()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Explain the line as it is now."""
        if self._explain is not None:
            self.query_one("#explained", Static).update(self._explain(event.value))

    def action_leave(self) -> None:
        """As it was."""
        self.dismiss(None)

    def action_accept(self) -> None:
        """Return the line, once one is typed."""
        if line := self.query_one(Input).value.strip():
            self.dismiss(line)


T = TypeVar("T")


class _Question(Dialog[T]):
    """answers: of each button by its id, and what it says; that of "no" has the focus, so Enter changes nothing."""

    AUTO_FOCUS = "#no"

    def __init__(self, title: str, question: str, answers: Mapping[str, tuple[T, str]]) -> None:
        super().__init__()
        self._title = title
        self._question = question
        self._answers = answers

    def compose(self) -> ComposeResult:
        """The question and its buttons."""
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield Label(self._question, markup=False)
            with Horizontal(classes="dialog-buttons"):
                for button, (_, label) in self._answers.items():
                    yield Button(label, id=button, compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        self.action_answer(event.button.id or "no")

    def action_answer(self, button: str) -> None:
        """The keys' way."""
        self.dismiss(self._answers[button][0])

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The keys, in the words of this question's buttons."""
        return {key: self._in_words(active) for key, active in super().active_bindings.items()}

    def _in_words(self, active: ActiveBinding) -> ActiveBinding:
        found = self._answers.get((active.binding.id or "").rpartition(".")[2])
        if found is None:
            return active
        words = found[1].rpartition(" (")[0]
        return active._replace(binding=replace(active.binding, description=words, tooltip=words))


class ConfirmScreen(_Question[bool]):
    """True: do it. yes, no: what the buttons say; Enter means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer('yes')", "Yes", id="confirm.yes", tooltip="Confirm"),
        Binding("n,escape", "answer('no')", "No", id="confirm.no", tooltip="Close without a change", key_display="n"),
    ]

    def __init__(self, title: str, question: str, *, yes: str, no: str) -> None:
        super().__init__(title, question, {"yes": (True, f"{yes} (y)"), "no": (False, f"{no} (n)")})


_NO = Binding("n,escape", "answer('no')", "No", id="stop.no", tooltip="Close without a change", key_display="n")
_CUT = Binding("y", "answer('cut')", "Cut", id="stop.cut", tooltip="Cancel running requests")

KeepOrCut = Literal["keep", "cut", ""]
"""keep: take back what ends once requests have finished; cut: end these now; "": go on waiting."""


class KeepOrCutScreen(_Question[KeepOrCut]):
    """Choice about an end that waits for requests: take it back, or wait no longer. keep, cut, no: what the buttons
    say; Enter means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "answer('keep')", "Keep", id="stop.keep", tooltip="Keep it on"),
        _CUT,
        _NO,
    ]

    def __init__(self, title: str, question: str, *, keep: str, cut: str, no: str) -> None:
        answers: dict[str, tuple[KeepOrCut, str]] = {"keep": ("keep", f"{keep} (k)"), "cut": ("cut", f"{cut} (y)")}
        super().__init__(title, question, {**answers, "no": ("", f"{no} (n)")})


FinishOrCut = Literal["finish", "cut", ""]
"""finish: let requests that run end first; cut: end them now; "": change nothing."""


class FinishOrCutScreen(_Question[FinishOrCut]):
    """How to do what ends requests that run: after them, or at once. finish, cut, no: what the buttons say; Enter means
    no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "answer('finish')", "Finish", id="stop.finish", tooltip="Finish running requests"),
        _CUT,
        _NO,
    ]

    def __init__(self, title: str, question: str, *, finish: str, cut: str, no: str) -> None:
        answers: dict[str, tuple[FinishOrCut, str]] = {
            "finish": ("finish", f"{finish} (f)"),
            "cut": ("cut", f"{cut} (y)"),
        }
        super().__init__(title, question, {**answers, "no": ("", f"{no} (n)")})
