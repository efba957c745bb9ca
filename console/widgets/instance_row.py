"""The row of instances: how each one is, which one is in view. Each can be clicked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content
from textual.style import Style

from console.screens.base import ConsoleRow
from console.standing import Standing
from console.widgets import text
from console.widgets.glyphs import fitted
from console.widgets.states import State, model_state
from engine.snapshot import Snapshot

if TYPE_CHECKING:
    from console.attached_app import AttachedApp

_REACH = {
    "connecting": State("◌", "connecting", "$worker-loading"),
    "lost": State("✖", "lost", "$worker-failed"),
    "refused": State("✖", "refused", "$worker-failed"),
}
_GAP = 3


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """One instance, as far as its row tells."""

    name: str
    state: State
    in_view: bool


def instance_state(standing: Standing, snapshot: Snapshot) -> State:
    """How the connection is where that is not well, else how the model is."""
    if standing.silent_s:
        return State("◌", f"no data for {standing.silent_s} s", "$worker-failed")
    return _REACH.get(standing.reach) or model_state(snapshot.status.state)


class InstanceRow(ConsoleRow):
    """One row, above the footer."""

    DEFAULT_CSS = """
    InstanceRow {
        height: 1; width: 1fr; padding: 0 1; dock: bottom; margin-bottom: 1; background: $panel;
        link-style: none; link-color: $foreground; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, app: AttachedApp) -> None:
        super().__init__()
        self._instances = app.readings
        self._readings: Sequence[InstanceReading] = ()

    def show(self) -> None:
        """As they are now."""
        readings = self._instances()
        if readings != self._readings:
            self._readings = readings
            self.refresh()

    def render(self) -> Content:
        """All of them, names giving way."""
        return fitted(self.app, instance_row(self._readings, self.size.width))


def instance_row(readings: Sequence[InstanceReading], width: int) -> Content:
    """The row in `width` cells; the one in view is always on it."""
    for longest in (32, 21, 14, 8):
        pieces = [_piece(number, reading, longest) for number, reading in enumerate(readings)]
        if sum(piece.cell_length for piece in pieces) + _GAP * (len(pieces) - 1) <= width:
            return Content(" " * _GAP).join(pieces)
    here = next((number for number, reading in enumerate(readings) if reading.in_view), 0)
    kept = [_piece(here, readings[here], 21)] if readings else []
    more = Content.styled(f"and {text.plural(len(readings) - 1, 'other')}, I goes on", "$muted")
    return Content(" " * _GAP).join([*kept, more])


def _piece(number: int, reading: InstanceReading, longest: int) -> Content:
    name = text.clip(reading.name, longest)
    if reading.in_view:
        shown = Content.styled(f" {name} ", "bold $background on $primary")
    else:
        shown = Content(f" {name} ").stylize(Style.from_meta({"@click": f"app.view({number})"}))
    return Content.assemble(shown, " ", reading.state.content)
