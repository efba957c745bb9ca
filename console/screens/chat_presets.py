"""Presets: system prompts and sampling under names, to choose from."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from console.chats import ChatSettings, ChatStore, Preset
from console.chats.presets import all_presets, described
from console.screens.confirm import ConfirmScreen
from console.screens.line import LineScreen
from console.widgets.glyphs import fitted

_NAME_WIDTH = 16


class PresetsScreen(ModalScreen[Preset | None]):
    """The preset that was chosen; None where none was. settings: those in use, which can be kept as a preset."""

    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", id="presets.leave", tooltip="Leave the settings as they were"),
        Binding("n", "keep", "Keep", id="presets.keep", tooltip="Keep the settings in use under a name"),
        Binding("d,delete", "delete", "Delete", id="presets.delete", tooltip="Delete a preset of your own"),
    ]

    def __init__(self, store: ChatStore, settings: ChatSettings) -> None:
        super().__init__()
        self._store = store
        self._settings = settings
        self._presets: list[Preset] = []

    def compose(self) -> ComposeResult:
        """One line for each."""
        with Vertical(classes="dialog presets"):
            yield Label("Presets", classes="dialog-title")
            yield OptionList(compact=True)
            yield Label(
                Content.from_markup(
                    "enter uses it  [@click=screen.keep]n keeps what is in use[/]  [@click=screen.delete]d deletes[/]  "
                    "[@click=screen.leave]esc leaves[/]"
                ),
                classes="ways",
            )

    def on_mount(self) -> None:
        """Show them."""
        self._show()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click."""
        self.dismiss(self._presets[event.option_index])

    def action_leave(self) -> None:
        """None of them."""
        self.dismiss(None)

    def action_keep(self) -> None:
        """Ask for a name."""

        def keep(name: str | None) -> None:
            if name:
                self._store.keep_preset(Preset(name=name, settings=self._settings))
                self._show(name)

        self.app.push_screen(LineScreen("Keep the settings in use as", accept="Keep", placeholder="Name"), keep)

    def action_delete(self) -> None:
        """One of the operator's own."""
        at = self.query_one(OptionList).highlighted
        if at is None:
            return
        if self._presets[at].builtin:
            self.notify("Presets that come with the program stay.", severity="warning")
            return
        name = self._presets[at].name

        def delete(yes: bool | None) -> None:
            if yes:
                self._store.delete_preset(name)
                self._show()

        self.app.push_screen(ConfirmScreen("Delete this preset?", name, yes="Delete", no="Keep"), delete)

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
        return fitted(self.app, Content.assemble(name, (described(preset.settings), "$muted")))
