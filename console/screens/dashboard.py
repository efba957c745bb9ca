"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical

from console.adviser import Look, Open, Turn
from console.keymap import INSIGHT
from console.link import ApiStatus
from console.screens.base import ConsoleScreen
from console.screens.worker import WorkerScreen
from console.widgets.advice import AdvicePanel, first_to_do
from console.widgets.devices import DevicesPanel, is_many
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
        replace(INSIGHT, show=True),
        Binding("t", "take_advice", "Advice", id="advice.take", tooltip="Take the advice: turn the knob it names"),
        Binding(
            "T",
            "dismiss_advice",
            "Dismiss advice",
            id="advice.dismiss",
            tooltip="Dismiss the first advice for this session",
            show=False,
        ),
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Show a longer or shorter time in the graphs"),
        Binding("escape", "newest", "Newest", id="request.newest", tooltip="Show the newest again", show=False),
    ]

    def compose_body(self) -> ComposeResult:
        """Left: what there is. Right: how it goes. Below: for whom, and what could be better."""
        yield DevicesPanel(id="many-devices")
        with Container(id="overview"):
            with Vertical(id="machines"):
                yield DevicesPanel(id="devices")
                yield WorkersPanel(id="workers")
                yield SessionPanel(id="session")
            yield ThroughputPanel(id="throughput")
        yield RequestsPanel(id="requests-panel")
        yield AdvicePanel(id="advice")

    def on_resize(self) -> None:
        """Devices take another form, of another height."""
        self.call_after_refresh(self._fit_devices)

    def _fit_devices(self) -> None:
        for panel in self.query(DevicesPanel):
            panel.fit()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """Hand the snapshot on to the panels."""
        many = is_many(snapshot.devices)
        self.set_class(many, "-many")
        self.query_one("#many-devices" if many else "#devices", DevicesPanel).show(snapshot)
        self.query_one(WorkersPanel).show(snapshot, self.console.standing)
        self.query_one(SessionPanel).show(snapshot)
        self.query_one(ThroughputPanel).show(snapshot)
        self.query_one(RequestsPanel).show(snapshot, api, self.console.standing)
        self._show_advice()

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

    def action_newest(self) -> None:
        """Choose no request, and show the first ones."""
        self.query_one(RequestsPanel).table.let_go()

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        key = self.query_one(RequestsPanel).table.cursor_key
        self.cancel_request(next((row for row in self.link.snapshot().requests if row.id == key), None))

    # -- advice --------------------------------------------------------------------------------------------------------

    def _show_advice(self) -> None:
        if self.query_one(AdvicePanel).show(self.console.adviser.said):
            self.refresh_bindings()

    def action_take_advice(self, index: int | None = None) -> None:
        """Do what the first advice says, or that one: turn the knob, or go where it can be changed."""
        said = self.query_one(AdvicePanel).said
        at = first_to_do(said) if index is None else index
        if at is None or at >= len(said):
            return
        match said[at].action:
            case Turn(knob=knob, by=by):
                self.console.adviser.taken(said[at])
                self.console.action_step(knob, by)
            case Open(mode=mode):
                self.console.action_open(mode)
            case Look(worker=worker):
                self.app.push_screen(WorkerScreen(worker))
        self._show_advice()

    def action_dismiss_advice(self, index: int = 0) -> None:
        """Hear no more of the first advice, or of that one."""
        said = self.query_one(AdvicePanel).said
        if index < len(said):
            self.console.adviser.dismiss(said[index])
            self._show_advice()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Advice can be taken and dismissed where there is any."""
        if action not in ("take_advice", "dismiss_advice") or not self.is_mounted:
            return True
        said = self.query_one(AdvicePanel).said
        return bool(said) if action == "dismiss_advice" else first_to_do(said) is not None
