"""How a conversation asks: system prompt and sampling. An empty field leaves the value to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, TextArea

from console.chats import ChatSettings
from engine.config import SamplingParams
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    label: str
    kind: type[int] | type[float]


_FIELDS = (
    _Field("temperature", "Temperature", float),
    _Field("top_p", "top_p", float),
    _Field("top_k", "top_k", int),
    _Field("max_tokens", "Max tokens", int),
    _Field("seed", "Seed", int),
)


def sampling(settings: ChatSettings, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what the settings say instead. Raises InvalidRequest naming a value out of range."""
    values = {name: getattr(defaults, name) for name in SamplingParams.__struct_fields__}
    for field in _FIELDS:
        chosen = getattr(settings, field.name)
        if chosen is not None:
            values[field.name] = chosen
    return SamplingParams(**values).validate()


class ChatSettingsScreen(ModalScreen[ChatSettings | None]):
    """Edits settings; None when the operator changed nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", id="chat.settings.save", tooltip="Use these settings"),
        Binding("escape", "leave", "Leave", id="chat.settings.leave", tooltip="Leave the settings as they were"),
    ]

    def __init__(self, settings: ChatSettings, defaults: SamplingParams) -> None:
        super().__init__()
        self._settings = settings
        self._defaults = defaults

    def compose(self) -> ComposeResult:
        """A text box for the system prompt, a grid of small fields, one line for what is wrong."""
        with Vertical(classes="dialog chat-settings"):
            yield Label("Chat settings", classes="dialog-title")
            yield Label("System prompt")
            yield TextArea(self._settings.system_prompt, id="system", compact=True, placeholder="None")
            with Grid():
                for field in _FIELDS:
                    yield Label(field.label)
                    yield Input(self._shown(field), id=field.name, compact=True, placeholder=self._placeholder(field))
            yield Label("", id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Use (ctrl+s)", variant="primary", id="save", compact=True)
                yield Button("Leave (esc)", id="leave", compact=True)

    def action_save(self) -> None:
        """Check, then use."""
        try:
            settings = self._read()
            sampling(settings, self._defaults)
        except InvalidRequest as error:
            self.query_one("#problem", Label).update(error.message)
            return
        self.dismiss(settings)

    def action_leave(self) -> None:
        """As they were."""
        self.dismiss(None)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "save":
            self.action_save()
        else:
            self.action_leave()

    def on_input_submitted(self) -> None:
        """Enter in a field."""
        self.action_save()

    def _shown(self, field: _Field) -> str:
        value = getattr(self._settings, field.name)
        return "" if value is None else str(value)

    def _placeholder(self, field: _Field) -> str:
        value = getattr(self._defaults, field.name)
        return "model's own" if value is None else f"{value:g}"

    def _read(self) -> ChatSettings:
        values = {field.name: self._number(field) for field in _FIELDS}
        return ChatSettings(system_prompt=self.query_one("#system", TextArea).text.strip(), **values)  # type: ignore[arg-type]

    def _number(self, field: _Field) -> int | float | None:
        text = self.query_one(f"#{field.name}", Input).value.strip()
        if not text:
            return None
        try:
            return field.kind(text)
        except ValueError:
            kind = "whole number" if field.kind is int else "number"
            raise InvalidRequest(f"{field.label} is {text!r}; it must be a {kind}", param=field.name) from None
