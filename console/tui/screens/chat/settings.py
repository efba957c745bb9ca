"""Settings of a conversation: model, system prompt and sampling. An empty field is the model's default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Input, Label, OptionList, Select, TextArea
from textual.widgets.option_list import Option

from console.chats import ChatSettings, ChatStore, Preset
from console.chats.presets import all_presets, apply_preset, describe_settings
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import set_title
from engine.config import PARAMETERS, Parameter, SamplingParams
from engine.errors import InvalidRequest

# Presets: named system prompts and sampling settings.

_NAME_WIDTH = 16


class PresetsScreen(Dialog[Preset | None]):
    """Returns the chosen preset, or None. settings: the current ones, which can be saved as a preset."""

    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding("enter", "use", "Use", id="presets.use", tooltip="Use the preset", priority=True, primary=True),
        Binding("n", "keep", "Save", id="presets.keep", tooltip="Save the current settings under a name"),
        Binding("d,delete", "delete", "Delete", id="presets.delete", tooltip="Delete a saved preset", key_display="d"),
        Binding("escape", "leave", "Cancel", id="presets.leave", tooltip="Close without a change"),
    ]

    def __init__(self, store: ChatStore, settings: ChatSettings) -> None:
        super().__init__()
        self._store = store
        self._settings = settings
        self._presets: list[Preset] = []

    def compose(self) -> ComposeResult:
        """Yield one line for each preset."""
        with Vertical(classes="dialog presets"):
            yield Label("Presets", classes="dialog-title")
            yield OptionList(compact=True)

    def on_mount(self) -> None:
        """Show the presets."""
        self._show()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the preset."""
        self.dismiss(self._presets[event.option_index])

    def action_use(self) -> None:
        """Return the highlighted preset."""
        self.query_one(OptionList).action_select()

    def action_leave(self) -> None:
        """Return None."""
        self.dismiss(None)

    def action_keep(self) -> None:
        """Ask for a name and save the current settings under it."""

        def keep(name: str | None) -> None:
            if name:
                self._store.keep_preset(Preset(name=name, settings=self._settings))
                self._show(name)

        self.app.push_screen(LineScreen("Save current settings as", accept="Save", placeholder="Name"), keep)

    def action_delete(self) -> None:
        """Delete the highlighted preset, once confirmed."""
        at = self.query_one(OptionList).highlighted
        if at is None:
            return
        if self._presets[at].builtin:
            self.notify("Built-in presets cannot be deleted.", severity="warning")
            return
        name = self._presets[at].name

        def delete(yes: bool | None) -> None:
            if yes:
                self._store.delete_preset(name)
                self._show()

        self.app.push_screen(ConfirmScreen("Delete this preset?", name, yes="Delete", no="Cancel"), delete)

    def _show(self, name: str = "") -> None:
        self._presets = all_presets(self._store.presets())
        shown = self.query_one(OptionList)
        at = shown.highlighted or 0
        shown.clear_options()
        shown.add_options([Option(self._line(preset)) for preset in self._presets])
        names = [preset.name for preset in self._presets]
        shown.highlighted = names.index(name) if name in names else min(at, len(names) - 1)

    def _line(self, preset: Preset) -> Content:
        name = f"{preset.name:<{_NAME_WIDTH}} "
        return for_terminal(self.app, Content.assemble(name, (describe_settings(preset.settings), "$muted")))


_ROWS = tuple(PARAMETERS[name] for name in ChatSettings.__struct_fields__ if name in PARAMETERS)
"""Parameters in the form."""

MODEL_IN_VIEW = "Selected model"
_THINKING: dict[str, bool | None] = {"Model default": None, "On": True, "Off": False}


def sampling(settings: ChatSettings, defaults: SamplingParams) -> SamplingParams:
    """Return `defaults` with the values of the settings. Raises InvalidRequest naming a value out of range."""
    values = {row.name: getattr(settings, row.name) for row in _ROWS}
    changed = {name: value for name, value in values.items() if value is not None}
    return msgspec.structs.replace(defaults, **changed).validate()


