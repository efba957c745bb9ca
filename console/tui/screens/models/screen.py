"""Models: what is on this machine and whether it fits; loading it with values of its own, beside others or in place."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from console import text
from console.link.protocol import DRAIN_S
from console.settings.load_options import NO_OPTIONS
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import ConsoleScreen, Dialog
from console.tui.screens.dialogs import ConfirmScreen, FinishOrCut, FinishOrCutScreen, LineScreen
from console.tui.screens.models.adapters import AdaptersScreen
from console.tui.screens.models.comparison import CompareScreen
from console.tui.screens.models.form import LoadFormView
from console.tui.screens.models.loaded_models import ModelLoad
from console.tui.screens.models.panel import (
    Edits,
    ModelPanel,
    active_models,
    is_broken,
    is_loaded_from,
    load_target,
    selection_hint,
)
from console.tui.screens.models.table import NO_MATCH, ModelTable
from console.tui.view import View, num_waiting
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.table import Table
from engine.config import MAX_TIMEOUT_S
from engine.errors import EngineError, LoadCancelled
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelReading, ModelState

# The box that finds a model: in the table, or else a folder or a hub id.

_FIND = "Filter by name, architecture, quantisation or 7B"
_FIND_OR_LOAD = "Filter; or a folder or org/model: Enter loads, Ctrl+L downloads only"


class ModelBox(Input):
    """Filters the table; what no row matches is a name to be loaded, or only downloaded."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "ctrl+l,ctrl+t",
            "download",
            "Download only",
            id="models.download",
            mutates=True,
            tooltip="Download a hub id without loading it",
        ),
    ]

    @dataclass
    class Downloading(Message):
        """A name was typed that is to be downloaded."""

        name: str

    def __init__(self) -> None:
        super().__init__(placeholder=_FIND_OR_LOAD, id="search")

    def on_blur(self) -> None:
        """Where there is little room, it is shown only while it is typed in, or filters."""
        if not self.value:
            self.remove_class("-open")

    def action_download(self) -> None:
        """Download it."""
        if name := self.value.strip():
            self.post_message(self.Downloading(name))


def ask_value(app: App[Any], event: LoadFormView.Typing) -> None:
    """Have a value of the form typed."""
    event.stop()
    app.push_screen(LineScreen(event.title, event.line, accept="Use"), event.view.enter)


# The form of a load on a page of its own, where there is no room beside the table.

How = Literal["load", "beside", "forget"]


class LoadScreen(Dialog[How | None]):
    """The form of a load; its result is what to do with the model and the values in `edits`, None for nothing."""

    AUTO_FOCUS = "LoadFormView"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "R",
            "forget",
            "Reset",
            id="models.forget",
            mutates=True,
            tooltip="Reset the form to the default settings",
        ),
        Binding("escape", "dismiss", "Close", id="load.close", tooltip="Back to the models"),
    ]

    def __init__(self, entry: ModelEntry, edits: Edits) -> None:
        super().__init__()
        self._entry = entry
        self._edits = edits

    def compose(self) -> ComposeResult:
        """The panel alone."""
        with Vertical(classes="dialog load"):
            yield ModelPanel(self._edits)

    def on_mount(self) -> None:
        """Filled at once."""
        self.query_one(ModelPanel).show(self._entry, Content(""), None)

    def on_load_form_view_typing(self, event: LoadFormView.Typing) -> None:
        """Ask for the value."""
        ask_value(self.app, event)

    def action_load_model(self, beside: bool) -> None:
        """With these values."""
        self.dismiss("beside" if beside else "load")

    def action_forget(self) -> None:
        """Without any."""
        self.dismiss("forget")


_LOADING = frozenset({"models.load", "models.beside", "models.edit"})
"""Keys that a model which cannot be loaded does not offer."""


