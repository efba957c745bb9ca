"""The instances that this console is attached to: how each one is, and going to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from console.link import EngineLink
from console.standing import standing_of
from console.widgets import text
from console.widgets.instance_row import instance_state
from console.widgets.table import Column, Row, Table, cell

if TYPE_CHECKING:
    from console.attached_app import AttachedApp

_COLUMNS = (
    Column("instance", 16, grow=16),
    Column("state", 12),
    Column("model", 14, grow=14, drop=1),
    Column("running", 7, "right", drop=3),
    Column("queued", 6, "right", drop=4),
    Column("out", 10, "right", drop=2),
)


class InstancesScreen(ModalScreen[None]):
    """Enter brings the instance under the cursor into view."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", id="instances.close", tooltip="Close the instances", show=False),
    ]

    def compose(self) -> ComposeResult:
        """One table."""
        with Vertical(classes="dialog instances") as page:
            page.border_title = "Instances"
            page.border_subtitle = "enter goes there, esc closes"
            yield Table(_COLUMNS, id="instance-table")

    def on_mount(self) -> None:
        """Never empty."""
        self.refresh_view()

    @property
    def console(self) -> AttachedApp:
        """The app, by its own type."""
        from console.attached_app import AttachedApp

        assert isinstance(self.app, AttachedApp)
        return self.app

    def refresh_view(self) -> None:
        """As they are now."""
        rows = [_row(number, link) for number, link in enumerate(self.console.links)]
        self.query_one(Table).show(rows)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Go there."""
        event.stop()
        self.dismiss()
        self.console.call_after_refresh(self.console.action_view, int(event.key))


def _row(number: int, link: EngineLink) -> Row:
    standing, snapshot = standing_of(link), link.snapshot()
    state = instance_state(standing, snapshot)
    name, shown = cell(standing.name, "bold"), cell(f"{state.glyph} {state.word}", state.style)
    if standing.stale:
        return Row(str(number), (name, shown, cell(standing.reason, "$muted")))
    model = "–" if snapshot.status.spec is None else snapshot.status.spec.name
    numbers = (str(snapshot.running), str(snapshot.queued), text.rate(snapshot.output_tokens_per_s))
    return Row(str(number), (name, shown, cell(model), *(cell(each, "$muted") for each in numbers)))
