"""ReplayApp: the console on a recording, with keys to pause it, to go through it and to change its speed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.binding import Binding
from textual.widgets import Input, TextArea

from console.link.recording.link import ReplayLink, time_of
from console.link.rpc import as_link
from console.tui.app import EricApp
from console.tui.keymap import ConsoleBinding
from console.tui.screens.attach.replay import PlayReading, ReplayBar
from console.tui.screens.base import ConsoleRow

_OWN = frozenset({"pause", "seek", "seek_end", "speed", "go_to"})


def _key(key: str, action: str, title: str, name: str, tooltip: str, *, shown: str = "", show: bool = False) -> Binding:
    """A key of the replay, which goes before those of tables and lists. Pausing is the main thing."""
    return ConsoleBinding(
        key,
        action,
        title,
        id=f"replay.{name}",
        tooltip=tooltip,
        show=show,
        priority=True,
        key_display=shown,
        primary=name == "pause",
    )


class ReplayApp(EricApp):
    """replay: the recording."""

    BINDINGS: ClassVar[list[Binding]] = [
        _key("space", "pause", "Pause", "pause", "Pause or resume the recording", shown="space", show=True),
        _key("left", "seek(-10)", "−10 s", "back", "Go back 10 seconds", shown="←", show=True),
        _key("right", "seek(10)", "+10 s", "on", "Go forward 10 seconds", shown="→", show=True),
        _key("shift+left", "seek(-60)", "−1 min", "back_minute", "Go back a minute"),
        _key("shift+right", "seek(60)", "+1 min", "on_minute", "Go forward a minute"),
        _key("home", "seek_end(False)", "Start", "start", "Go to the start of the recording"),
        _key("end", "seek_end(True)", "End", "end", "Go to the end of the recording"),
        _key("less_than_sign", "speed(-1)", "Slower", "slower", "Play slower", shown="<", show=True),
        _key("greater_than_sign", "speed(1)", "Faster", "faster", "Play faster", shown=">", show=True),
        _key("g", "go_to", "Go to", "go_to", "Go to a time", show=True),
    ]

    def __init__(self, replay: ReplayLink, **options: Any) -> None:
        self.replay = replay
        super().__init__(as_link(replay), **options)

    def on_mount(self) -> None:
        """Say at once where a recording ends too early."""
        if damage := self.replay.recording.damage:
            self.notify(damage, severity="warning", markup=False, timeout=10)

    @property
    def reading(self) -> PlayReading:
        """Where it is and how it goes."""
        head, recording = self.replay.playhead, self.replay.recording
        return PlayReading(self.replay.position, recording.begins, recording.ends, head.speed, head.paused)

    def extra_rows(self) -> Iterable[ConsoleRow]:
        """The bar."""
        return (ReplayBar(self),)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave keys to the field that has the focus."""
        if action in _OWN:
            return not isinstance(self.focused, Input | TextArea)
        return super().check_action(action, parameters)

    def go_to(self, at: float) -> None:
        """Show a unix time."""
        self.replay.playhead.seek(at, self.replay.now)
        self.refresh_screen()

    def action_pause(self) -> None:
        """Pause, or go on."""
        self.replay.playhead.toggle(self.replay.now)
        self.refresh_screen()

    def action_seek(self, by_s: int) -> None:
        """Go on by a number of seconds."""
        self.go_to(self.replay.position + by_s)

    def action_seek_end(self, last: bool) -> None:
        """To the start, or to the end."""
        self.go_to(self.reading.ends if last else self.reading.begins)

    def action_speed(self, by: int) -> None:
        """Faster or slower."""
        self.replay.playhead.change_speed(by, self.replay.now)
        self.refresh_screen()

    def action_go_to(self) -> None:
        """Ask for a time."""
        from console.tui.screens.attach.replay import GoToScreen

        if not isinstance(self.screen, GoToScreen):
            self.push_screen(GoToScreen(self._understood), lambda at: None if at is None else self.go_to(at))

    def _tick(self) -> None:
        """The bar goes on where nothing else does."""
        self.refresh_screen()

    def _understood(self, entered: str) -> float | None:
        reading = self.reading
        day = time.localtime(reading.begins)
        midnight = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, 0, 0, 0, 0, 0, -1))
        return time_of(entered, reading.begins, reading.ends, midnight)
