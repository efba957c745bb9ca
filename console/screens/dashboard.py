"""The dashboard."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Static

from console.link import ApiStatus
from console.screens.base import ConsoleScreen
from engine.snapshot import Snapshot


class DashboardScreen(ConsoleScreen):
    """Devices, workers, throughput and requests at a glance."""

    MODE = "dashboard"

    def compose_body(self) -> ComposeResult:
        """The panels."""
        yield Static("", id="body")

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """Hand the snapshot on to the panels."""