class ChatSettingsScreen(Dialog[ChatSettings | None]):
    """Returns the edited settings, or None if cancelled. models: names of the loaded models."""

    AUTO_FOCUS = "#system"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "ctrl+s,ctrl+l", "save", "Use", id="chat.settings.save", tooltip="Use these settings", primary=True
        ),
        Binding(
            "ctrl+t,ctrl+r", "presets", "Presets", id="chat.settings.presets", tooltip="Fill the form from a preset"
        ),
        Binding("escape", "leave", "Cancel", id="chat.settings.leave", tooltip="Discard changes"),
    ]

    def __init__(
        self,
        settings: ChatSettings,
        defaults: SamplingParams,
        *,
        models: Sequence[str],
        store: ChatStore,
        title: str = "Chat settings",
    ) -> None:
        super().__init__()
        self._settings = settings
        self._defaults = defaults
        self._models = models
        self._store = store
        self._title = title

    def compose(self) -> ComposeResult:
        """Yield the model, the system prompt, a grid of parameters and a line for errors."""
        named = [*self._models, *({self._settings.model} - {"", *self._models})]
        with Vertical(classes="dialog chat-settings") as page:
            set_title(page, self._title)
            with Horizontal(classes="model"):
                yield Label("Model")
                yield Select(
                    [(MODEL_IN_VIEW, ""), *((Text(name), name) for name in named)],
                    value=self._settings.model,
                    allow_blank=False,
                    compact=True,
                    id="model",
                )
            with Horizontal(classes="model"):
                yield Label("Thinking")
                yield Select(
                    [(name, name) for name in _THINKING],
                    value="Model default",
                    allow_blank=False,
                    compact=True,
                    id="thinking",
                )
            yield Label("System prompt", classes="prompt")
            yield TextArea(self._settings.system_prompt, id="system", compact=True, placeholder="None")
            with Grid():
                for row in _ROWS:
                    yield Label(row.label)
                    yield Input(id=row.name, compact=True, placeholder=self._placeholder(row))
            yield Label("", id="problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Use (ctrl+s)", variant="primary", id="save", compact=True)
                yield Button("Presets (ctrl+t)", id="presets", compact=True)
                yield Button("Cancel (esc)", id="leave", compact=True)

    def on_mount(self) -> None:
        """Fill in the settings."""
        self._fill(self._settings)

    def action_save(self) -> None:
        """Return the settings if they are valid."""
        if (settings := self._check()) is not None:
            self.dismiss(settings)

    def action_presets(self) -> None:
        """Fill the form from a preset, or save it as one."""
        settings = self._check()
        if settings is None:
            return

        def use(preset: Preset | None) -> None:
            if preset is not None:
                self._fill(apply_preset(preset, settings))

        self.app.push_screen(PresetsScreen(self._store, settings), use)

    def action_leave(self) -> None:
        """Discard changes."""
        self.dismiss(None)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Act as the button's key does."""
        {"save": self.action_save, "presets": self.action_presets, "leave": self.action_leave}[event.button.id or ""]()

    def on_input_submitted(self) -> None:
        """Act as Save does."""
        self.action_save()

    def _fill(self, settings: ChatSettings) -> None:
        self.query_one("#system", TextArea).text = settings.system_prompt
        names = {value: name for name, value in _THINKING.items()}
        self.query_one("#thinking", Select).value = names[settings.enable_thinking]
        select: Select[str] = self.query_one("#model", Select)
        if settings.model in ("", *self._models, self._settings.model):
            select.value = settings.model
        for row in _ROWS:
            value = getattr(settings, row.name)
            self.query_one(f"#{row.name}", Input).value = "" if value is None else str(value)

    def _placeholder(self, row: Parameter) -> str:
        value = getattr(self._defaults, row.name)
        return "model default" if value is None else f"{value:g}"

    def _check(self) -> ChatSettings | None:
        try:
            settings = self._read()
            sampling(settings, self._defaults)
        except InvalidRequest as error:
            self.query_one("#problem", Label).update(error.message)
            return None
        self.query_one("#problem", Label).update("")
        return settings

    def _read(self) -> ChatSettings:
        values = {row.name: self._number(row) for row in _ROWS}
        return ChatSettings(
            model=str(self.query_one("#model", Select).value),
            enable_thinking=_THINKING[str(self.query_one("#thinking", Select).value)],
            system_prompt=self.query_one("#system", TextArea).text.strip(),
            **values,  # type: ignore[arg-type]
        )

    def _number(self, row: Parameter) -> int | float | None:
        text = self.query_one(f"#{row.name}", Input).value.strip()
        if not text:
            return None
        kind = float if isinstance(row.low, float) else int
        try:
            return kind(text)
        except ValueError:
            noun = "whole number" if kind is int else "number"
            raise InvalidRequest(f"{row.label} is {text!r}; must be a {noun}", param=row.name) from None
