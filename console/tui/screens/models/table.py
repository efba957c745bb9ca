"""The models on this machine, one row each; what cannot be loaded says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.widgets.states import model_state
from console.tui.widgets.table import Cell, Column, Row, Table, cell
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelState

_COLUMNS = (
    Column("", 3),
    Column("Model", 18, grow=24),
    Column("Architecture", 12, grow=4, drop=3),
    Column("Quantised", 12, drop=1),
    Column("Bits", 4, "right", drop=4),
    Column("Params", 6, "right", drop=5),
    Column("Weights", 8, "right", drop=2),
    Column("Context", 7, "right", drop=6),
    Column("Template", 9, drop=7),
    Column("Source", 10, grow=24, drop=8),
)
_LOOKING = "Looking for models…"
NO_MODELS = "No models found. /: load a folder or hub id. --models-dir adds a folder to search."
NO_MATCH = "No model matches. Esc shows all."
_NO_MATCH_HERE = "No model matches. Enter loads that folder or hub id; Ctrl+L downloads only. Esc shows all."


class ModelTable(Table):
    """Enter or l loads the selected row, b beside what is there, space marks it for a comparison."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "enter,l",
            "screen.load_model(False)",
            "Load",
            id="models.load",
            mutates=True,
            primary=True,
            tooltip="Load the selected model, replacing the first",
        ),
        ConsoleBinding(
            "b",
            "screen.load_model(True)",
            "Add",
            id="models.beside",
            mutates=True,
            tooltip="Load the selected model in addition",
        ),
        Binding(
            "space",
            "screen.mark",
            "Mark",
            id="models.mark",
            tooltip="Mark the selected model for a comparison",
            show=False,
        ),
    ]
    DEFAULT_CSS = """
    ModelTable { background: $background; }
    """

    def __init__(self) -> None:
        super().__init__(_COLUMNS, empty=_LOOKING)
        self.add_class("panel")
        self.border_title = "Models"
        self._entries: Sequence[ModelEntry] = ()
        self._none, self._no_match = NO_MODELS, _NO_MATCH_HERE
        self._loaded: Mapping[str, ModelState] = {}
        self._marked: Sequence[str] = ()
        self._word = ""

    def fill(self, entries: Sequence[ModelEntry], *, none: str = NO_MODELS, no_match: str = _NO_MATCH_HERE) -> None:
        """The models found, staying on the one that was selected. none, no_match: what to say where there are none, or
        none that match."""
        self._entries, self._none, self._no_match = entries, none, no_match
        self._draw()

    def mark(self, loaded: Mapping[str, ModelState], marked: Sequence[str]) -> None:
        """loaded: states by folder.  marked: names of the models to be compared."""
        if (loaded, marked) != (self._loaded, self._marked):
            self._loaded, self._marked = loaded, marked
            self._draw()

    def search(self, word: str) -> None:
        """Show only models that have every word of it in what `matches` searches."""
        self._word = word
        self._draw()

    @property
    def selected(self) -> ModelEntry | None:
        """The model under the cursor."""
        return self.entry(self.cursor_key or "")

    def entry(self, name: str) -> ModelEntry | None:
        """The model of that name."""
        return next((entry for entry in self._entries if entry.name == name), None)

    def _draw(self) -> None:
        found = [entry for entry in self._entries if matches(entry, self._word)]
        self.show([self._row(entry) for entry in found], empty=self._no_match if self._entries else self._none)
        if self.cursor_key is None and self.rows:
            self.move_to(0)
        elif self.cursor_key is not None:
            self.post_message(self.Moved(self, self.cursor_key))
        whole = text.plural(len(self._entries), "model")
        self.border_subtitle = whole if len(found) == len(self._entries) else f"{len(found)} of {whole}"

    def _row(self, entry: ModelEntry) -> Row:
        style = "$muted" if entry.problem else ""
        weights = entry.kept_bytes if entry.unfinished else entry.weights_bytes
        columns = (
            text.clip(entry.name, 42),
            family(entry),
            quantization(entry),
            text.bits_per_weight(None if entry.problem else entry.bits_per_weight),
            parameters(entry),
            text.size(weights) if weights else "–",
            text.count(entry.context_tokens) if entry.context_tokens else "–",
            entry.chat_template or ("–" if entry.problem else "none"),
            text.clip(entry.origin, 34),
        )
        return Row(entry.name, (self._mark(entry), *(cell(column, style) for column in columns)))

    def _mark(self, entry: ModelEntry) -> Cell:
        """Its place in the comparison, and the state's glyph: the word stands in the engine's panel."""
        number = str(self._marked.index(entry.name) + 1) if entry.name in self._marked else " "
        state = self._loaded.get(str(entry.path))
        if state is not None:
            shown = model_state(state)
            glyph = (shown.glyph, f"bold {shown.style}")
        else:
            glyph = ("◔" if entry.unfinished else "✖" if entry.problem else " ", "$muted")
        return ((f"{number} ", "bold $primary"), glyph)


def matches(entry: ModelEntry, words: str) -> bool:
    """Return whether every word is in the model's name, architecture, quantisation or number of parameters."""
    kind = f"{entry.architecture} {entry.quantisation} {entry.dtype} {quantization(entry)}"
    hay = f"{entry.name} {kind} {parameters(entry)}".lower()
    return all(word in hay for word in words.lower().split())


def family(entry: ModelEntry) -> str:
    """ "Llama", "Mistral"; "–" where the files do not say."""
    return text.architecture(entry.architecture)


def quantization(entry: ModelEntry) -> str:
    """ "exl2 5.0 bpw", "bf16"."""
    return entry.quantisation or text.dtype(entry.dtype) or "–"


def parameters(entry: ModelEntry) -> str:
    """ "8.4M", "7.2B", "–" where the files do not say."""
    if entry.parameters >= 1_000_000_000:
        return f"{entry.parameters / 1e9:.1f}B"
    return text.count(entry.parameters) if entry.parameters else "–"
