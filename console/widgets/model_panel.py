"""The selected model: what it is, the form of its load, and what that would take, priced anew when a value rests."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from console.links.models import NOTHING, LoadSettings, ModelsLink
from console.load_form import LoadForm
from console.widgets.glyphs import fitted
from console.widgets.load_form_view import LoadFormView
from console.widgets.model_details import Fit, FitPreview, ModelDetails, brief
from console.widgets.model_hints import is_broken
from engine.errors import EngineError
from engine.models.catalog import ModelEntry

SETTLE_S = 0.2
"""How long selection and values are to rest before the fit is computed anew."""

Edits = MutableMapping[str, LoadSettings]
"""What was changed in forms and not loaded yet, by what the engine calls the models."""


def called(entry: ModelEntry) -> str:
    """What the engine is to load: a folder, the demo, or the hub id of a download that is not finished."""
    return entry.unfinished or ("demo" if entry.name == "demo" else str(entry.path))


class ModelPanel(Vertical):
    """edits: shared with whoever else shows forms."""

    DEFAULT_CSS = """
    ModelPanel { height: auto; min-height: 8; }
    ModelPanel LoadFormView { margin: 1 0; }
    ModelPanel #brief { display: none; height: auto; }
    ModelPanel #hint {
        height: auto;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    @dataclass
    class Priced(Message):
        """There is a new answer."""

        entry: ModelEntry
        fit: Fit

    def __init__(self, edits: Edits) -> None:
        super().__init__(classes="panel")
        self.border_title = "Selected"
        self._edits = edits
        self._entry: ModelEntry | None = None
        self._moment: object = None
        self._hint = Content("")
        self._fit: Fit = None
        self._stale = False

    def compose(self) -> ComposeResult:
        """Everything; the one-line form is shown where there is no room."""
        yield Static("", id="brief", markup=False)
        yield ModelDetails()
        yield LoadFormView()
        yield FitPreview()
        yield Static("", id="hint", markup=False)

    @property
    def models(self) -> ModelsLink:
        """Who prices."""
        from console.app import EricApp

        assert isinstance(self.app, EricApp)
        return self.app.link.models

    @property
    def form(self) -> LoadForm | None:
        """The form of the model that is shown."""
        return self.query_one(LoadFormView).form

    def show(self, entry: ModelEntry, hint: Content, moment: object) -> None:
        """Show a model. moment: what the answer depends on besides; where it has changed, it is asked for anew."""
        if not hint.is_same(self._hint):
            self._hint = hint
            self.query_one("#hint", Static).update(fitted(self.app, hint))
        if (entry, moment) == (self._entry, self._moment):
            return
        if entry != self._entry:
            self._fit = None
            self.query_one(ModelDetails).show(entry)
            self.query_one(LoadFormView).display = not is_broken(entry)
            self._fill(entry, self._edits.get(called(entry), NOTHING))
        self._entry, self._moment = entry, moment
        self.price()

    def price(self) -> None:
        """Find out anew what the load would take, once the values rest."""
        if self._entry is not None:
            self._stale = True
            self._describe()
            self._price()

    @work(group="price", exclusive=True, exit_on_error=False)
    async def _price(self) -> None:
        entry = self._entry
        if entry is None:
            return
        own = self._edits.get(called(entry), await self._last(entry))
        self._fill(entry, own)
        if entry.problem:
            return
        await asyncio.sleep(SETTLE_S)
        try:
            fit: Fit = await self.models.estimate(called(entry), own)
        except EngineError as error:
            fit = error.message
        self._fit, self._stale = fit, False
        self._describe()
        self.post_message(self.Priced(entry, fit))

    def _fill(self, entry: ModelEntry, own: LoadSettings) -> None:
        """Show a form; at once for a model that was just selected, so that no key is for the one before it."""
        self.query_one(LoadFormView).show(LoadForm(entry, own, self.models.defaults()))

    async def _last(self, entry: ModelEntry) -> LoadSettings:
        """What it was last loaded with."""
        try:
            return await self.models.remembered(called(entry))
        except EngineError:
            return NOTHING

    def on_load_form_view_changed(self, event: LoadFormView.Changed) -> None:
        """Price it with the new value."""
        event.stop()
        self._edits[called(event.form.entry)] = event.form.own
        self.price()

    def _describe(self) -> None:
        if self._entry is not None:
            self.query_one(FitPreview).show(self._entry, self._fit, stale=self._stale)
            self.query_one("#brief", Static).update(fitted(self.app, brief(self._entry, self._fit)))
