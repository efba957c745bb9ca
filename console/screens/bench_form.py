"""Which bench, and with what: its sentence, a few settings with good values in them, and why it cannot begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from console.link import EngineLink
from console.links.benches import BenchForm, BenchOrder
from console.widgets.glyphs import fitted
from console.widgets.table import Column, Row, Table, cell
from engine.errors import EngineError

MOST_FIELDS = 7
SHARED = "It asks the engine that serves: whoever else asks shares it meanwhile, and both are slower for it."
_SIZES = {True: "a first look: fewer and shorter requests", False: "in full, as on the command line"}


class BenchFormScreen(ModalScreen[bool | None]):
    """True once a bench has begun. bench: the one to begin with, "" is the first."""

    AUTO_FOCUS = "Table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+t,ctrl+f", "size", "Quick or full", id="bench.size", tooltip="A first look, or the bench in full"
        ),
        Binding("ctrl+s,ctrl+r", "start", "Start", id="bench.start", tooltip="Begin the bench"),
        Binding("up", "app.focus_previous", "Up", id="bench.up", tooltip="Go up a field", show=False, system=True),
        Binding("down", "app.focus_next", "Down", id="bench.down", tooltip="Go down a field", show=False, system=True),
        Binding("escape", "dismiss(None)", "Leave", id="bench.leave", tooltip="Measure nothing", show=False),
    ]

    def __init__(self, link: EngineLink, *, model: str = "", bench: str = "") -> None:
        super().__init__()
        self._link = link
        self._model = model
        self._bench = bench
        self._forms: dict[str, BenchForm] = {}
        self._quick = True
        self._starting = False

    def compose(self) -> ComposeResult:
        """The benches on the left; on the right the settings of the one under the cursor."""
        with Vertical(classes="dialog bench-form") as page:
            page.border_title = "Bench"
            page.border_subtitle = "enter starts it, tab goes on, esc leaves"
            with Horizontal(id="bench-choice"):
                yield Table((Column("bench", 9),), id="bench-kinds")
                with Vertical(id="bench-settings"):
                    yield Static(id="bench-measures", markup=False)
                    with Grid():
                        for at in range(MOST_FIELDS):
                            yield Label("", id=f"title-{at}", markup=False)
                            yield Input(id=f"field-{at}", compact=True, select_on_focus=True)
                            yield Label("", id=f"hint-{at}", classes="hint", markup=False)
            yield Static(id="bench-shared", markup=False)
            yield Static(id="bench-problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Start (enter)", id="start", compact=True)
                yield Button("Quick or full (ctrl+t)", id="size", compact=True)
                yield Button("Leave (esc)", id="leave", compact=True)

    def on_mount(self) -> None:
        """Ask which there are."""
        self._show_fields(None)
        self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        try:
            forms = await self._link.benches.forms()
        except EngineError as error:
            self._complain(error.message)
            return
        self._forms = {form.bench: form for form in forms}
        self._show_kinds(forms)

    def _show_kinds(self, forms: Sequence[BenchForm]) -> None:
        table = self.query_one(Table)
        table.show([Row(form.bench, (cell(form.bench, "$muted" if form.refused else ""),)) for form in forms])
        names = [form.bench for form in forms]
        table.move_to(names.index(self._bench) if self._bench in names else 0)

    @property
    def _form(self) -> BenchForm | None:
        return self._forms.get(self.query_one(Table).cursor_key or "")

    def on_table_moved(self, event: Table.Moved) -> None:
        """Another bench."""
        event.stop()
        self._show_fields(self._form)

    def _show_fields(self, form: BenchForm | None) -> None:
        fields = form.fields if form is not None else ()
        for at in range(MOST_FIELDS):
            field = fields[at] if at < len(fields) else None
            box = self.query_one(f"#field-{at}", Input)
            for name in ("title", "field", "hint"):
                self.query_one(f"#{name}-{at}").display = field is not None
            if field is not None:
                box.value = field.quick if self._quick else field.full
                box.placeholder = "none"
                if box.has_focus:
                    box.action_select_all()
                self.query_one(f"#title-{at}", Label).update(field.title)
                self.query_one(f"#hint-{at}", Label).update(fitted(self.app, Content(field.hint)))
        self.query_one("#bench-measures", Static).update(fitted(self.app, Content(form.measures if form else "")))
        shared = f"{SHARED} {_SIZES[self._quick].capitalize()}." if fields else ""
        self.query_one("#bench-shared", Static).update(shared)
        self._complain(form.refused if form is not None else "")

    def _complain(self, sentence: str) -> None:
        said = Content.styled(f"✖ {sentence[:1].upper()}{sentence[1:]}", "$error") if sentence else Content("")
        self.query_one("#bench-problem", Static).update(fitted(self.app, said))

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_size(self) -> None:
        """The other values."""
        self._quick = not self._quick
        self._show_fields(self._form)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter among the benches."""
        event.stop()
        self.action_start()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter in a field."""
        event.stop()
        self.action_start()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        if event.button.id == "leave":
            self.dismiss(None)
        elif event.button.id == "size":
            self.action_size()
        else:
            self.action_start()

    def action_start(self) -> None:
        """Begin; where it is refused, say why and stay."""
        form = self._form
        if form is None or self._starting:
            return
        if form.refused:
            self._complain(form.refused)
            return
        values = {
            field.name: self.query_one(f"#field-{at}", Input).value.strip() for at, field in enumerate(form.fields)
        }
        order = BenchOrder(bench=form.bench, model=self._model, settings=values, quick=self._quick)
        self._starting = True
        self.run_worker(self._start(order), exit_on_error=False)

    async def _start(self, order: BenchOrder) -> None:
        try:
            await self._link.benches.start(order)
        except EngineError as error:
            self._complain(error.message)
            self._go_to(str(error.details.get("param", "")))
        else:
            self.dismiss(True)
        finally:
            self._starting = False

    def _go_to(self, setting: str) -> None:
        """To the field that is wrong."""
        names = [field.name for field in self._form.fields] if self._form is not None else []
        if setting in names:
            self.query_one(f"#field-{names.index(setting)}", Input).focus()
