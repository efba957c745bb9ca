"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from console.adviser import Look, Open, Turn
from console.tui.keymap import INSIGHT, ConsoleBinding
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.dashboard.panels import DashboardPanel, Place, discover
from console.tui.screens.dashboard.panels.advice import AdvicePanel, first_actionable
from console.tui.screens.dashboard.panels.devices import DevicesPanel, is_many
from console.tui.screens.dashboard.panels.requests import RequestsPanel
from console.tui.screens.dashboard.panels.throughput import ThroughputPanel
from console.tui.screens.dashboard.panels.workers import WorkersPanel
from console.tui.screens.requests.detail import RequestScreen
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.view import View


class DashboardScreen(ConsoleScreen):
    """The dashboard's keys and panels."""

    MODE = "dashboard"
    AUTO_FOCUS = "#request-table"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "x,delete",
            "cancel",
            "Cancel",
            id="request.cancel",
            mutates=True,
            tooltip="Cancel the selected request",
            key_display="x",
        ),
        Binding("i", "inspect", "Worker", id="worker.open", tooltip="Show the selected worker"),
        replace(INSIGHT, show=True),
        ConsoleBinding(
            "t",
            "take_advice",
            "Advice",
            id="advice.take",
            mutates=True,
            tooltip="Apply the advice: change the knob that it names",
        ),
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
            self.notify("There is no worker yet. Press 2 to load a model.", severity="warning")

    def action_zoom(self) -> None:
        """Another span in the graphs."""
        panel = self.query_one(ThroughputPanel)
        panel.zoom()
        panel.show(self.console.view)

    def action_newest(self) -> None:
        """Choose no request, and show the first ones."""
        self.query_one(RequestsPanel).table.let_go()

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        key = self.query_one(RequestsPanel).table.cursor_key
        self.cancel_request(next((row for row in self.console.view.published.requests if row.id == key), None))

    # -- advice --------------------------------------------------------------------------------------------------------

    def action_take_advice(self, index: int | None = None) -> None:
        """Do what the first advice says, or that one: turn the knob, or go where it can be changed."""
        advice = self.query_one(AdvicePanel).advice
        at = first_actionable(advice) if index is None else index
        if at is None or at >= len(advice):
            return
        match advice[at].action:
            case Turn(knob=knob, by=by):
                self.console.adviser.follow(advice[at])
                self.console.action_step(knob, by)
            case Open(mode=mode):
                self.console.action_open(mode)
            case Look(worker=worker):
                self.app.push_screen(WorkerScreen(worker))
        self.query_one(AdvicePanel).show(self.console.view)

    def action_dismiss_advice(self, index: int = 0) -> None:
        """Dismiss the first advice, or that one, for this session."""
        advice = self.query_one(AdvicePanel).advice
        if index < len(advice):
            self.console.adviser.dismiss(advice[index])
            self.query_one(AdvicePanel).show(self.console.view)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Advice can be taken and dismissed where there is any."""
        if action not in ("take_advice", "dismiss_advice") or not self.is_mounted:
            return True
        advice = self.query_one(AdvicePanel).advice
        return bool(advice) if action == "dismiss_advice" else first_actionable(advice) is not None
