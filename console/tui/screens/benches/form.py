"""Which bench, of what, with what: its sentence, a few settings with good values in them, and why it cannot begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Button, Input, Label, Select, Static

from console.bench.dialects import DIALECTS
from console.link.benches import BenchForm, BenchOrder, BenchServer
from console.link.protocol import EngineLink
from console.link.status import link_status
from console.tui.screens.base import TableForm, accept_key
from console.tui.screens.benches.bench_draft import TRACE, BenchDraft
from console.tui.widgets.bench import BenchFields
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.table import Column, Row, Table, cell
from engine.errors import EngineError

# What a bench asks: the engine, or a server by its address, with the dialect that it speaks.

_ENGINE = "or a server: http://host:port"
_BOXES = {"url": "#place-url", "dialect": "#place-dialect", "model": "#place-model", "key": "#place-key"}


def _dialect_text(name: str) -> str:
    """Path and server of a dialect."""
    dialect = DIALECTS[name]
    return f"{dialect.path} ({dialect.server})" if dialect.server else dialect.path


class BenchPlace(Vertical):
    """An address, empty for the engine; below it what more is needed of a server. What is typed goes into the draft.

    elsewhere: where the engine is, "" for this process. Only the engine can be asked there.
    """

    class Changed(Message):
        """Something else is to be asked."""

    def __init__(self, draft: BenchDraft, elsewhere: str = "") -> None:
        super().__init__()
        self._draft = draft
        self._elsewhere = elsewhere

    def compose(self) -> ComposeResult:
        """One line, and one more for a server."""
        server = self._draft.server
        with Horizontal():
            yield Label("target", classes="place-first")
            yield Input(
                server.url,
                placeholder=f"the engine of {self._elsewhere}" if self._elsewhere else "this engine",
                id="place-url",
                compact=True,
                disabled=bool(self._elsewhere),
            )
            yield Label("", id="place-hint", classes="hint", markup=False)
        with Horizontal(id="place-server"):
            yield Label("dialect", classes="place-first")
            yield Select(
                [(name, name) for name in DIALECTS],
                value=server.dialect,
                allow_blank=False,
                compact=True,
                id="place-dialect",
            )
            yield Label("model", classes="place-label")
            yield Input(server.model, placeholder="first listed", id="place-model", compact=True)
            yield Label("key", classes="place-label")
            yield Input(server.key, placeholder="none", password=True, id="place-key", compact=True)

    def on_mount(self) -> None:
        """As it is in the draft."""
        self._show()

    def go_to_address(self) -> None:
        """To where a server is named."""
        self.query_one("#place-url").focus()

    def go_to(self, setting: str) -> bool:
        """To the one that is wrong; whether there is such a one."""
        if setting not in _BOXES:
            return False
        self.query_one(_BOXES[setting]).add_class("-wrong").focus()
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        """Typed."""
        event.stop()
        event.input.remove_class("-wrong")
        self._changed()

    def on_select_changed(self, event: Select.Changed) -> None:
        """Chosen."""
        event.stop()
        event.select.remove_class("-wrong")
        self._changed()

    def _changed(self) -> None:
        dialect: Select[str] = self.query_one("#place-dialect", Select)
        self._draft.server = BenchServer(
            url=self._text("#place-url"),
            dialect=str(dialect.value),
            model=self._text("#place-model"),
            key=self._text("#place-key"),
        )
        self._show()
        self.post_message(self.Changed())

    def _show(self) -> None:
        server = self._draft.server
        self.query_one("#place-server").display = bool(server.url)
        hint = "" if self._elsewhere else _dialect_text(server.dialect) if server.url else _ENGINE
        self.query_one("#place-hint", Label).update(for_terminal(self.app, Content(hint)))

    def _text(self, box: str) -> str:
        return self.query_one(box, Input).value.strip()


_SHARED = "Runs on the serving engine; benchmark and clients slow each other down."
_SERVER = "Measures the server as a client; other load changes the numbers."
_ELSEWHERE = "Servers and traces need a console on that machine, or 'ericllm bench'."
_SIZES = {True: "quick: fewer and shorter requests", False: "full, as on the command line"}

_SWITCHES = {True: "Full run (ctrl+t)", False: "Quick (ctrl+t)"}


class BenchFormScreen(TableForm):
    """Form of a bench. draft: what was typed before."""

    AUTO_FOCUS = "#bench-kinds"
    BINDINGS: ClassVar[list[BindingType]] = [
        accept_key("Start"),
        Binding("ctrl+t,ctrl+f", "size", "Quick or full", id="bench.size", tooltip="Quick or full run"),
        Binding("ctrl+o,ctrl+l", "place", "Server", id="bench.place", tooltip="Enter the URL of the server to measure"),
        Binding("ctrl+s,ctrl+r", "start", "Start", id="bench.start", tooltip="Start the benchmark", show=False),
        Binding("up", "app.focus_previous", "Up", id="bench.up", tooltip="Go up a field", show=False, system=True),
        Binding("down", "app.focus_next", "Down", id="bench.down", tooltip="Go down a field", show=False, system=True),
        Binding("escape", "dismiss(None)", "Cancel", id="bench.leave", tooltip="Close the form"),
    ]

    def __init__(self, link: EngineLink, *, model: str = "", draft: BenchDraft | None = None) -> None:
        super().__init__()
        self._link = link
        self._model = model
        self._draft = draft or BenchDraft()
        self._forms: dict[str, BenchForm] = {}
        self._starting = False

    def compose(self) -> ComposeResult:
        """The target; below it the benches on the left, the settings of the selected one on the right."""
        elsewhere = self._elsewhere
        with Vertical(classes="dialog bench-form") as page:
            page.border_title = "Benchmark"
            yield BenchPlace(self._draft, elsewhere)
            with Horizontal(id="bench-choice"):
                yield Table((Column("benchmark", 9),), id="bench-kinds")
                with Vertical(id="bench-settings"):
                    yield Static(id="bench-measures", markup=False)
                    yield BenchFields(self._draft, without=(TRACE,) if elsewhere else ())
            yield Static(id="bench-shared", markup=False)
            yield Static(id="bench-problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Start (enter)", id="start", compact=True)
                yield Button(_SWITCHES[self._draft.quick], id="size", compact=True)
                yield Button("Server (ctrl+o)", id="place", compact=True, disabled=bool(elsewhere))
                yield Button("Cancel (esc)", id="leave", compact=True)

    @property
    def _elsewhere(self) -> str:
        """Where the engine is, "" for this process."""
        return link_status(self._link).name

    def on_mount(self) -> None:
        """Ask which there are."""
        self._show_bench()
        self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        try:
            forms = await self._link.benches.forms()
        except EngineError as error:
            self._complain(error.message)
            return
        self._forms = {form.bench: form for form in forms}
        self._show_kinds()
        self._table.move_to(0)

    @property
    def _table(self) -> Table:
        return self.query_one("#bench-kinds", Table)

    @property
    def _form(self) -> BenchForm | None:
        return self._forms.get(self._table.cursor_key or "")

    # -- what is shown ------------------------------------------------------------------------------------------------

    def _show_kinds(self) -> None:
        forms: Sequence[BenchForm] = list(self._forms.values())
        self._table.show(
            [Row(form.bench, (cell(form.bench, "$muted" if self._draft.refused(form) else ""),)) for form in forms]
        )

    def on_table_moved(self, event: Table.Moved) -> None:
        """Another bench."""
        event.stop()
        self._show_bench()

    def on_bench_place_changed(self, event: BenchPlace.Changed) -> None:
        """Some benches are for the engine alone."""
        event.stop()
        self._show_kinds()
        self._show_about(self._form)

    def _show_bench(self) -> None:
        self.query_one(BenchFields).show(self._form)
        self._show_about(self._form)

    def _show_about(self, form: BenchForm | None) -> None:
        measures = Content(form.measures if form is not None else "")
        self.query_one("#bench-measures", Static).update(for_terminal(self.app, measures))
        whom = _SERVER if self._draft.server.url else _SHARED
        sentences = [whom, f"{_SIZES[self._draft.quick].capitalize()}.", *([_ELSEWHERE] if self._elsewhere else [])]
        self.query_one("#bench-shared", Static).update(" ".join(sentences) if form is not None and form.fields else "")
        self._complain(self._draft.refused(form) if form is not None else "")

    def _complain(self, sentence: str) -> None:
        first = sentence[:1] if sentence.startswith("http") else sentence[:1].upper()
        self._say(f"✖ {first}{sentence[1:]}" if sentence else "", "$error")

    def _say(self, sentence: str, style: str) -> None:
        self.query_one("#bench-problem", Static).update(for_terminal(self.app, Content.styled(sentence, style)))

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_size(self) -> None:
        """The other values."""
        self._draft.quick = not self._draft.quick
        self.query_one("#size", Button).label = _SWITCHES[self._draft.quick]
        self._show_bench()

    def action_place(self) -> None:
        """To the address."""
        self.query_one(BenchPlace).go_to_address()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        does = {"leave": lambda: self.dismiss(None), "size": self.action_size, "place": self.action_place}
        does.get(event.button.id or "", self.action_start)()

    def action_start(self) -> None:
        """Begin; where it is refused, say why and stay."""
        form = self._form
        if form is None or self._starting:
            return
        if refused := self._draft.refused(form):
            self._complain(refused)
            return
        self._starting = True
        self.run_worker(self._start(self._draft.order(form, self._model)), exit_on_error=False)

    async def _start(self, order: BenchOrder) -> None:
        if order.server is not None:
            self._say(f"◔ Connecting to {order.server.url}", "$muted")
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
        """To what is wrong; the model of an order to the engine is none of the form's."""
        if not self.query_one(BenchFields).go_to(setting) and self._draft.server.url:
            self.query_one(BenchPlace).go_to(setting)
