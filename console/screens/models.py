"""Models: what is on this machine and whether it fits; loading it phase by phase, beside others or in their place."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.timer import Timer
from textual.widgets import Input

from console.in_view import first, viewed
from console.link import ApiStatus
from console.screens.adapters import AdaptersScreen
from console.screens.base import ConsoleScreen
from console.widgets.model_details import Fit, ModelDetails
from console.widgets.model_load import ModelLoad
from console.widgets.model_table import ModelTable
from engine.errors import EngineError
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelState, ModelStatus, Snapshot

SETTLE_S = 0.2
"""How long selection and knobs are to rest before the fit is computed anew."""


class ModelsScreen(ConsoleScreen):
    """A table of models; beside it the engine's models and the selected one."""

    MODE = "models"
    AUTO_FOCUS = "ModelTable"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_load", "Cancel", id="models.cancel", tooltip="Cancel the load under way"),
        Binding(
            "u",
            "unload",
            "Unload",
            id="models.unload",
            tooltip="Let requests end, then unload the selected model, else the one in view",
        ),
        Binding("r", "rescan", "Rescan", id="models.rescan", tooltip="Look for models again", show=False),
        Binding("o", "other", "Other", id="models.other", tooltip="Load a folder or a hub id by name"),
        Binding(
            "d", "adapters", "Adapters", id="models.adapters", tooltip="Attach or detach LoRA adapters", show=False
        ),
        Binding("escape", "leave", "Leave", id="models.leave", tooltip="Leave the box", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, ModelState] = {}
        self._asked: object = None
        self._fit: Fit = None
        self._settling: Timer | None = None

    def compose_body(self) -> ComposeResult:
        """Table and box on the left, details on the right (below, where it is narrow)."""
        with Horizontal(id="models"):
            with Vertical(id="found"):
                yield ModelTable()
                yield Input(placeholder="A folder, or a hub id such as org/name. Enter loads it.", id="other")
            with VerticalScroll(id="about"):
                yield ModelLoad()
                yield ModelDetails()

    def on_mount(self) -> None:
        """Look once."""
        self.action_rescan()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """The engine's state, and which rows are loaded."""
        self.query_one(ModelLoad).show(snapshot)
        loaded = {str(status.spec.path): status.state for status in _held(snapshot) if status.spec is not None}
        if loaded != self._loaded:
            self._loaded = loaded
            self.query_one(ModelTable).mark(loaded)
        self._ask(snapshot)

    def action_rescan(self) -> None:
        """Look for models again, and at what the devices have free."""
        self._asked = None
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
        self._ask(self.console.snapshot())

    def on_model_table_selected(self, event: ModelTable.Selected) -> None:
        """Describe it."""
        self._ask(self.console.snapshot())

    # -- whether it fits ---------------------------------------------------------------------------------------------

    def _ask(self, snapshot: Snapshot) -> None:
        """Describe the selected model; find out anew whether it fits where that may have changed."""
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        asked = (entry, snapshot.target_workers, snapshot.max_prompts, tuple(self._loaded.items()))
        if asked == self._asked:
            return
        self._asked, self._fit = asked, None
        self._describe()
        if self._settling is not None:
            self._settling.stop()
        if not entry.problem:
            self._settling = self.set_timer(SETTLE_S, lambda: self._find_out(entry, snapshot))

    def _find_out(self, entry: ModelEntry, snapshot: Snapshot) -> None:
        work = self._estimate(entry, snapshot.target_workers, snapshot.max_prompts)
        self.run_worker(work, group="estimate", exclusive=True, exit_on_error=False)

    async def _estimate(self, entry: ModelEntry, workers: int, max_prompts: int) -> None:
        asked = self._asked
        try:
            fit: Fit = await self.link.estimate(_name(entry), workers=workers, max_prompts=max_prompts)
        except EngineError as error:
            fit = error.message
        if asked == self._asked:
            self._fit = fit
            self._describe()

    def _describe(self) -> None:
        entry = self.query_one(ModelTable).selected
        if entry is not None:
            self.query_one(ModelDetails).show(entry, self._fit, _hint(self.link.snapshot()))

    def on_resize(self) -> None:
        """Less is said where there is less room."""
        self.call_after_refresh(self._describe)

    # -- loading -----------------------------------------------------------------------------------------------------

    def on_model_table_load_asked(self, event: ModelTable.LoadAsked) -> None:
        """Load it, unless it is known that this cannot work."""
        if event.entry.problem:
            self.notify(f"{event.entry.name}: {event.entry.problem}", severity="error", markup=False)
        else:
            self._load(_name(event.entry), beside=event.beside)

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
        snapshot = self.link.snapshot()
        if any(status.state == "loading" for status in (snapshot.status, *_held(snapshot))):
            self.perform(self.link.cancel_load())
        else:
            self.notify("Nothing is loading.", severity="warning")

    def action_unload(self) -> None:
        """Drain and unload the selected model, where it is loaded; else the one in view."""
        snapshot, entry = self.console.snapshot(), self.query_one(ModelTable).selected
        selected = next((model for model in snapshot.models if entry and _is_of(model.status, entry)), None)
        name = selected.name if selected is not None else self.console.viewed_model
        shown = name or (snapshot.status.spec.name if snapshot.status.spec is not None else "The model")
        if not _held(snapshot) and snapshot.status.state == "unloaded":
            self.notify("No model is loaded.", severity="warning")
        else:
            self.perform(self.link.unload(name if len(snapshot.models) > 1 else ""), done=f"{shown} is unloaded")

    def action_adapters(self) -> None:
        """The adapters of the model in view."""
        model = viewed(self.link.snapshot(), self.console.viewed_key)
        if model is None or model.status.state not in ("ready", "idle"):
            self.notify("Load a model first: adapters are attached to one that serves.", severity="warning")
        else:
            self.app.push_screen(AdaptersScreen(model.key))

    def _load(self, name: str, *, beside: bool = False) -> None:
        self.perform(self.link.load(name, beside=beside), done=f"{name.rpartition('/')[2]} is ready")


def _held(snapshot: Snapshot) -> list[ModelStatus]:
    """The models that are there, or on their way."""
    found = [model.status for model in snapshot.models] or [snapshot.status]
    return [status for status in found if status.spec is not None and status.state not in ("unloaded", "failed")]


def _is_of(status: ModelStatus, entry: ModelEntry) -> bool:
    return status.spec is not None and status.spec.path == entry.path


def _name(entry: ModelEntry) -> str:
    """What the engine is to load."""
    return str(entry.path) if entry.name != "demo" else "demo"


def _hint(snapshot: Snapshot) -> str:
    """What the keys do with the selected model."""
    held = _held(snapshot)
    if not held:
        return "Enter loads it"
    model = first(snapshot)
    spec = model.status.spec if model is not None else held[0].spec
    replaced = spec.name if spec is not None else "the model"
    return f"Enter loads it in place of {replaced}, b beside it"
