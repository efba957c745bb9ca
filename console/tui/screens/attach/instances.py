"""The instances that this console is attached to: how each one is, and going to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.style import Style

from console import text
from console.link.status import LinkStatus
from console.tui.screens.base import ConsoleRow, Dialog
from console.tui.view import View
from console.tui.widgets.states import State, model_state
from console.tui.widgets.table import Column, OpeningTable, Row, Table, cell
from engine.snapshot import Snapshot

if TYPE_CHECKING:
    from console.tui.attached_app import AttachedApp


# The row of instances: how each one is, which one is in view. Each can be clicked.

_REACH = {
    "connecting": State("◌", "connecting", "$worker-loading"),
    "lost": State("✖", "lost", "$worker-failed"),
    "refused": State("✖", "refused", "$worker-failed"),
}
_GAP = 3


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """One instance in one frame."""

    link_status: LinkStatus
    snapshot: Snapshot
    in_view: bool

    @property
    def name(self) -> str:
        """Host and port."""
        return self.link_status.name

    @property
    def state(self) -> State:
        """State of the connection where that is not well, else of the model."""
        if self.link_status.reach == "live" and self.link_status.silent_s:
            return State("◌", f"no data for {self.link_status.silent_s} s", "$worker-failed")
        return _REACH.get(self.link_status.reach) or model_state(self.snapshot.status.state)


class InstanceRow(ConsoleRow):
    """The instances, each to be clicked."""

    DEFAULT_CSS = """
    InstanceRow {
        link-style: none; link-color: $foreground; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, app: AttachedApp) -> None:
        super().__init__()
        self._app = app

    def draw(self, width: int) -> Content:
        """Return the row in `width` cells."""
        return instance_row(self._app.readings, width)


def instance_row(readings: Sequence[InstanceReading], width: int) -> Content:
    """The row in `width` cells; the one in view is always on it."""
    for longest in (32, 21, 14, 8):
        pieces = [_piece(number, reading, longest) for number, reading in enumerate(readings)]
        if sum(piece.cell_length for piece in pieces) + _GAP * (len(pieces) - 1) <= width:
            return Content(" " * _GAP).join(pieces)
    here = next((number for number, reading in enumerate(readings) if reading.in_view), 0)
    pieces = [_piece(here, readings[here], 21)] if readings else []
    more = Content.styled(f"and {text.plural(len(readings) - 1, 'other')}; I: next", "$muted")
    return Content(" " * _GAP).join([*pieces, more])


def _piece(number: int, reading: InstanceReading, longest: int) -> Content:
    name = text.clip(reading.name, longest)
    if reading.in_view:
        shown = Content.styled(f" {name} ", "bold $background on $primary")
    else:
        shown = Content(f" {name} ").stylize(Style.from_meta({"@click": f"app.view({number})"}))
    return Content.assemble(shown, " ", reading.state.content)


_COLUMNS = (
    Column("instance", 16, grow=16),
    Column("state", 12),
    Column("model", 14, grow=14, drop=1),
    Column("running", 7, "right", drop=3),
    Column("queued", 6, "right", drop=4),
    Column("out", 10, "right", drop=2),
)


class InstancesScreen(Dialog[None]):
    """Enter brings the instance under the cursor into view."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", id="instances.close", tooltip="Close the instances"),
    ]

    def compose(self) -> ComposeResult:
        """One table."""
        with Vertical(classes="dialog instances") as page:
            page.border_title = "Instances"
            yield OpeningTable(_COLUMNS, id="instance-table")

    def on_mount(self) -> None:
        """Never empty."""
        self.redraw()

    @property
    def console(self) -> AttachedApp:
        """The app, by its own type."""
        from console.tui.attached_app import AttachedApp

        assert isinstance(self.app, AttachedApp)
        return self.app

    def show_view(self, view: View) -> None:
        """Show a row for each instance."""
        self.query_one(Table).show([_row(number, each) for number, each in enumerate(self.console.readings)])

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Go there."""
        event.stop()
        self.dismiss()
        self.console.call_after_refresh(self.console.action_view, int(event.key))


def _row(number: int, reading: InstanceReading) -> Row:
    standing, snapshot, state = reading.link_status, reading.snapshot, reading.state
    name, shown = cell(standing.name, "bold"), cell(f"{state.glyph} {state.word}", state.style)
    if standing.stale:
        return Row(str(number), (name, shown, cell(standing.reason, "$muted")))
    model = "–" if snapshot.status.spec is None else snapshot.status.spec.name
    numbers = (str(snapshot.running), str(snapshot.queued), text.rate(snapshot.output_tokens_per_s))
    return Row(str(number), (name, shown, cell(model), *(cell(each, "$muted") for each in numbers)))
