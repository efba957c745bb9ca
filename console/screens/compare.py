"""Two models compared: files, load and fit, with a sign and a word at everything that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from console.links.models import NOTHING, ModelsLink
from console.load_form import LoadForm
from console.widgets import text
from console.widgets.model_comparison import Line, Side, compare
from console.widgets.model_panel import Edits, called
from console.widgets.table import Column, Row, Table, cell
from engine.errors import EngineError
from engine.models.catalog import ModelEntry

_NAME = 24


class CompareScreen(ModalScreen[None]):
    """entries: the two.  edits: what was changed in their forms."""

    AUTO_FOCUS = "Table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "only", "Differences", id="compare.only", tooltip="Show only what differs, then all again"),
        Binding("escape,v,q", "dismiss", "Close", id="compare.close", tooltip="Close the comparison"),
    ]

    def __init__(self, models: ModelsLink, entries: tuple[ModelEntry, ModelEntry], edits: Edits) -> None:
        super().__init__()
        self._models = models
        self._edits = edits
        defaults = models.defaults()
        self._sides = [Side(LoadForm(entry, edits.get(called(entry), NOTHING), defaults), None) for entry in entries]
        self._only = False

    def compose(self) -> ComposeResult:
        """One table."""
        names = [text.clip(side.entry.name, _NAME) for side in self._sides]
        columns = (
            Column("", 18),
            Column(names[0], 16, grow=30),
            Column(names[1], 16, grow=30),
            Column("≠", 17),
        )
        with Vertical(classes="dialog compare") as page:
            page.border_title = "Two models"
            page.border_subtitle = "d shows only what differs, esc closes"
            yield Table(columns, empty="Nothing differs.")

    def on_mount(self) -> None:
        """What is known at once, then what their loads would take."""
        self._show()
        for at in range(len(self._sides)):
            self.run_worker(self._price(at), group=f"price {at}", exit_on_error=False)

    async def _price(self, at: int) -> None:
        form = self._sides[at].form
        name = called(form.entry)
        try:
            own = self._edits[name] if name in self._edits else await self._models.remembered(name)
            form = LoadForm(form.entry, own, form.defaults)
            fit = form.entry.problem or await self._models.estimate(name, own)
        except EngineError as error:
            fit = error.message
        self._sides[at] = Side(form, fit)
        self._show()

    def action_only(self) -> None:
        """Only what differs."""
        self._only = not self._only
        self._show()

    def _show(self) -> None:
        lines = compare(self._sides[0], self._sides[1])
        self.query_one(Table).show(_rows([line for line in lines if line.difference or not self._only]))


def _rows(lines: Sequence[Line]) -> list[Row]:
    return [_row(line) for line in lines]


def _row(line: Line) -> Row:
    style = "bold $warning" if line.difference else ""
    said = cell(f"≠ {line.difference}", "bold $warning") if line.difference else cell("= same", "$muted")
    return Row(line.label, (cell(line.label, "$muted"), cell(line.left, style), cell(line.right, style), said))
