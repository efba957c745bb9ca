"""Settings: every one, its value and where that came from."""

from __future__ import annotations

from console.screens.base import ConsoleScreen


class SettingsScreen(ConsoleScreen):
    """Settings: every one, its value and where that came from."""

    MODE = "settings"
