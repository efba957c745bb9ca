"""Settings: every one with its help, its value and where that came from; changed here, saved to config.toml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from console.link.settings import SettingRow
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.settings.panel import USED, SettingPanel, SettingTable
from console.tui.theme import AUTO_THEME
from console.tui.view import View
from console.tui.widgets.panel import set_subtitle, set_title
from console.tui.widgets.table import Table
from engine.errors import EngineError


class SettingsScreen(ConsoleScreen):
    """A searchable table of all settings; next to it (below, where it is narrow) the selected one."""

    MODE = "settings"
    AUTO_FOCUS = "SettingTable"

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "e",
            "edit",
            "Edit",
            id="settings.edit",
            mutates=True,
            primary=True,
            tooltip="Change the selected setting",
            key_display="⏎",
        ),
        ConsoleBinding(
            "d,delete",
            "reset",
            "Default",
            id="settings.reset",
            mutates=True,
            tooltip="Reset the setting to its default",
            key_display="d",
        ),
        Binding("v", "all", "All/basic", id="settings.all", tooltip="Show all settings, or the basic ones"),
        Binding("c", "changed", "Changed", id="settings.changed", tooltip="Show only changed settings"),
        Binding("slash", "find", "Find", id="settings.find", tooltip="Search settings", key_display="/"),
        Binding(
            "escape", "leave", "Clear", id="settings.leave", tooltip="Cancel the edit, clear the filter", show=False
        ),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._rows: Sequence[SettingRow] = ()
        self._word = ""
        self._only_changed = False
        self._all = False

    def compose_body(self) -> ComposeResult:
        """Search above the table; the setting next to them."""
        with Horizontal(id="settings"):
            with Vertical(classes="panel", id="listed"):
                yield Input(placeholder="/ type to filter", id="find", compact=True)
                yield SettingTable()
            yield SettingPanel()

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to change the selected setting, and to reset one that is saved."""
        row = self._chosen()
        return super().key_states(view) | {
            "settings.edit": row is not None,
            "settings.reset": row is not None and row.saved is not None,
        }

    def update_body(self, view: View) -> None:
        """Show values that were changed elsewhere or in the file."""
        rows = [self._as_seen(row) for row in self.link.settings.rows()]
        if rows != self._rows:
            self._rows = rows
            self._show()

    def _as_seen(self, row: SettingRow) -> SettingRow:
        """Return the row as the screen shows it: themes and the theme in use are the console's own."""
        if row.name != "theme":
            return row
        choices = (AUTO_THEME, *sorted(self.app.available_themes))
        row = msgspec.structs.replace(row, kind="choice", choices=choices)
        theme = self.console.preferences.theme_name
        if theme == row.value or self.query_one(SettingPanel).editing:
            return row
        return msgspec.structs.replace(row, value=theme, source="console", where="", waits=True)

    def _show(self) -> None:
        found = [row for row in self._rows if self._matches(row)]
        listed = self.query_one("#listed")
        set_title(listed, self._title(len(found)))
        set_subtitle(listed, self.link.settings.path())
        self.query_one(SettingTable).show_settings(found)
        self._describe()

    def _title(self, found: int) -> str:
        if self._word or self._only_changed:
            return f"Settings: {found} found"
        whole = len(self._rows)
        return f"All {whole} settings" if found == whole else f"Basic settings: {found} of {whole}, v shows all"

    def _matches(self, row: SettingRow) -> bool:
        """A search, and the filter of changed ones, look at all settings."""
        searched = f"{row.name} {row.name.replace('_', ' ')} {row.group} {row.help}".lower()
        is_changed = row.source != "default" or row.saved is not None
        if self._word or self._only_changed:
            found = all(word in searched for word in self._word.lower().split())
            return found and (is_changed or not self._only_changed)
        return self._all or row.basic or is_changed or not any(each.basic for each in self._rows)

    def _describe(self) -> None:
        row = self._chosen()
        panel = self.query_one(SettingPanel)
        if row is not None and not panel.editing:
            panel.show(row)

    def _chosen(self) -> SettingRow | None:
        name = self.query_one(SettingTable).chosen
        return next((row for row in self._rows if row.name == name), None)

    def on_table_moved(self, event: Table.Moved) -> None:
        """Another setting."""
        if not self.query_one(SettingPanel).editing:
            self._describe()
        self.offer_keys()

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter on a row, or two clicks."""
        if not self.console.refuses_changes():
            self.action_edit()

    # -- finding ----------------------------------------------------------------------------------------------------

    def action_find(self) -> None:
        """Type a word."""
        self.query_one("#find", Input).focus()

    def action_all(self) -> None:
        """All settings, or the basic ones and what was changed."""
        self._all = not self._all
        self._show()

    def action_changed(self) -> None:
        """Only what is not at its default, or all again."""
        self._only_changed = not self._only_changed
        self._show()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Find while it is typed."""
        if event.input.id == "find":
            self._word = event.value
            self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """To what was found."""
        self.query_one(SettingTable).focus()

    def action_leave(self) -> None:
        """Leave what is typed as it was: the value first, then the search."""
        panel = self.query_one(SettingPanel)
        if panel.editing:
            panel.close()
            self._apply_theme(None)
        elif self._word or self._only_changed:
            self.query_one("#find", Input).value = ""
            self._only_changed = False
            self._show()
        self.query_one(SettingTable).focus()

    # -- changing ---------------------------------------------------------------------------------------------------

    def action_edit(self) -> None:
        """Change the selected setting."""
        if (row := self._chosen()) is not None:
            panel = self.query_one(SettingPanel)
            panel.show(row)
            panel.edit()

    def action_reset(self) -> None:
        """The default again."""
        row = self._chosen()
        if row is None or self.query_one(SettingPanel).editing:
            return
        if row.saved is None:
            self.notify(f"{row.name} is not in config.toml; nothing to reset.", markup=False)
        else:
            self._save(row, None)

    def on_setting_panel_pointed(self, event: SettingPanel.Pointed) -> None:
        """A theme is tried on while the cursor is on it."""
        if event.row.name == "theme":
            self._apply_theme(event.value)

    def on_setting_panel_entered(self, event: SettingPanel.Entered) -> None:
        """Save it; a secret only if one was typed."""
        if event.row.secret and not event.value:
            self.action_leave()
        else:
            self._save(event.row, event.value)

    def _save(self, row: SettingRow, value: str | None) -> None:
        self.run_worker(self._saving(row, value), group="save", exit_on_error=False)

    async def _saving(self, row: SettingRow, value: str | None) -> None:
        panel = self.query_one(SettingPanel)
        try:
            saved = await self.link.settings.save(row.name, value)
        except EngineError as error:
            if panel.editing:
                panel.complain(error.message)
            else:
                self.notify(error.message, severity="error", markup=False)
            return
        self._use(saved)
        if panel.editing:
            panel.close()
            self.query_one(SettingTable).focus()
        self.notify(_outcome(saved), markup=False)
        self.redraw()
        self._describe()

    def _use(self, row: SettingRow) -> None:
        """Apply a setting of the console itself."""
        if row.name == "theme":
            self._apply_theme(row.value)
        elif row.name == "refresh_hz":
            self.console.refresh_at(int(row.value))

    def _apply_theme(self, theme: str | None) -> None:
        """Apply a theme; None: the one of the settings."""
        if theme is None:
            row = next((row for row in self.link.settings.rows() if row.name == "theme"), None)
            theme = row.value if row is not None else None
        if theme is not None:
            self.console.preferences.apply_theme(theme)


def _outcome(row: SettingRow) -> str:
    """Return the outcome of a save."""
    if row.wins:
        return f"{row.name} saved; {row.wins} overrides it."
    what = f"{row.name} reset to its default" if row.saved is None else f"{row.name} saved"
    return f"{what}, applies {USED[row.when]}." if row.waits else f"{what} and applied."
