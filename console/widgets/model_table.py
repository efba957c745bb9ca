"""The models on this machine, one row each; what cannot be loaded says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable

from console.widgets import text
from console.widgets.glyphs import is_ascii, to_ascii
from console.widgets.states import model_state
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelState

_COLUMNS = (("", "mark"), ("Model", "name"), ("Type", "type"), ("Params", "params"), ("Weights", "size"))
_WIDE_COLUMNS = (("Context", "context"), ("From", "origin"))


class ModelTable(DataTable[Text]):
    """Enter or l loads the selected row, b beside what is there."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,l", "load", "Load", id="models.load", tooltip="Load the selected model in place of the first"),
        Binding(
            "b", "load(True)", "Beside", id="models.beside", tooltip="Load the selected model beside what is loaded"
        ),
    ]

    DEFAULT_CSS = """
    ModelTable { height: 1fr; scrollbar-size: 1 1; background: $background; }
    ModelTable:focus { background-tint: transparent; }
    ModelTable > .datatable--header { background: $background; color: $muted; }
    """

    @dataclass
    class LoadAsked(Message):
        """A model was chosen. beside: what is loaded stays."""

        entry: ModelEntry
        beside: bool = False

    @dataclass
    class Selected(Message):
        """The cursor is on another model."""

        entry: ModelEntry

    def __init__(self) -> None:
        super().__init__(classes="panel", cursor_type="row", zebra_stripes=False)
        self.border_title = "Models"
        self._entries: Sequence[ModelEntry] = ()

    def on_mount(self) -> None:
        """All columns; what does not fit scrolls sideways."""
        for label, key in (*_COLUMNS, *_WIDE_COLUMNS):
            self.add_column(label, key=key)

    def show(self, entries: Sequence[ModelEntry], loaded: Mapping[str, ModelState]) -> None:
        """Replace the rows, staying on the model that was selected. loaded: states by folder."""
        selected = self.selected.name if self.selected else None
        self._entries = entries
        self.clear()
        for entry in entries:
            self.add_row(*self._cells(entry, loaded), key=entry.name)
        names = [entry.name for entry in entries]
        if selected in names:
            self.move_cursor(row=names.index(selected))
        self.border_subtitle = text.plural(len(entries), "model")

    def mark(self, loaded: Mapping[str, ModelState]) -> None:
        """Show which are loaded, and how they are."""
        for entry in self._entries:
            self.update_cell(entry.name, "mark", self._mark(entry, loaded))

    @property
    def selected(self) -> ModelEntry | None:
        """The model under the cursor."""
        return self._entries[self.cursor_row] if 0 <= self.cursor_row < len(self._entries) else None

    def action_load(self, beside: bool = False) -> None:
        """Enter or l; b for beside."""
        if self.selected is not None:
            self.post_message(self.LoadAsked(self.selected, beside))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """The cursor moved."""
        event.stop()
        if self.selected is not None:
            self.post_message(self.Selected(self.selected))

    def _cells(self, entry: ModelEntry, loaded: Mapping[str, ModelState]) -> list[Text]:
        style = "dim" if entry.problem else ""
        return [
            self._mark(entry, loaded),
            Text(text.clip(entry.name, 40), style=style),
            Text(kind(entry), style=style),
            Text(parameters(entry), style=style, justify="right"),
            Text(text.size(entry.weights_bytes), style=style, justify="right"),
            Text(text.count(entry.context_tokens) if entry.context_tokens else "–", style=style, justify="right"),
            Text(text.clip(entry.origin, 32), style=style),
        ]

    def _mark(self, entry: ModelEntry, loaded: Mapping[str, ModelState]) -> Text:
        """The state's glyph alone: its word stands in the engine's panel."""
        state = loaded.get(str(entry.path))
        glyph = model_state(state).glyph if state is not None else "✖" if entry.problem else " "
        return Text(to_ascii(glyph) if is_ascii(self.app) else glyph, style="bold" if state is not None else "dim")


def kind(entry: ModelEntry) -> str:
    """ "Llama bf16", "Mistral exl2 5.0 bpw"."""
    family = entry.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return f"{family} {entry.quantisation or text.dtype(entry.dtype)}".strip()


def parameters(entry: ModelEntry) -> str:
    """ "8.4M", "7.2B", "–" where the files do not say."""
    if entry.parameters >= 1_000_000_000:
        return f"{entry.parameters / 1e9:.1f}B"
    return text.count(entry.parameters) if entry.parameters else "–"
