"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical

from console.link import ApiStatus
from console.screens.base import ConsoleScreen
from console.screens.worker import WorkerScreen
from console.widgets.devices import DevicesPanel
from console.widgets.requests import RequestsPanel
from console.widgets.session import SessionPanel
from console.widgets.throughput import ThroughputPanel
from console.widgets.workers import WorkersPanel
from engine.snapshot import Snapshot


class DashboardScreen(ConsoleScreen):
    """What is on and how well it goes."""

    MODE = "dashboard"
    AUTO_FOCUS = "#request-table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "x,delete", "cancel", "Cancel", id="request.cancel", tooltip="Cancel the selected request", key_display="x"
        ),
        Binding("i", "inspect", "Worker", id="worker.open", tooltip="Look closely at the selected worker"),
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Show a longer or shorter time in the graphs"),
    ]

    def compose_body(self) -> ComposeResult:
        """Left: what there is. Right: how it goes. Below: for whom."""
        with Container(id="overview"):
            with Vertical(id="machines"):
                yield DevicesPanel(id="devices")
                yield WorkersPanel(id="workers")
                yield SessionPanel(id="session")
            yield ThroughputPanel(id="throughput")
        yield RequestsPanel(id="requests-panel")

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """Hand the snapshot on to the panels."""
        self.query_one(DevicesPanel).show(snapshot.devices)
        self.query_one(WorkersPanel).show(snapshot)
        self.query_one(SessionPanel).show(snapshot)
        self.query_one(ThroughputPanel).show(snapshot)
        self.query_one(RequestsPanel).show(snapshot)

    def on_workers_panel_opened(self, event: WorkersPanel.Opened) -> None:
        """Enter on a worker, or two clicks."""
        self.app.push_screen(WorkerScreen(event.worker))

    def action_inspect(self) -> None:
        """Look at the worker under the cursor, or the first one."""
        table = self.query_one(WorkersPanel).table
        if table.rows:
            table.action_choose()
        else:
            self.notify("There is no worker yet. Press 2 to load a model.", severity="warning")

    def action_zoom(self) -> None:
        """Another span in the graphs."""
        panel = self.query_one(ThroughputPanel)
        panel.zoom()
        panel.show(self.link.snapshot())

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        key = self.query_one(RequestsPanel).table.cursor_key
        row = next((row for row in self.link.snapshot().requests if row.id == key), None)
        if row is None:
            self.notify("Choose a request with the arrow keys first.", severity="warning")
        elif row.state == "finished":
            self.notify(f"{row.id} has ended already.", markup=False)
        else:
            self.perform(self.link.cancel_request(row.id), done=f"Cancelled {row.id}")
