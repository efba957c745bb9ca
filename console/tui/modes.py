"""The screens of the console, in the order of their digits. A screen is imported when it is first opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from console.tui.screens.base import ConsoleScreen


@dataclass(frozen=True, slots=True)
class Mode:
    """One screen: `module` and `screen` say where its class is; `digit` and F<digit> open it.

    short: its name on a tab where there is no room for the title; "" is the title.
    """

    name: str
    digit: str
    title: str
    module: str
    screen: str
    short: str = ""

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
    Mode("dashboard", "1", "Dashboard", "console.tui.screens.dashboard.screen", "DashboardScreen", "Dash"),
    Mode("models", "2", "Models", "console.tui.screens.models.screen", "ModelsScreen"),
    Mode("chat", "3", "Chat", "console.tui.screens.chat.screen", "ChatScreen"),
    Mode("requests", "4", "Requests", "console.tui.screens.requests.screen", "RequestsScreen", "Reqs"),
    Mode("tune", "5", "Tune", "console.tui.screens.tune.screen", "TuneScreen"),
    Mode("api", "6", "API", "console.tui.screens.api.screen", "ApiScreen"),
    Mode("logs", "7", "Logs", "console.tui.screens.logs.screen", "LogsScreen"),
    Mode("settings", "8", "Settings", "console.tui.screens.settings.screen", "SettingsScreen", "Set"),
)