class ModelsScreen(ConsoleScreen):
    """A table of models; beside it the engine's models and the selected one with its form."""

    MODE = "models"
    AUTO_FOCUS = "ModelTable"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "edit", "Settings", id="models.edit", tooltip="Change the load settings of the selected model"),
        Binding(
            "slash,o",
            "search",
            "Find/load",
            id="models.search",
            tooltip="Find a model here, or load a folder or hub id by name",
            key_display="/",
        ),
        Binding("v", "compare", "Compare", id="models.compare", tooltip="Compare the two marked models", show=False),
        ConsoleBinding(
            "c",
            "cancel_load",
            "Cancel",
            id="models.cancel",
            mutates=True,
            tooltip="Cancel the running load or download",
        ),
        ConsoleBinding(
            "u",
            "unload",
            "Unload",
            id="models.unload",
            mutates=True,
            tooltip="Drain and unload the selected (or current) model",
        ),
        ConsoleBinding(
            "R",
            "forget",
            "Reset",
            id="models.forget",
            mutates=True,
            tooltip="Reset the form to the default settings",
            show=False,
        ),
        Binding("r", "rescan", "Rescan", id="models.rescan", tooltip="Rescan the model folders", show=False),
        Binding(
            "d", "adapters", "Adapters", id="models.adapters", tooltip="Attach or detach LoRA adapters", show=False
        ),
        Binding("escape", "leave", "Clear", id="models.leave", tooltip="Clear the box, show all models", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, ModelState] = {}
        self._marked: tuple[str, ...] = ()
        self._edits: Edits = {}
        self._scans = 0

    def compose_body(self) -> ComposeResult:
        """Table and box on the left, details on the right (below, where it is narrow)."""
        with Horizontal(id="models"):
            with Vertical(id="found"):
                yield ModelTable()
                yield ModelBox()
                yield Static(id="typed-problem", classes="-empty", markup=False)
            with VerticalScroll(id="about"):
                yield ModelPanel(self._edits)
                yield ModelLoad()

    def on_mount(self) -> None:
        """Look once."""
        self.action_rescan()

    def update_body(self, view: View) -> None:
        """The engine's state, and which rows are loaded."""
        self.query_one(ModelBox).placeholder = _FIND if view.is_read_only else _FIND_OR_LOAD
        snapshot = view.snapshot
        self.query_one(ModelLoad).show(
            snapshot,
            self.link.models.fetching(),
            read_only=view.is_read_only,
            starting=view.link_status.starting_text,
        )
        loaded = {str(status.spec.path): status.state for status in active_models(snapshot) if status.spec is not None}
        if loaded != self._loaded:
            self._loaded = loaded
            self.query_one(ModelTable).mark(loaded, self._marked)
        self._describe(view)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer what has a model to work on: one that can be loaded, one that is loaded, two to compare."""
        table, model = self.query_one(ModelTable), view.model
        entry, is_held = table.selected, bool(active_models(view.published))
        states: dict[str, bool | str] = dict.fromkeys(_LOADING, entry is not None and not is_broken(entry))
        return (
            super().key_states(view)
            | states
            | {
                "models.cancel": self._is_loading(view),
                "models.unload": is_held or view.snapshot.status.state != "unloaded",
                "models.adapters": model is not None and model.status.state in ("ready", "idle"),
                "models.forget": entry is not None,
                "models.mark": entry is not None,
                "models.compare": len(table.rows) > 1,
            }
        )

    def _is_loading(self, view: View) -> bool:
        """Return whether there is a load or a download to cancel."""
        statuses = (view.published.status, *active_models(view.published))
        return any(status.state == "loading" for status in statuses) or self.link.models.fetching() is not None

    def action_rescan(self) -> None:
        """Rescan the model folders, and at what the devices have free."""
        self.run_worker(self._scan(), group="scan", exclusive=True, exit_on_error=False)

    async def _scan(self) -> None:
        view = self.console.view
        if view.link_status.reach == "recording":
            self.query_one(ModelTable).fill((), none="A recording holds no list of models.")
            return
        try:
            entries = await self.link.list_models()
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self._scans += 1
        if view.is_read_only:
            self.query_one(ModelTable).fill(entries, none="No models found.", no_match=NO_MATCH)
        else:
            self.query_one(ModelTable).fill(entries)
        self._describe(self.console.view)

    # -- the selected model ------------------------------------------------------------------------------------------

    def on_table_moved(self, event: Table.Moved) -> None:
        """Describe it."""
        self._describe(self.console.view)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """A row that is clicked twice shows its form."""
        self.action_edit()

    def _describe(self, view: View) -> None:
        """Show the selected model; its fit is computed again where it may have changed."""
        self.offer_keys()
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        knobs = view.snapshot.target_workers, view.snapshot.max_prompts
        moment = (self._scans, *knobs, tuple(self._loaded.items()), view.link_status.calls)
        words = selection_hint(view.published, entry, read_only=view.is_read_only)
        self.query_one(ModelPanel).show(entry, words, moment)

    def on_load_form_view_typing(self, event: LoadFormView.Typing) -> None:
        """Ask for the value."""
        ask_value(self.app, event)

    def action_edit(self) -> None:
        """To the form: beside the table, or on a page of its own."""
        entry = self.query_one(ModelTable).selected
        if entry is None:
            return
        if is_broken(entry):  # the panel says why
            return
        if self.has_class("-narrow"):
            self.app.push_screen(LoadScreen(entry, self._edits), self._edited)
        else:
            self.query_one(LoadFormView).focus()

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
            self._edits.pop(load_target(entry), None)
            self.perform(self._forget(entry), done=f"{entry.name} loads with the default settings")

    async def _forget(self, entry: ModelEntry) -> None:
        await self.link.models.forget(load_target(entry))
        self.query_one(ModelPanel).price()

    def action_search(self) -> None:
        """Type words, or a name."""
        box = self.query_one(ModelBox)
        box.add_class("-open")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search as it is typed."""
        if event.input.id == "search":
            if event.value:  # not where it is emptied to load what was typed
                self._complain("")
            self.query_one(ModelTable).search(event.value)

    def action_leave(self) -> None:
        """Back to the table, to all of its models where a search was being typed."""
        box = self.query_one(ModelBox)
        if box.has_focus or self.query_one(ModelTable).has_focus:
            self._complain("")
            box.value = ""
            box.remove_class("-open")
        self.query_one(ModelTable).focus()

    def _complain(self, sentence: str) -> None:
        """Say why a typed name could not be loaded, until another is typed; "": no more."""
        line = self.query_one("#typed-problem", Static)
        line.set_class(not sentence, "-empty")
        line.update(for_terminal(self.app, Content(f"✖ {sentence}" if sentence else "")))

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
        if entry is None or is_broken(entry):
            return

        def load() -> None:
            self.perform(self._report_end(self._load(entry, beside=beside), f"{entry.name} is ready"))

        replaced = None if beside else self._replaced_by(entry.name)
        if replaced is not None and is_loaded_from(replaced.status, entry):  # a reload: no request is lost
            replaced = None
        self._confirm_replacing(replaced, entry.name, load)

    def _replaced_by(self, name: str) -> ModelReading | None:
        """The loaded model whose place a load of a model of that name takes."""
        models = self.console.view.published.models
        return next((model for model in models if model.name == name), models[0] if models else None)

    def _confirm_replacing(self, replaced: ModelReading | None, name: str, go: Callable[[], None]) -> None:
        """Ask before another model takes the place of one with unfinished requests."""
        if replaced is None or not replaced.running + replaced.queued:
            go()
            return
        question = ConfirmScreen(
            f"Replace {replaced.name}? It has {text.live_requests(replaced.running, replaced.queued)}.",
            f"Running ones finish first, queued ones move to {name}.\nb in the list loads in addition, if both fit.",
            yes="Replace",
            no="Cancel",
        )
        self.app.push_screen(question, lambda sure: go() if sure else None)

    async def _load(self, entry: ModelEntry, *, beside: bool) -> None:
        """With what was changed here, else with what it was last loaded with."""
        models, name = self.link.models, load_target(entry)
        own = self._edits[name] if name in self._edits else await models.remembered(name)
        await models.load(name, own, beside=beside)
        self._edits.pop(name, None)
        self._scans += 1
        if entry.unfinished:
            self.action_rescan()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep what was found; what was not found is loaded by its name."""
        if event.input.id != "search":
            return
        name, table = event.value.strip(), self.query_one(ModelTable)
        if not name or table.rows:
            table.focus()
        elif not self.console.refuses_changes():
            self._load_named(name)

    def _load_named(self, name: str) -> None:
        short = name.rstrip("/").rpartition("/")[2]
        self.action_leave()

        def load() -> None:
            work = self._typed(self.link.models.load(name, NO_OPTIONS))
            self.perform(self._report_end(work, f"{short} is ready"))

        self._confirm_replacing(self._replaced_by(short), short, load)

    def on_model_box_downloading(self, event: ModelBox.Downloading) -> None:
        """Download what was typed."""
        self.action_leave()
        work = self._typed(self.link.models.download(event.name))
        self.perform(self._report_end(work, f"{event.name} downloaded"))

    async def _typed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it for a name that was typed, and look again at what is there; why it failed stays beneath the box."""
        try:
            await work
        except LoadCancelled:
            raise
        except EngineError as error:
            self._complain(error.message)
            raise
        finally:
            self.action_rescan()

    async def _report_end(self, work: Coroutine[Any, Any, None], done: str) -> None:
        """Say what became of it; a load that was cancelled is none that failed."""
        try:
            await work
        except LoadCancelled as error:
            done = error.message
        self.notify(done, markup=False)

    def action_cancel_load(self) -> None:
        """Stop the load or download under way; ask first where requests wait for it."""
        view = self.console.view
        if not self._is_loading(view):
            self.notify("Nothing is loading.", severity="warning")
            return
        models = view.published.models
        ended = num_waiting(view.published) + sum(each.queued for each in models if each.status.state == "loading")
        if not ended:
            self._cancel_load()
            return
        question = ConfirmScreen(
            f"{text.plural(ended, 'request')} {'waits' if ended == 1 else 'wait'} for the load.",
            f"{'Its client gets' if ended == 1 else 'Their clients get'} an error. Cancel the load?",
            yes="Cancel the load",
            no="Keep loading",
        )
        self.app.push_screen(question, lambda sure: self._cancel_load() if sure else None)

    def _cancel_load(self) -> None:
        self.perform(self.link.cancel_load())

    def action_unload(self) -> None:
        """Drain and unload the selected model, where it is loaded, else the one in view; ask where requests run."""
        view, entry = self.console.view, self.query_one(ModelTable).selected
        snapshot = view.snapshot
        if not active_models(snapshot) and snapshot.status.state == "unloaded":
            self.notify(view.link_status.starting_text or "No model loaded.", severity="warning", markup=False)
            return
        selected = next((model for model in snapshot.models if entry and is_loaded_from(model.status, entry)), None)
        model = selected or view.model
        spec = snapshot.status.spec
        shown = model.name if model is not None else spec.name if spec is not None else "The model"
        counted, waiting = (model, model.waiting) if model is not None else (snapshot, 0)
        if not counted.running + counted.queued + waiting:
            self._unload(model, shown)
            return
        title = f"{shown}: {text.live_requests(counted.running, counted.queued, waiting)}."
        lost = "Those waiting for a load get an error."
        if not counted.running + counted.queued:
            sure = ConfirmScreen(title, f"{lost} Unload?", yes="Unload", no="Keep it")
            self.app.push_screen(sure, lambda yes: self._unload(model, shown) if yes else None)
            return
        drains = model is not None and model.status.state == "draining"
        question = FinishOrCutScreen(
            title,
            "Finish: new requests are refused; unloaded after the last one.\n"
            "Cut off: clients get an error instead of the rest." + (f"\n{lost}" if waiting else ""),
            finish="Finish them first",
            cut="Cut them off now",
            no="Keep waiting" if drains else "Keep it",
        )

        def answered(answer: FinishOrCut | None) -> None:
            if answer:
                self._unload(model, shown, drain_seconds=MAX_TIMEOUT_S if answer == "finish" else 0)

        self.app.push_screen(question, answered)

    def _unload(self, model: ModelReading | None, shown: str, *, drain_seconds: float = DRAIN_S) -> None:
        several = model is not None and len(self.console.view.published.models) > 1
        name = model.name if several and model is not None else ""
        self.perform(self.link.unload(name, drain_seconds=drain_seconds), done=f"{shown} unloaded")

    def action_adapters(self) -> None:
        """The adapters of the model in view."""
        model = self.console.view.model
        if model is None or model.status.state not in ("ready", "idle"):
            self.notify("Load a model first", severity="warning")
        else:
            self.app.push_screen(AdaptersScreen(model.key))
