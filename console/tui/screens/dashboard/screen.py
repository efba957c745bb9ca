"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.dom import DOMNode

from console.tui.keymap import API_SWITCH, KNOBS, READOUT
from console.tui.screens.dashboard.panels import DashboardPanel, Place, discover
from console.tui.screens.dashboard.panels.advice import AdvisedScreen
from console.tui.screens.dashboard.panels.devices import DevicesPanel, is_many
from console.tui.screens.dashboard.panels.requests import RequestsPanel
from console.tui.screens.dashboard.panels.throughput import ThroughputPanel
from console.tui.screens.dashboard.panels.workers import WorkersPanel
from console.tui.screens.devices.screen import DevicesScreen
from console.tui.screens.requests.row_actions import RequestActions
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.view import View
from console.tui.widgets.graph import Graph
from console.tui.widgets.panel import after_layout
from engine.snapshot import RequestRow, Second

if TYPE_CHECKING:
    from console.tui.screens.requests.screen import RequestsScreen

_QUIET_S = 60


class DashboardScreen(RequestActions, AdvisedScreen):
    """The dashboard's keys and panels."""

    MODE = "dashboard"
    AUTO_FOCUS = "#request-table"
    idle_s: ClassVar[int] = 2
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
        *READOUT,
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Change the time range of the graphs"),
        Binding("g", "group", "Group", id="request.group", tooltip="Show the requests grouped by client", show=False),
        Binding(
            "escape",
            "newest",
            "Newest",
            id="request.newest",
            tooltip="Show the newest requests and graph values",
            show=False,
        ),
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

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to show a worker where there is one."""
        return super().key_states(view) | {"worker.open": bool(view.snapshot.workers)}

    def on_resize(self) -> None:
        """Devices take another form, of another height."""
        after_layout(self, self._fit_devices)

    def _fit_devices(self) -> None:
        for panel in self.query(DevicesPanel):
            panel.fit()

    def update_body(self, view: View) -> None:
        """Hand the view on to the panels."""
        many = is_many(view.snapshot.devices)
        self.set_class(many, "-many")
        for panel in self.query(DashboardPanel):
            panel.show(view)
        has_graphs = not (many or self.has_class("-narrow") or self.query_one(RequestsPanel).table.rows)
        self.set_class(has_graphs and is_quiet(view.snapshot.history), "-quiet")

    def on_workers_panel_opened(self, event: WorkersPanel.Opened) -> None:
        """Enter on a worker, or two clicks."""
        self.app.push_screen(WorkerScreen(event.worker))

    def on_requests_panel_opened(self, event: RequestsPanel.Opened) -> None:
        """Show the request: Enter, or two clicks."""
        self.open_request(event.row)

    def action_inspect(self) -> None:
        """Look at the worker under the cursor, or the first one."""
        table = self.query_one(WorkersPanel).table
        if table.rows:
            table.action_choose()
        else:
            hint = "" if self.console.view.is_read_only else " Press 2 to load a model."
            self.notify(f"No worker yet.{hint}", severity="warning")

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

    def on_graph_pointed(self, event: Graph.Pointed) -> None:
        """Show the same moment in every graph."""
        for panel in self.query(DashboardPanel):
            panel.point(event.at)

    def action_newest(self) -> None:
        """Choose no request, show the first ones, and the values of now in the graphs."""
        self.query_one(RequestsPanel).table.let_go()
        self.post_message(Graph.Pointed(None))
        self.offer_keys()

    def action_toggle_ended(self) -> None:
        """Show the requests that ended below the live ones, or hide them."""
        panel = self.query_one(RequestsPanel)
        panel.toggle_ended()
        panel.show(self.console.view)

    def opens_request(self, node: DOMNode) -> bool:
        """Return whether Enter there opens a request, and no worker."""
        return node is self.query_one(RequestsPanel).table

    @property
    def chosen_request(self) -> RequestRow | None:
        """The request under the cursor."""
        return self.query_one(RequestsPanel).chosen

    def show_client(self, client: str) -> None:
        """Show the requests of that client on the Requests screen."""
        self._open_requests().show_client(client)

    def action_group(self) -> None:
        """Show the requests by client on the Requests screen."""
        self._open_requests().show_clients()

    def _open_requests(self) -> RequestsScreen:
        from console.tui.screens.requests.screen import RequestsScreen

        self.console.action_open("requests")
        screen = self.app.screen_stack[0]
        assert isinstance(screen, RequestsScreen)
        return screen


def is_quiet(history: Sequence[Second]) -> bool:
    """Return whether there was no request for a minute, so that graphs may have the room of the requests."""
    return not any(second.running + second.queued for second in history[-_QUIET_S:])
