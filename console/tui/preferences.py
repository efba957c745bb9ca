"""Themes and keys of the user, from files that are read again within a second of being saved."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from textual.app import App

from console.settings.config_file import WatchedFiles
from console.tui import binding_index
from console.tui.keys_file import KeysFile, check_keys, keys_path, read_keys
from console.tui.theme import (
    AUTO_THEME,
    DEFAULT_THEME,
    FEW_COLOURS_THEME,
    builtin_folder,
    load_themes,
    user_folder,
)

LOOK_S = 1.0
"""How often the files are looked at: one stat each."""


def is_remote_session(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal is on another machine and TEXTUAL_ANIMATIONS is not set."""
    return "SSH_CONNECTION" in environ and "TEXTUAL_ANIMATIONS" not in environ


class Preferences:
    """Those of one app. themes, keys: the folder and the file, a person's own by default."""

    def __init__(self, app: App[Any], themes: Path | None = None, keys: Path | None = None) -> None:
        self._app = app
        self._themes = themes or user_folder()
        self._keys = keys or keys_path()
        self._theme_files = WatchedFiles(self._themes)
        self._keys_file = WatchedFiles(self._keys)
        self._problems = self._register()
        self._chosen = AUTO_THEME

    @property
    def theme_name(self) -> str:
        """Name of the theme in use, as in the setting: "auto" where that was chosen."""
        return self._chosen if self._app.theme == self._theme_name(self._chosen) else self._app.theme

    def apply_theme(self, theme: str) -> None:
        """Apply a theme; "auto" is the default theme, or one of pure colours where a terminal has only 16."""
        self._chosen, name = theme, self._theme_name(theme)
        if name not in self._app.available_themes:
            self._problems.append(f"there is no theme called {name}")
            name = (
                DEFAULT_THEME if DEFAULT_THEME in self._app.available_themes else next(iter(self._app.available_themes))
            )
        self._app.theme = name

    def _theme_name(self, theme: str) -> str:
        if theme != AUTO_THEME:
            return theme
        return FEW_COLOURS_THEME if self._app.console.color_system in ("standard", "windows") else DEFAULT_THEME

    def start(self) -> None:
        """Once the app runs: show mistakes of the themes, use the keys, and watch the files.

        Over ssh there are no animations: every frame would be sent.
        """
        if is_remote_session(os.environ):
            self._app.animation_level = "none"
        self._notify("Themes", self._problems)
        self._use_keys()
        self._app.set_interval(LOOK_S, self.look)

    def look(self) -> None:
        """Read again what was saved."""
        if self._theme_files.changed():
            self._notify("Themes", self._register())
            self._app.mutate_reactive(App.theme)
        if self._keys_file.changed():
            self._use_keys()

    def _register(self) -> list[str]:
        """All themes that can be used; one that was there and has a mistake now stays as it was."""
        found = load_themes((builtin_folder(), self._themes))
        for theme in found.themes:
            self._app.register_theme(theme)
        return list(found.problems)

    def _use_keys(self) -> None:
        """At once; what is wrong with them takes longer to find out, for it asks every screen."""
        file = read_keys(self._keys)
        self._app.set_keymap(dict(file.keys))
        if file.keys or file.problems:
            self._app.run_worker(self._check(file), group="keys", exclusive=True, exit_on_error=False)

    async def _check(self, file: KeysFile) -> None:
        right = await asyncio.to_thread(
            lambda: check_keys(file, binding_index.all_bindings(), binding_index.can_conflict)
        )
        self._app.set_keymap(dict(right.keys))
        self._notify("Keys", [f"{self._keys.name}: {'; '.join(right.problems)}"] if right.problems else [])

    def _notify(self, title: str, problems: list[str]) -> None:
        if problems:
            self._app.notify("\n".join(problems), title=title, severity="warning", markup=False, timeout=10)
