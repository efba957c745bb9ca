"""The form of autotune, its progress and its results: the knobs it varies, and a few settings."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Static

from console import text
from console.link.protocol import EngineLink
from console.link.status import link_status
from console.link.tuning import Tried, TuneOrder, TuningReport
from console.tui.screens.base import TableForm, accept_key
from console.tui.screens.benches.bench_draft import TRACE
from console.tui.screens.tune.autotune_draft import BASIC_FORM, FORM, KNOBS, RELOADING, TuneDraft
from console.tui.widgets.bench import BenchFields
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.graph import Point
from console.tui.widgets.table import Cell, Column, Row, Table, cell
from console.tuning.autotune.space import KnobName, Setting
from console.tuning.autotune.table import HEADINGS, remarks_of
from engine.errors import EngineError, InvalidRequest

# What autotune tries and has found: how it goes, and a row for each setting, the fastest first.

NOTHING_YET = "Measuring the first settings…"
NOT_TRIED = "No autotune results yet."
_VERDICTS = {"kept": ("✓ met", "$success"), "unsure": ("◇ unsure", "$muted"), "broken": ("✖ missed", "$error")}
_STATES = {
    "running": ("◔ autotune running", "$worker-loading"),
    "restoring": ("◔ restoring settings", "$worker-loading"),
    "done": ("✓ done", "$success"),
    "cancelled": ("○ cancelled", "$muted"),
    "failed": ("✖ failed", "$error"),
}
_SHORT: dict[KnobName, str] = {
    "max_prompts": "prompts",
    "step_tokens": "step",
    "cache_bits": "bits",
    "draft_tokens": "drafts",
}


class TuningPanel(Vertical):
    """Two lines of how it goes, a third of what else happened, and the table."""

    def compose(self) -> ComposeResult:
        """Head, then rows."""
        yield Static(id="tuning-head", markup=False)
        yield Table((), empty=NOTHING_YET, id="tuning-tried")

    def show(self, report: TuningReport, *, read_only: bool = False) -> None:
        """Show the state of the run, and the settings that it has tried. read_only: none can be started here."""
        head, table = self.query_one("#tuning-head", Static), self.query_one(Table)
        head.display = report.state != "none"
        if report.state == "none":
            table.show([], empty=NOT_TRIED if read_only else f"{NOT_TRIED} Press f to start.", columns=())
            return
        lines = [_state(report), _order_text(report), *_remark(report)]
        head.update(for_terminal(self.app, Content("\n").join(lines)))
        table.show([_row(each, report) for each in report.tried], empty=NOTHING_YET, columns=_columns(report))


def points_of(report: TuningReport, *, ttft: bool) -> list[Point]:
    """Those whose latency is known, the best drawn full."""
    return [
        Point(latency, each.tokens_per_s, _label(each.setting, report.knobs), each.best, each.front)
        for each in report.tried
        if (latency := each.ttft_s if ttft else each.itl_s) is not None
    ]


def _label(setting: Setting, knobs: tuple[KnobName, ...]) -> str:
    """ "2×16" where those are what is turned, else the first knob that is."""
    return f"{setting.workers}×{setting.max_prompts}" if "max_prompts" in knobs else str(setting.value(knobs[0]))


def _state(report: TuningReport) -> Content:
    words, style = _STATES.get(report.state, ("", ""))
    if report.now is not None:
        now = "  ".join(f"{HEADINGS[knob]} {report.now.value(knob)}" for knob in report.knobs)
        left = text.seconds(max(0.0, report.budget_s - report.elapsed_s))
        more = f"  {len(report.tried)} tried (of up to {report.size:,}), max {left} left  ·  {now}"
    else:
        more = f"  {report.outcome.removeprefix(f'{words[2:].capitalize()}.').strip()}"
    return Content.assemble((words, f"bold {style}"), (more, "$foreground"))


def _order_text(report: TuningReport) -> Content:
    limits = [
        f"{name} p{report.percentile:g} ≤ {text.seconds(limit)}"
        for name, limit in (("TTFT", report.slo_ttft_s), ("ITL", report.slo_itl_s))
        if limit is not None
    ]
    return Content.styled("  ".join((*(limits or ["no SLO set"]), f"·  {report.mix}")), "$muted")


def _remark(report: TuningReport) -> list[Content]:
    """The last of what else there is to say, and how much more there is."""
    remarks = remarks_of(report)
    if not remarks:
        return []
    more = f"  (and {len(remarks) - 1} more)" if len(remarks) > 1 else ""
    return [Content.assemble((f"◇ {remarks[-1]}", "$warning"), (more, "$muted"))]


def _columns(report: TuningReport) -> tuple[Column, ...]:
    percentile = f"p{report.percentile:g}"
    return (
        Column("", 7),
        Column("tok/s", 7, "right"),
        Column("±", 6, "right", drop=3),
        Column(f"TTFT {percentile}", 9, "right"),
        Column("±", 6, "right", drop=5),
        Column(f"ITL {percentile}", 9, "right"),
        Column("±", 6, "right", drop=4),
        *((Column("goodput/s", 9, "right", drop=2),) if _has_slo(report) else ()),
        *(Column(_SHORT.get(knob, HEADINGS[knob]), 7, "right") for knob in report.knobs),
        *((Column("SLO", 9),) if _has_slo(report) else ()),
        Column("runs", 7, "right", drop=1),
    )


def _has_slo(report: TuningReport) -> bool:
    return report.slo_ttft_s is not None or report.slo_itl_s is not None


def _row(each: Tried, report: TuningReport) -> Row:
    strong = "bold" if each.best else ""
    mark = cell("● best", "bold $graph-tokens") if each.best else cell("◆ front" if each.front else "", "$graph-tokens")
    half = f"{(each.high - each.low) / 2:,.0f}" if each.high is not None else "–"
    has_slo = _has_slo(report)
    cells: tuple[Cell, ...] = (
        mark,
        cell(f"{each.tokens_per_s:,.0f}", strong),
        cell(half, "$muted"),
        cell(text.seconds(each.ttft_s), strong),
        cell(text.seconds(_half(each.ttft_low_s, each.ttft_high_s)), "$muted"),
        cell(text.seconds(each.itl_s), strong),
        cell(text.seconds(_half(each.itl_low_s, each.itl_high_s)), "$muted"),
        *((cell(f"{each.goodput_per_s:.1f}", "$muted"),) if has_slo else ()),
        *(cell(str(each.setting.value(knob)), strong) for knob in report.knobs),
        *((cell(*_VERDICTS[each.verdict]),) if has_slo else ()),
        cell(str(each.windows), "$muted"),
    )
    return Row(str(each.setting), cells)


def _half(low: float | None, high: float | None) -> float | None:
    return (high - low) / 2 if low is not None and high is not None else None


_MEANWHILE = (
    "Client requests take priority. Settings are restored afterwards. Cache bits and draft tokens "
    "reload the model; knobs that cannot change here are not tuned."
)
_HOW: dict[bool, str] = {True: "reloads model", False: "live"}
_ELSEWHERE = " Traces need a console on that machine."


class TuneFormScreen(TableForm):
    """Form of autotune. model: the one to be tuned, "" is the first.  draft: what was typed and chosen before."""

    AUTO_FOCUS = "#field-0"
    BINDINGS: ClassVar[list[BindingType]] = [
        accept_key("Start"),
        Binding("ctrl+s,ctrl+r", "start", "Start", id="tune.start", tooltip="Start autotune", show=False),
        Binding(
            "ctrl+o,ctrl+l",
            "advanced",
            "Advanced",
            id="tune.advanced",
            tooltip="Show the knobs and all settings, or hide them",
        ),
        Binding("space", "switch", "Toggle", id="tune.switch", tooltip="Tune the selected knob, or not"),
        Binding("up", "app.focus_previous", "Up", id="tune.up", tooltip="Go up a field", show=False, system=True),
        Binding("down", "app.focus_next", "Down", id="tune.down", tooltip="Go down a field", show=False, system=True),
        Binding("escape", "dismiss(None)", "Cancel", id="tune.leave", tooltip="Close the form"),
    ]

    def __init__(self, link: EngineLink, *, model: str = "", draft: TuneDraft | None = None) -> None:
        super().__init__()
        self._link = link
        self._model = model
        self._draft = draft or TuneDraft()
        self._starting = False

    def compose(self) -> ComposeResult:
        """Its purpose, the settings, with the knobs on the left where all is shown, and its effect on other clients."""
        elsewhere = bool(link_status(self._link).name)
        with Vertical(classes="dialog bench-form tune-form") as page:
            page.border_title = "Autotune"
            yield Static(FORM.measures, id="tune-measures", markup=False)
            with Horizontal(id="tune-choice"):
                yield Table((Column("tuned", 14), Column("", 12, drop=1)), id="tune-turned")
                yield BenchFields(self._draft.typed, without=(TRACE,) if elsewhere else ())
            yield Static(f"{_MEANWHILE}{_ELSEWHERE if elsewhere else ''}", id="tune-meanwhile", markup=False)
            yield Static(id="tune-problem", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Start (enter)", id="start", compact=True)
                yield Button("Advanced (ctrl+o)", id="advanced", compact=True)
                yield Button("Cancel (esc)", id="leave", compact=True)

    def on_mount(self) -> None:
        """As it was left."""
        self._show_knobs()
        self._table.move_to(0)
        self._show_settings()

    def _show_settings(self) -> None:
        advanced = self._draft.advanced
        self._table.display = advanced
        self.query_one(BenchFields).show(FORM if advanced else BASIC_FORM)
        self.query_one("#tune-choice").set_class(advanced, "-advanced")

    @property
    def _table(self) -> Table:
        return self.query_one(Table)

    def _show_knobs(self) -> None:
        self._table.show([self._row(knob) for knob in KNOBS])

    def _row(self, knob: KnobName) -> Row:
        fixed = knob in self._draft.fixed
        mark, style = ("○", "$muted") if fixed else ("●", "$success")
        how = "stays" if fixed else _HOW[knob in RELOADING]
        name = ((f"{mark} ", style), (HEADINGS[knob], "$muted" if fixed else ""))
        return Row(knob, (name, cell(how, "$muted")))

    def _complain(self, sentence: str) -> None:
        shown = f"✖ {sentence[:1].upper()}{sentence[1:]}" if sentence else ""
        self.query_one("#tune-problem", Static).update(for_terminal(self.app, Content.styled(shown, "$error")))

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_advanced(self) -> None:
        """Show the knobs and all settings, or minutes and SLO alone."""
        self._draft.advanced = not self._draft.advanced
        self._show_settings()
        (self._table if self._draft.advanced else self.query_one("#field-0")).focus()

    def action_switch(self) -> None:
        """The knob under the cursor, on or off."""
        for knob in KNOBS:
            if knob == self._table.cursor_key:
                self._draft.switch(knob)
        self._complain("")
        self._show_knobs()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Space toggles a knob in the table alone."""
        return isinstance(self.focused, Table) if action == "switch" else super().check_action(action, parameters)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse's way."""
        does = {"leave": lambda: self.dismiss(None), "advanced": self.action_advanced}
        does.get(event.button.id or "", self.action_start)()

    def action_start(self) -> None:
        """Begin; where it is refused, say why and stay."""
        if self._starting:
            return
        try:
            order = self._draft.order(self._model)
        except InvalidRequest as error:
            self._show_refusal(error)
            return
        self._starting = True
        self.run_worker(self._start(order), exit_on_error=False)

    async def _start(self, order: TuneOrder) -> None:
        try:
            await self._link.tuning.start(order)
        except EngineError as error:
            self._show_refusal(error)
        else:
            self.dismiss(True)
        finally:
            self._starting = False

    def _show_refusal(self, error: EngineError) -> None:
        """Said, with the cursor where it is to be mended."""
        self._complain(error.message)
        fields, param = self.query_one(BenchFields), str(error.details.get("param", ""))
        if not fields.go_to(param) and param:  # of a knob, or a setting that is not shown
            if not self._draft.advanced:
                self.action_advanced()
            if not fields.go_to(param):
                self._table.focus()
