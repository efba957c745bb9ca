"""The bar of a replay: where one is, how fast it goes, what is there. It is clicked to go to a place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Label

from console.text import local_time
from console.tui.screens.base import ConsoleRow, Dialog, accept_key

if TYPE_CHECKING:
    from console.tui.replay_app import ReplayApp


# Where to go in a recording.

_HINT = "14:02, 14:02:11, 50%, +90 s from the start or -90 s from the end"


class GoToScreen(Dialog[float | None]):
    """Gives the unix time that was asked for. understood: that of what was typed, None for what is no time."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        accept_key("Go"),
        Binding("escape", "dismiss(None)", "Cancel", id="go_to.close", tooltip="Close without a jump"),
    ]

    def __init__(self, understood: Callable[[str], float | None]) -> None:
        super().__init__()
        self._understood = understood

    def compose(self) -> ComposeResult:
        """A box and what may be written in it."""
        with Vertical(classes="dialog go-to") as page:
            page.border_title = "Go to"
            yield Input(placeholder="14:02", id="time", compact=True)
            yield Label(_HINT, id="hint", markup=False)

    def action_accept(self) -> None:
        """Go, or say what would be understood."""
        at = self._understood(self.query_one(Input).value)
        if at is None:
            self.query_one("#hint", Label).update(f"Not a time: {_HINT}")
        else:
            self.dismiss(at)


_SHORTEST_BAR = 10


@dataclass(frozen=True, slots=True)
class PlayReading:
    """position, begins, ends: unix times."""

    position: float
    begins: float
    ends: float
    speed: float
    paused: bool

    @property
    def share(self) -> float:
        """How much of it lies before the position, 0..1."""
        whole_s = self.ends - self.begins
        return min(1.0, max(0.0, (self.position - self.begins) / whole_s)) if whole_s > 0 else 1.0


class ReplayBar(ConsoleRow):
    """The place in the recording, to be clicked."""

    def __init__(self, app: ReplayApp) -> None:
        super().__init__()
        self._replay = app

    def draw(self, width: int) -> Content:
        """Return the bar in `width` cells."""
        return replay_bar(self._replay.reading, width)

    def on_click(self, event: events.Click) -> None:
        """Go to the place that was clicked."""
        reading = self._replay.reading
        left, cells, _ = _parts(reading, self.size.width)
        place = event.get_content_offset(self)
        if place is not None and cells and left <= place.x < left + cells:
            share = (place.x - left + 0.5) / cells
            self._replay.go_to(reading.begins + share * (reading.ends - reading.begins))


def replay_bar(reading: PlayReading, width: int) -> Content:
    """The bar in `width` cells."""
    _, cells, labels = _parts(reading, width)
    state, clock, lasts = labels
    done = round(reading.share * cells)
    style = "$warning" if reading.paused else "$success"
    return Content.assemble(
        (state, f"bold {style}"),
        (clock, "bold $foreground"),
        " ",
        ("━" * done, "$primary"),
        ("─" * (cells - done), "$graph-axis"),
        (lasts, "$muted"),
    )


def _parts(reading: PlayReading, width: int) -> tuple[int, int, tuple[str, str, str]]:
    """Where the bar begins, how many cells it has, and what stands before and behind it."""
    ended = reading.position >= reading.ends
    word = "ended" if ended else "paused" if reading.paused else "playing"
    glyph = "■" if ended else "◇" if reading.paused else "▸"
    state = f"{glyph} {word} ×{reading.speed:g} ".ljust(15)
    clock = local_time(reading.position, "%Y-%m-%d %H:%M:%S")
    lasts = f" {_span(reading.position - reading.begins)} of {_span(reading.ends - reading.begins)}"
    for shown_clock, shown_lasts in ((clock, lasts), (clock[11:], lasts), (clock[11:], "")):
        left = len(state) + len(shown_clock) + 1
        cells = width - left - len(shown_lasts)
        if cells >= _SHORTEST_BAR:
            return left, cells, (state, shown_clock, shown_lasts)
    return 0, 0, (state, clock[11:], "")


def _span(seconds: float) -> str:
    """ "3:12", "1:03:12"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
