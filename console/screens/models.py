"""Models: what is on this machine and whether it fits; loading it with values of its own, beside others or in place."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Input

from console.in_view import viewed
from console.link import ApiStatus
from console.links.models import NOTHING
from console.screens.adapters import AdaptersScreen
from console.screens.base import ConsoleScreen
from console.screens.compare import CompareScreen
from console.screens.confirm import ConfirmScreen
from console.screens.load import How, LoadScreen
from console.widgets import text
from console.widgets.hub_box import HubBox
from console.widgets.load_form_view import LoadFormView
from console.widgets.model_hints import held, hint, is_broken, is_of, unfinished_of
from console.widgets.model_load import ModelLoad
from console.widgets.model_panel import Edits, ModelPanel, called
from console.widgets.model_table import ModelTable
from console.widgets.table import Table
from engine.errors import EngineError, LoadCancelled
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelReading, ModelState, Snapshot


class ModelsScreen(ConsoleScreen):
    """A table of models; beside it the engine's models and the selected one with its form."""

    MODE = "models"
    AUTO_FOCUS = "ModelTable"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "edit", "Settings", id="models.edit", tooltip="Change what the selected model is loaded with"),
        Binding("slash", "search", "Search", id="models.search", tooltip="Search the models", key_display="/"),
        Binding("v", "compare", "Compare", id="models.compare", tooltip="Compare the two marked models"),
        Binding("c", "cancel_load", "Cancel", id="models.cancel", tooltip="Cancel the load or download under way"),
        Binding(
            "u",
            "unload",
            "Unload",
            id="models.unload",
            tooltip="Let requests end, then unload the selected model, else the one in view",
        ),
        Binding(
            "R",
            "forget",
            "Reset",
            id="models.forget",
            tooltip="Forget what the selected model was loaded with",
            show=False,
        ),
        Binding("r", "rescan", "Rescan", id="models.rescan", tooltip="Look for models again", show=False),
        Binding("o", "other", "Other", id="models.other", tooltip="Load a folder or a hub id by name"),
        Binding(
            "d", "adapters", "Adapters", id="models.adapters", tooltip="Attach or detach LoRA adapters", show=False
        ),
        Binding("escape", "leave", "Leave", id="models.leave", tooltip="Leave box and search", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, ModelState] = {}
        self._marked: tuple[str, ...] = ()
        self._edits: Edits = {}
        self._scans = 0

    def compose_body(self) -> ComposeResult:
        """Table and boxes on the left, details on the right (below, where it is narrow)."""
        with Horizontal(id="models"):
            with Vertical(id="found"):
                yield ModelTable()
                yield Input(placeholder="Name, architecture or quantisation. Enter keeps, esc ends it.", id="search")
                yield HubBox()
            with VerticalScroll(id="about"):
                yield ModelLoad()
                yield ModelPanel(self._edits)

    def on_mount(self) -> None:
        """Look once."""
        self.action_rescan()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """The engine's state, and which rows are loaded. Where no command is taken, there is no box for a name."""
        self.query_one(HubBox).display = not self.console.standing.read_only
        self.query_one(ModelLoad).show(snapshot, self.link.models.fetching())
        loaded = {str(status.spec.path): status.state for status in held(snapshot) if status.spec is not None}
        if loaded != self._loaded:
            self._loaded = loaded
            self.query_one(ModelTable).mark(loaded, self._marked)
        self._describe(snapshot)

    def action_rescan(self) -> None:
        """Look for models again, and at what the devices have free."""
        self.run_worker(self._scan(), group="scan", exclusive=True, exit_on_error=False)

    async def _scan(self) -> None:
        try:
            entries = await self.link.list_models()
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self._scans += 1
        self.query_one(ModelTable).fill(entries)
        self._describe(self.console.snapshot())

    # -- the selected model ------------------------------------------------------------------------------------------

    def on_table_moved(self, event: Table.Moved) -> None:
        """Describe it."""
        self._describe(self.console.snapshot())

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """A row that is clicked twice shows its form."""
        self.action_edit()

    def _describe(self, snapshot: Snapshot) -> None:
        """Show the selected model; its fit is found out anew where that may have changed."""
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        moment = (self._scans, snapshot.target_workers, snapshot.max_prompts, tuple(self._loaded.items()))
        words = hint(self.link.snapshot(), entry, read_only=self.console.standing.read_only)
        self.query_one(ModelPanel).show(entry, words, moment)

    def action_edit(self) -> None:
        """To the form: beside the table, or on a page of its own."""
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        if is_broken(entry):
            self._say_what_is_wrong(entry)
        elif self.has_class("-narrow"):
            self.app.push_screen(LoadScreen(entry, self._edits), self._edited)
        else:
            self.query_one(LoadFormView).focus()

    def _say_what_is_wrong(self, entry: ModelEntry) -> None:
        self.notify(f"{entry.name}: {entry.problem}", severity="error", markup=False)

    def _edited(self, how: How | None) -> None:
        """Back from the form's page."""
        if how == "forget":
            self.action_forget()
        elif how is not None:
            self.action_load_model(how == "beside")
        self.query_one(ModelPanel).price()

    def action_forget(self) -> None:
        """The form as the program's knobs and settings have it."""
        entry = self.query_one(ModelTable).selected
        if entry is not None:
            self._edits.pop(called(entry), None)
            self.perform(self._forget(entry), done=f"{entry.name} loads as the program is set")

    async def _forget(self, entry: ModelEntry) -> None:
        await self.link.models.forget(called(entry))
        self.query_one(ModelPanel).price()

    def action_search(self) -> None:
        """Type words."""
        box = self.query_one("#search", Input)
        box.add_class("-open")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search as it is typed."""
        if event.input.id == "search":
            self.query_one(ModelTable).search(event.value)

    def action_leave(self) -> None:
        """Back to the table, to all of its models where a search was being typed."""
        box = self.query_one("#search", Input)
        if box.has_focus or self.query_one(ModelTable).has_focus:
            box.value = ""
            box.remove_class("-open")
        self.query_one(ModelTable).focus()

    # -- two models --------------------------------------------------------------------------------------------------

    def action_mark(self) -> None:
        """Mark the selected model, or no longer; of three the first is let go."""
        table = self.query_one(ModelTable)
        if table.selected is None:
            return
        name = table.selected.name
        rest = tuple(each for each in self._marked if each != name)
        self._marked = rest if name in self._marked else (*rest, name)[-2:]
        table.mark(self._loaded, self._marked)

    def action_compare(self) -> None:
        """The two marked ones; the one that is marked and the selected one."""
        table = self.query_one(ModelTable)
        names = [*self._marked, *([table.selected.name] if table.selected is not None else [])]
        found = [entry for name in dict.fromkeys(names) if (entry := table.entry(name)) is not None]
        if len(found) < 2:
            self.notify("Mark a model with space, then select another one.", severity="warning")
        else:
            self.app.push_screen(CompareScreen(self.link.models, (found[0], found[1]), self._edits))

    # -- loading -----------------------------------------------------------------------------------------------------

    def action_load_model(self, beside: bool) -> None:
        """Load the selected one as its form says, unless it is known that this cannot work."""
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        if is_broken(entry):
            self._say_what_is_wrong(entry)
        else:
            self.perform(self._told(self._load(entry, beside=beside), f"{entry.name} is ready"))

    async def _load(self, entry: ModelEntry, *, beside: bool) -> None:
        """With what was changed here, else with what it was last loaded with."""
        models, name = self.link.models, called(entry)
        own = self._edits[name] if name in self._edits else await models.remembered(name)
        await models.load(name, own, beside=beside)
        self._edits.pop(name, None)
        self._scans += 1
        if entry.unfinished:
            self.action_rescan()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep what was found."""
        if event.input.id == "search":
            self.query_one(ModelTable).focus()

    def on_hub_box_asked(self, event: HubBox.Asked) -> None:
        """Load, or only fetch, what was typed."""
        if event.fetch_only:
            work, done = self.link.models.download(event.name), f"{event.name} is on this machine"
        else:
            work = self.link.models.load(event.name, NOTHING)
            done = f"{event.name.rpartition('/')[2]} is ready"
        self.perform(self._told(self._then_scan(work), done))
        self.action_leave()

    async def _then_scan(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self.action_rescan()

    async def _told(self, work: Coroutine[Any, Any, None], done: str) -> None:
        """Say what became of it; a load that was cancelled is none that failed."""
        try:
            await work
        except LoadCancelled as error:
            done = error.message
        self.notify(done, markup=False)

    def action_other(self) -> None:
        """Type a name."""
        self.query_one(HubBox).focus()

    def action_cancel_load(self) -> None:
        """Stop the load or download under way."""
        snapshot = self.link.snapshot()
        loading = any(status.state == "loading" for status in (snapshot.status, *held(snapshot)))
        if loading or self.link.models.fetching() is not None:
            self.perform(self.link.cancel_load())
        else:
            self.notify("Nothing is loading.", severity="warning")

    def action_unload(self) -> None:
        """Drain and unload the selected model, where it is loaded, else the one in view; ask where requests run."""
        snapshot, entry = self.console.snapshot(), self.query_one(ModelTable).selected
        if not held(snapshot) and snapshot.status.state == "unloaded":
            self.notify("No model is loaded.", severity="warning")
            return
        selected = next((model for model in snapshot.models if entry and is_of(model.status, entry)), None)
        model = selected or viewed(snapshot, self.console.viewed_key)
        spec = snapshot.status.spec
        shown = model.name if model is not None else spec.name if spec is not None else "The model"
        unfinished = unfinished_of(model, snapshot)
        if not unfinished:
            self._unload(model, shown)
            return
        self.app.push_screen(
            ConfirmScreen(
                f"{text.plural(unfinished, 'request')} of {shown} {'is' if unfinished == 1 else 'are'} not finished.",
                "They get time to end, then they are cut off. Unload?",
                yes="Unload",
                no="Keep",
            ),
            lambda sure: self._unload(model, shown) if sure else None,
        )

    def _unload(self, model: ModelReading | None, shown: str) -> None:
        several = model is not None and len(self.link.snapshot().models) > 1
        name = model.name if several and model is not None else ""
        self.perform(self.link.unload(name), done=f"{shown} is unloaded")

    def action_adapters(self) -> None:
        """The adapters of the model in view."""
        model = viewed(self.link.snapshot(), self.console.viewed_key)
        if model is None or model.status.state not in ("ready", "idle"):
            self.notify("Load a model first: adapters are attached to one that serves.", severity="warning")
        else:
            self.app.push_screen(AdaptersScreen(model.key))
