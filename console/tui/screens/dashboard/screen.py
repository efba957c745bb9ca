"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from console.tui.keymap import API_SWITCH, DRAIN, KNOBS, READOUT
from console.tui.screens.dashboard.panels import DashboardPanel, Place, discover
from console.tui.screens.dashboard.panels.advice import AdvisedScreen
from console.tui.screens.dashboard.panels.devices import DevicesPanel, is_many
from console.tui.screens.dashboard.panels.requests import RequestsPanel
from console.tui.screens.dashboard.panels.throughput import ThroughputPanel
from console.tui.screens.dashboard.panels.workers import WorkersPanel
from console.tui.screens.devices.screen import DevicesScreen
from console.tui.screens.requests.detail import RequestScreen
from console.tui.screens.requests.row_actions import RequestActions
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.view import View
from console.tui.widgets.graph import Graph
from engine.snapshot import RequestRow


class DashboardScreen(RequestActions, AdvisedScreen):
    """The dashboard's keys and panels."""

    MODE = "dashboard"
    AUTO_FOCUS = "#request-table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "v",
            "toggle_ended",
            "Ended",
            id="request.ended",
            tooltip="Show ended requests, or only live ones",
            show=False,
        ),
        Binding("i", "inspect", "Worker", id="worker.open", tooltip="Show the selected worker"),
        Binding("d", "devices", "Devices", id="devices.open", tooltip="Show all device readings", show=False),
        *KNOBS,
        API_SWITCH,
        DRAIN,
        *READOUT,
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Change the time range of the graphs"),
        Binding("escape", "newest", "Newest", id="request.newest", tooltip="Show the newest requests", show=False),
    ]

    def compose_body(self) -> ComposeResult:
        """Yield every panel in its place. Ours: machines left, throughput right, requests and advice under both."""
        panels = discover()

        def at(place: Place) -> Iterator[DashboardPanel]:
            return (panel() for panel in panels if place == panel.PLACE)

        yield from at("top")
        with Container(id="overview"):
            with Container(id="left"):
                yield from at("left")
            with Container(id="right"):
                yield from at("right")
        yield from at("bottom")

    def on_resize(self) -> None:
        """Devices take another form, of another height."""
        self.call_after_refresh(self._fit_devices)

    def _fit_devices(self) -> None:
        for panel in self.query(DevicesPanel):
            panel.fit()

    def update_body(self, view: View) -> None:
        """Hand the view on to the panels."""
        self.set_class(is_many(view.snapshot.devices), "-many")
        for panel in self.query(DashboardPanel):
            panel.show(view)

    def on_workers_panel_opened(self, event: WorkersPanel.Opened) -> None:
        """Enter on a worker, or two clicks."""
        self.app.push_screen(WorkerScreen(event.worker))

    def on_requests_panel_opened(self, event: RequestsPanel.Opened) -> None:
        """Show the request: Enter, or two clicks."""
        self.app.push_screen(RequestScreen(event.row))

    def action_inspect(self) -> None:
        """Look at the worker under the cursor, or the first one."""
        table = self.query_one(WorkersPanel).table
        if table.rows:
            table.action_choose()
        else:
            self.notify("No worker yet. Press 2 to load a model.", severity="warning")

    def action_workers(self) -> None:
        """Open the only worker, or go to the table to choose one."""
        table = self.query_one(WorkersPanel).table
        if len(table.rows) > 1:
            table.focus()
        else:
            self.action_inspect()

    def action_devices(self) -> None:
        """Show all device readings."""
        self.app.push_screen(DevicesScreen())

    def action_zoom(self) -> None:
        """Another span in the graphs."""
        panel = self.query_one(ThroughputPanel)
        panel.zoom()
        panel.show(self.console.view)

    def action_readout(self, by: int) -> None:
        """Read the values of another moment in the graphs."""
        self.query_one("#tokens", Graph).move_cursor(by)

    def action_newest(self) -> None:
        """Choose no request, and show the first ones."""
        self.query_one(RequestsPanel).table.let_go()

    def action_toggle_ended(self) -> None:
        """Show the requests that ended below the live ones, or hide them."""
        panel = self.query_one(RequestsPanel)
        panel.toggle_ended()
        panel.show(self.console.view)

    @property
    def chosen_request(self) -> RequestRow | None:
        """The request under the cursor."""
        return self.query_one(RequestsPanel).chosen

    def show_client(self, client: str) -> None:
        """Show the requests of that client on the Requests screen."""
        from console.tui.screens.requests.screen import RequestsScreen

        self.console.action_open("requests")
        screen = self.app.screen_stack[0]
        assert isinstance(screen, RequestsScreen)
        screen.show_client(client)
