"""The screens of the console, in the order of their digits. A screen is imported when it is first opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from console.screens.base import ConsoleScreen


@dataclass(frozen=True, slots=True)
class Mode:
    """One screen: `module` and `screen` say where its class is; `digit` and F<digit> open it."""

    name: str
    digit: str
    title: str
    module: str
    screen: str

    @property
    def factory(self) -> Callable[[], ConsoleScreen]:
        """Makes the screen; imports it only then."""

        def make() -> ConsoleScreen:
            screen: ConsoleScreen = getattr(import_module(self.module), self.screen)()
            return screen

        return make


def import_screens() -> None:
    """Import what the screens need, so that a key that opens one for the first time need not; on any thread."""
    for mode in MODES:
        import_module(mode.module)


MODES: tuple[Mode, ...] = (
    Mode("dashboard", "1", "Dashboard", "console.screens.dashboard", "DashboardScreen"),
    Mode("models", "2", "Models", "console.screens.models", "ModelsScreen"),
    Mode("chat", "3", "Chat", "console.screens.chat", "ChatScreen"),
    Mode("requests", "4", "Requests", "console.screens.requests", "RequestsScreen"),
    Mode("tune", "5", "Tune", "console.screens.tune", "TuneScreen"),
    Mode("api", "6", "API", "console.screens.api", "ApiScreen"),
    Mode("logs", "7", "Logs", "console.screens.logs", "LogsScreen"),
    Mode("settings", "8", "Settings", "console.screens.settings", "SettingsScreen"),
)
