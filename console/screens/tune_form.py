"""What autotune is to find, and with what: the knobs that are turned, and a few settings, before it begins."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from console.autotune.draft import FORM, KNOBS, LOADED_ANEW, TuneDraft
from console.autotune.space import KnobName
from console.autotune.table import HEADINGS
from console.bench.draft import TRACE
from console.link import EngineLink
from console.links.tuning import TuneOrder
from console.standing import standing_of
from console.widgets.bench_fields import BenchFields
from console.widgets.glyphs import fitted
from console.widgets.table import Column, Row, Table, cell
from engine.errors import EngineError, InvalidRequest

_MEANWHILE = (
    "Whoever else asks goes first, no request is lost, and everything is put back in the end. Cache bits and guesses "
    "load the model anew each time they are turned; a knob that cannot be turned here is left out."
)
_HOW: dict[bool, str] = {True: "loads anew", False: "as it serves"}
_ELSEWHERE = " A trace is for a console on that machine."


class TuneFormScreen(ModalScreen[bool | None]):
    """True once it has begun. model: the one to be tuned, "" is the first.  draft: what was typed and chosen before."""

    AUTO_FOCUS = "#tune-turned"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s,ctrl+r", "start", "Start", id="tune.start", tooltip="Begin to try settings"),
        Binding("space", "switch", "On or off", id="tune.switch", tooltip="Turn the selected knob, or leave it"),
        Binding("up", "app.focus_previous", "Up", id="tune.up", tooltip="Go up a field", show=False, system=True),
        Binding("down", "app.focus_next", "Down", id="tune.down", tooltip="Go down a field", show=False, system=True),
        Binding("escape", "dismiss(None)", "Leave", id="tune.leave", tooltip="Try nothing", show=False),
    ]

    def __init__(self, link: EngineLink, *, model: str = "", draft: TuneDraft | None = None) -> None:
        super().__init__()
        self._link = link
        self._model = model
        self._draft = draft or TuneDraft()
        self._starting = False

    def compose(self) -> ComposeResult:
        """What it does; the knobs on the left, the settings on the right; what it means for others."""
        elsewhere = bool(standing_of(self._link).name)
        with Vertical(classes="dialog bench-form tune-form") as page:
            page.border_title = "Autotune"
            page.border_subtitle = "enter starts it, tab goes on, esc leaves"
            yield Static(FORM.measures, id="tune-measures", markup=False)
            with Horizontal(id="tune-choice"):
                yield Table((Column("turned", 13), Column("", 12, drop=1)), id="tune-turned")
                yield BenchFields(self._draft.typed, without=(TRACE,) if elsewhere else ())
            yield Static(f"{_MEANWHILE}{_ELSEWHERE if elsewhere else ''}", id="tune-meanwhile", markup=False)
            yield Static(id="tune-problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Start (enter)", id="start", compact=True)
                yield Button("Knob on or off (space)", id="switch", compact=True)
                yield Button("Leave (esc)", id="leave", compact=True)

    def on_mount(self) -> None:
        """As it was left."""
        self._show_knobs()
        self._table.move_to(0)
        self.query_one(BenchFields).show(FORM)

    @property
    def _table(self) -> Table:
        return self.query_one(Table)

    def _show_knobs(self) -> None:
        self._table.show([self._row(knob) for knob in KNOBS])

    def _row(self, knob: KnobName) -> Row:
        kept = knob in self._draft.kept
        mark, style = ("○", "$muted") if kept else ("●", "$success")
        how = "stays" if kept else _HOW[knob in LOADED_ANEW]
        name = ((f"{mark} ", style), (HEADINGS[knob], "$muted" if kept else ""))
        return Row(knob, (name, cell(how, "$muted")))

    def _complain(self, sentence: str) -> None:
        said = f"✖ {sentence[:1].upper()}{sentence[1:]}" if sentence else ""
        self.query_one("#tune-problem", Static).update(fitted(self.app, Content.styled(said, "$error")))

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_switch(self) -> None:
        """The knob under the cursor, on or off."""
        for knob in KNOBS:
            if knob == self._table.cursor_key:
                self._draft.switch(knob)
        self._complain("")
        self._show_knobs()

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter among the knobs."""
        event.stop()
        self.action_start()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter in a field."""
        event.stop()
        self.action_start()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        does = {"leave": lambda: self.dismiss(None), "switch": self.action_switch}
        does.get(event.button.id or "", self.action_start)()

    def action_start(self) -> None:
        """Begin; where it is refused, say why and stay."""
        if self._starting:
            return
        try:
            order = self._draft.order(self._model)
        except InvalidRequest as error:
            self._refused(error)
            return
        self._starting = True
        self.run_worker(self._start(order), exit_on_error=False)

    async def _start(self, order: TuneOrder) -> None:
        try:
            await self._link.tuning.start(order)
        except EngineError as error:
            self._refused(error)
        else:
            self.dismiss(True)
        finally:
            self._starting = False

    def _refused(self, error: EngineError) -> None:
        """Said, with the cursor where it is to be mended."""
        self._complain(error.message)
        if not self.query_one(BenchFields).go_to(str(error.details.get("param", ""))):
            self._table.focus()
