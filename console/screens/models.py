"""Models: what is on this machine, loading with every phase in sight, unloading."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from console.link import ApiStatus
from console.screens.base import ConsoleScreen
from console.widgets.model_details import ModelDetails
from console.widgets.model_load import ModelLoad
from console.widgets.model_table import ModelTable
from engine.errors import EngineError
from engine.snapshot import Snapshot


class ModelsScreen(ConsoleScreen):
    """A table of models; beside it the selected one and the engine's state."""

    MODE = "models"
    AUTO_FOCUS = "ModelTable"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_load", "Cancel load", id="models.cancel", tooltip="Cancel the load under way"),
        Binding("u", "unload", "Unload", id="models.unload", tooltip="Let requests end, then unload the model"),
        Binding("r", "rescan", "Rescan", id="models.rescan", tooltip="Look for models again"),
        Binding("o", "other", "Other", id="models.other", tooltip="Load a folder or a hub id by name"),
        Binding("escape", "leave", "Leave", id="models.leave", tooltip="Leave the box", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._loaded: str | None = None

    def compose_body(self) -> ComposeResult:
        """Table and box on the left, details on the right (below, where it is narrow)."""
        with Horizontal(id="models"):
            with Vertical(id="found"):
                yield ModelTable()
                yield Input(placeholder="A folder, or a hub id such as org/name. Enter loads it.", id="other")
            with Vertical(id="about"):
                yield ModelLoad()
                yield ModelDetails()

    def on_mount(self) -> None:
        """Look once."""
        self.action_rescan()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """The engine's state, and which row is loaded."""
        self.query_one(ModelLoad).show(snapshot)
        status = snapshot.status
        loaded = str(status.spec.path) if status.spec and status.state not in ("unloaded", "failed") else None
        if loaded != self._loaded:
            self._loaded = loaded
            self.query_one(ModelTable).mark(loaded)

    def action_rescan(self) -> None:
        """Look for models again."""
        self.run_worker(self._scan(), group="scan", exclusive=True, exit_on_error=False)

    async def _scan(self) -> None:
        table = self.query_one(ModelTable)
        table.loading = not table.row_count
        try:
            entries = await self.link.list_models()
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        finally:
            table.loading = False
        table.show(entries, self._loaded)
        if table.selected is not None:
            self.query_one(ModelDetails).show(table.selected)

    def on_model_table_selected(self, event: ModelTable.Selected) -> None:
        """Describe it."""
        self.query_one(ModelDetails).show(event.entry)

    def on_model_table_load_asked(self, event: ModelTable.LoadAsked) -> None:
        """Load it, unless it is known that this cannot work."""
        if event.entry.problem:
            self.notify(f"{event.entry.name}: {event.entry.problem}", severity="error", markup=False)
        else:
            self._load(str(event.entry.path) if event.entry.name != "demo" else "demo")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Load what was typed."""
        if name := event.value.strip():
            self._load(name)
            self.action_leave()

    def action_other(self) -> None:
        """Type a name."""
        self.query_one("#other", Input).focus()

    def action_leave(self) -> None:
        """Back to the table."""
        self.query_one(ModelTable).focus()

    def action_cancel_load(self) -> None:
        """Stop the load or download under way."""
        if self.link.snapshot().status.state == "loading":
            self.perform(self.link.cancel_load())
        else:
            self.notify("Nothing is loading.", severity="warning")

    def action_unload(self) -> None:
        """Drain and unload."""
        if self.link.snapshot().status.state == "unloaded":
            self.notify("No model is loaded.", severity="warning")
        else:
            self.perform(self.link.unload(), done="The model is unloaded")

    def _load(self, name: str) -> None:
        self.perform(self.link.load(name), done=f"{name.rpartition('/')[2]} is ready")
