"""Tune: the knobs, and beneath them a view: effects of changes, autotune, the workload, or benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.style import Style
from textual.widget import Widget
from textual.widgets import ContentSwitcher, Static

from console import text
from console.link.tuning import TuningReport
from console.tui.keymap import API_SWITCH, KNOBS, READOUT, ConsoleBinding
from console.tui.screens.benches.panel import BenchesPanel
from console.tui.screens.dashboard.panels.advice import AdvicePanel, AdvisedScreen
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.tune.autotune import NOTHING_YET, TuningPanel, points_of
from console.tui.screens.tune.changes import EffectTable, effect_details
from console.tui.screens.tune.workload import WorkloadPanel
from console.tui.view import View, prompts_limit, workers_of
from console.tui.widgets.bench import brief
from console.tui.widgets.clickable import clickable, key_hint
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.graph import Curve, Graph, Point, Scale, Scatter, next_zoom, span_of
from console.tui.widgets.panel import set_frame
from console.tui.widgets.table import Table
from console.tuning.effects import Effect, ObservedSetting, ObservedSettings
from console.tuning.knobs import KNOB_NAMES, KnobName, knob_text, knob_title, knob_value
from engine.snapshot import Snapshot

# The knobs of the model in view: their values, what holds them back, and how they are turned. All can be clicked.

_NAME = 13
_VALUE = 8


class KnobPanel(Widget):
    """One line for each knob."""

    DEFAULT_CSS = """
    KnobPanel {
        height: 5; width: 1fr;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown = Content("")

    def show(self, snapshot: Snapshot, *, turns: bool = True) -> None:
        """The knobs of the model in view. turns: with signs to click, and keys."""
        lines = knob_lines(snapshot, turns=turns)
        if not lines.is_same(self._shown):
            self._shown = lines
            self.refresh()

    def render(self) -> Content:
        """A line for each."""
        return for_terminal(self.app, self._shown)


def knob_lines(snapshot: Snapshot, *, turns: bool = True) -> Content:
    """Every knob: value, keys, and how things stand. turns: with signs to click, and keys."""
    return Content("\n").join(
        (
            _knob(snapshot, "num_workers", "[ ]", _workers(snapshot), turns=turns),
            _knob(snapshot, "max_prompts", "- +", _prompts(snapshot), turns=turns),
            _knob(snapshot, "idle_unload_s", ", .", _idle(snapshot.idle_unload_s), turns=turns),
            _knob(snapshot, "step_tokens", "{ }", _step_tokens(snapshot), turns=turns),
            _knob(snapshot, "threads", "< >", "CPU threads per worker", turns=turns),
        )
    )


def _knob(snapshot: Snapshot, knob: KnobName, keys: str, label: str, *, turns: bool) -> Content:
    title, value = (f"{knob_title(knob):<{_NAME}}", "$muted"), knob_text(knob, knob_value(snapshot, knob))
    if not turns:
        return Content.assemble(title, (f"{value:<{_VALUE}}", "bold"), (f"  {label}", "$muted"))
    return Content.assemble(
        title,
        _link(" − ", f"app.step('{knob}', -1)"),
        (f"{value:^{_VALUE}}", "bold"),
        _link(" + ", f"app.step('{knob}', 1)"),
        (f"  {keys}  ", "$primary"),
        (label, "$muted"),
    )


def _link(label: str, action: str) -> Content:
    return Content.styled(label, "bold $primary").stylize(Style.from_meta({"@click": action}))


def _workers(snapshot: Snapshot) -> str:
    found = workers_of(snapshot)
    ready = sum(worker.state == "ready" for worker in found)
    coming = sum(worker.state in ("starting", "loading", "restarting") for worker in found)
    return f"{ready} ready" + (f", {coming} starting" if coming else "")


def _step_tokens(snapshot: Snapshot) -> str:
    """An ITL target decides on prompt tokens, where the workers' backend keeps one."""
    targets = {worker.stats.itl.target_s for worker in workers_of(snapshot) if worker.stats.itl is not None}
    if targets:
        return f"upper limit; the ITL target of {text.seconds(min(targets))} decides"
    return "per step, prefill and decode together"


def _prompts(snapshot: Snapshot) -> str:
    found = [worker for worker in workers_of(snapshot) if worker.state == "ready"]
    limit = prompts_limit(snapshot)
    allowed = f"; limited to {limit} by memory" if limit else ""
    if not found:
        return f"per worker{allowed}"
    used, slots = sum(worker.active for worker in found), len(found) * (limit or snapshot.max_prompts)
    over = f", {used - slots} more finish" if used > slots else ""  # right after it was lowered
    return f"per worker · {min(used, slots)} of {text.plural(slots, 'slot')} in use{over}{allowed}"


def _idle(seconds: float) -> str:
    if not seconds:
        return "stays loaded when idle"
    return "idle time before unload"


# The views beneath the knobs, and the row that names them.

TuneView = Literal["changes", "autotune", "workload", "benchmarks"]
_TITLES: Mapping[TuneView, str] = MappingProxyType(
    {"changes": "Changes", "autotune": "Autotune", "workload": "Workload", "benchmarks": "Benchmarks"}
)
_WITH_PLOTS = ("changes", "autotune")


class ViewRow(Static):
    """The titles of the views, each to be clicked."""

    DEFAULT_CSS = """
    ViewRow {
        height: 1; padding: 0 1;
        link-style: none; link-color: $foreground; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def show(self, here: TuneView) -> None:
        """here: the view that is seen."""
        titles = (
            Content.styled(f" {title} ", "bold reverse $primary")
            if view == here
            else clickable(f" {title} ", f"screen.show('{view}')", "$foreground")
            for view, title in _TITLES.items()
        )
        self.update(Content.assemble(*titles, key_hint(self.screen, "tune.view", "next", "screen.next_view")))


IDLE = Binding.Group("Idle unload", compact=True)
STEP_TOKENS = Binding.Group("Step tokens", compact=True)
THREADS = Binding.Group("Threads", compact=True)
_ZOOM = 300
NO_POINTS = "Needs 10 s of load."
_KNOB_IDS = ("idle.shorter", "idle.longer", "tokens.fewer", "tokens.more", "threads.fewer", "threads.more")


class TuneScreen(AdvisedScreen):
    """Knobs above, curves between, changes below."""

    MODE = "tune"
    AUTO_FOCUS = "EffectTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "f",
            "find",
            "Autotune",
            id="tune.find",
            mutates=True,
            primary=True,
            tooltip="Start or cancel autotune",
        ),
        ConsoleBinding(
            "w", "use_best", "Apply best", id="tune.use", mutates=True, tooltip="Apply and save the best settings"
        ),
        ConsoleBinding(
            "s",
            "load",
            "Sample load",
            id="tune.load",
            mutates=True,
            tooltip="Start or stop a sample load of 30 s",
        ),
        Binding(
            "b",
            "show('benchmarks')",
            "Benchmarks",
            id="tune.bench",
            tooltip="Benchmarks: run one, show results",
        ),
        Binding(
            "v", "next_view", "View", id="tune.view", tooltip="Show changes, autotune, the workload, or benchmarks"
        ),
        ConsoleBinding(
            "u",
            "undo",
            "Undo",
            id="tune.undo",
            mutates=True,
            tooltip="Undo the selected change",
        ),
        *KNOBS,
        Binding("l", "latency", "Latency", id="tune.latency", tooltip="Plot throughput vs. TTFT or ITL"),
        ConsoleBinding(
            "comma",
            "app.step('idle_unload_s', -1)",
            "Idle unload −",
            id="idle.shorter",
            mutates=True,
            tooltip="Unload the idle model sooner",
            key_display=",",
            group=IDLE,
        ),
        ConsoleBinding(
            "full_stop",
            "app.step('idle_unload_s', 1)",
            "Idle unload +",
            id="idle.longer",
            mutates=True,
            tooltip="Unload the idle model later",
            key_display=".",
            group=IDLE,
        ),
        ConsoleBinding(
            "left_curly_bracket",
            "app.step('step_tokens', -1)",
            "Step tokens −",
            id="tokens.fewer",
            mutates=True,
            tooltip="Halve the tokens per step: shorter gaps between tokens",
            key_display="{",
            group=STEP_TOKENS,
            show=False,
        ),
        ConsoleBinding(
            "right_curly_bracket",
            "app.step('step_tokens', 1)",
            "Step tokens +",
            id="tokens.more",
            mutates=True,
            tooltip="Double the tokens per step: faster prefill",
            key_display="}",
            group=STEP_TOKENS,
            show=False,
        ),
        ConsoleBinding(
            "less_than_sign",
            "app.step('threads', -1)",
            "Threads −",
            id="threads.fewer",
            mutates=True,
            tooltip="Use one CPU thread less per worker; 0: cores divided by workers",
            key_display="<",
            group=THREADS,
            show=False,
        ),
        ConsoleBinding(
            "greater_than_sign",
            "app.step('threads', 1)",
            "Threads +",
            id="threads.more",
            mutates=True,
            tooltip="Use one CPU thread more per worker",
            key_display=">",
            group=THREADS,
            show=False,
        ),
        Binding("escape", "show('changes')", "Changes", id="tune.changes", tooltip="Show changes", show=False),
        API_SWITCH,
        *READOUT,
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Change the time range of the graphs"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._zoom = _ZOOM
        self._pointed_at: float | None = None
        self._ttft = False
        self._effects: tuple[tuple[Effect, ...], bool] | None = None
        self._seen = ObservedSettings()
        self._report = TuningReport()
        self._view: TuneView = "changes"

    def compose_body(self) -> ComposeResult:
        """Top to bottom."""
        with Vertical(id="tune-knobs", classes="panel") as knobs:
            knobs.border_title = "Knobs"
            yield KnobPanel()
        yield ViewRow()
        with Horizontal(id="tune-plots", classes="panel") as plots:
            plots.border_title = "Throughput"
            yield Graph(
                Scale(text.count, least=10),
                Curve(lambda at: at.output_tokens, "$graph-tokens", "out tok/s"),
                id="tune-tokens",
            )
            yield Scatter(id="tune-settings")
        with ContentSwitcher(initial=self._view, id="tune-views"):
            with Vertical(id="changes", classes="panel") as changes:
                changes.border_title = "Effect of changes"
                yield EffectTable()
                yield Static(id="change", markup=False)
            with Vertical(id="autotune", classes="panel") as found:
                found.border_title = "Autotune"
                yield TuningPanel()
            yield WorkloadPanel(id="workload")
            yield BenchesPanel(self.link, id="benchmarks")
        yield AdvicePanel()

    # -- what is shown ------------------------------------------------------------------------------------------------

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer what has something to work on: a model, a change, the best settings, a plot, a result. The key of a run
        stops it."""
        report, has_model, has_plots = self._report, view.snapshot.status.spec is not None, self._view in _WITH_PLOTS
        accepts = has_model and view.published.draining_since is None
        states: dict[str, bool | str] = dict.fromkeys(_KNOB_IDS, has_model)
        states |= dict.fromkeys(("tune.latency", "graphs.zoom", "graphs.earlier", "graphs.later"), has_plots)
        return (
            super().key_states(view)
            | states
            | self.query_one(BenchesPanel).key_states
            | {
                "tune.find": "Stop autotune" if report.under_way else accepts,
                "tune.load": "Stop load" if report.load_clients else accepts and not report.under_way,
                "tune.use": report.best is not None and not report.under_way and not report.applied,
                "tune.undo": self._view == "changes" and bool(self.console.effects.found),
                "tune.bench": self._view != "benchmarks",
                "tune.changes": self._view != "changes",
            }
        )

    def update_body(self, view: View) -> None:
        """Hand the snapshot on, to the view that is seen."""
        snapshot = view.snapshot
        self.query_one(AdvicePanel).show(view)
        self.query_one(KnobPanel).show(snapshot, turns=not view.is_read_only)
        before, self._report = self._report, self.link.tuning.report()
        bench = self.link.benches.report()
        if self._report.under_way and not before.under_way:
            self.action_show("autotune")
        self.query_one(ViewRow).show(self._view)
        if self._view in _WITH_PLOTS:
            self._show_plots(snapshot, f"{brief(bench)}; b shows it" if bench.under_way else _sample_text(self._report))
        match self._view:
            case "changes":
                named = len(snapshot.models) > 1
                self._show_effects(self.console.effects.found, named=named, read_only=view.is_read_only)
            case "autotune":
                self.query_one(TuningPanel).show(self._report, read_only=view.is_read_only)
            case "workload":
                self.query_one(WorkloadPanel).show(snapshot)
            case "benchmarks":
                self.query_one(BenchesPanel).show(bench)

    def action_show(self, name: TuneView) -> None:
        """Show a view, and move the focus into it."""
        if name != self._view:
            self._view = name
            self.query_one("#tune-plots").display = name in _WITH_PLOTS
            self.query_one("#tune-views", ContentSwitcher).current = name
            self.redraw()
        view = self.query_one(f"#{name}")
        tables = (table for table in view.query(Table) if all(node.display for node in table.ancestors_with_self))
        (view if view.can_focus else next(tables, view)).focus(scroll_visible=False)

    def action_next_view(self) -> None:
        """Show the next view."""
        views = get_args(TuneView)
        self.action_show(views[(views.index(self._view) + 1) % len(views)])

    def _show_plots(self, snapshot: Snapshot, subtitle: str) -> None:
        graph = self.query_one(Graph)
        graph.show(_tokens_title(snapshot, graph.span_text(self._zoom)), span_of(snapshot, self._zoom))
        at = "" if self._pointed_at is None else f" at {text.local_time(self._pointed_at)}"
        set_frame(self.query_one("#tune-plots"), f"Throughput{at}", subtitle)
        self._show_settings(snapshot)

    def _show_effects(self, found: tuple[Effect, ...], *, named: bool, read_only: bool) -> None:
        if self._effects != (found, named):
            self._effects = (found, named)
            self.query_one(EffectTable).show_effects(found, named=named, read_only=read_only)
            self._show_change()

    def _show_settings(self, snapshot: Snapshot) -> None:
        latency = "TTFT" if self._ttft else "ITL"
        if self._view == "autotune" and self._report.state != "none":
            title = Content.styled(f"tried: tok/s vs. {latency} p{self._report.percentile:g}", "$muted")
            points = points_of(self._report, ttft=self._ttft)
            self.query_one(Scatter).show(title, points, text.seconds, NOTHING_YET)
            return
        spec = snapshot.status.spec
        seen = self._seen.of(snapshot, spec.name if spec is not None else "")
        title = Content.styled(f"tok/s vs. {latency} p95", "$muted")
        self.query_one(Scatter).show(title, _points(seen, ttft=self._ttft), text.seconds, NO_POINTS)

    def _show_change(self) -> None:
        effect = self.query_one(EffectTable).chosen(self.console.effects.found)
        several = len(self.console.view.published.models) > 1
        label = effect_details(effect, named=several) if effect is not None else Content("")
        details = self.query_one("#change", Static)
        details.display = bool(self.console.effects.found)  # else the text of the empty table needs its rows
        details.update(for_terminal(self.app, label))

    def on_table_moved(self, event: Table.Moved) -> None:
        """Say more of another change."""
        self._show_change()
        self.offer_keys()

    def action_zoom(self) -> None:
        """Another span in the graph."""
        self._zoom = next_zoom(self._zoom)
        self.redraw()

    def action_readout(self, by: int) -> None:
        """Read the values of another moment in the graph."""
        self.query_one(Graph).move_cursor(by)

    def on_graph_pointed(self, event: Graph.Pointed) -> None:
        """Show the values of that moment."""
        self.query_one(Graph).point(event.at)
        self._pointed_at = event.at
        self.redraw()

    def action_latency(self) -> None:
        """The other latency."""
        self._ttft = not self._ttft
        self.redraw()

    # -- autotune -----------------------------------------------------------------------------------------------------

    def action_find(self) -> None:
        """Ask with what to begin, or stop what goes on."""
        if self._report.under_way:
            self.perform(self.link.tuning.cancel(), done="Settings restored")
            return
        if self.console.view.model is None:
            self._say_no_model()
        elif self.console.view.published.draining_since is not None:
            self._say_draining()
        else:
            self.console.action_autotune()

    def _say_no_model(self) -> None:
        starting = self.console.view.link_status.starting_text
        self.notify(starting or "No model loaded. Press 2 to load one.", severity="warning", markup=False)

    def _say_draining(self) -> None:
        self.notify("Draining: new requests are refused. Press D to accept them again.", severity="warning")

    def action_load(self) -> None:
        """Send sample requests for a while, or stop that."""
        if self._report.load_clients:
            self.perform(self.link.tuning.stop_load(), done="Sample load stopped")
        elif self.console.view.model is None:
            self._say_no_model()
        elif self.console.view.published.draining_since is not None:
            self._say_draining()
        elif self.console.view.published.running + self.console.view.published.queued:
            question = ConfirmScreen(
                "Send sample requests for 30 s?",
                "Requests are running: they get slower meanwhile.",
                yes="Send them",
                no="Cancel",
            )
            self.app.push_screen(question, lambda sure: self._start_load() if sure else None)
        else:
            self._start_load()

    def _start_load(self) -> None:
        command = self.link.tuning.start_load(self.console.view.model_name)
        self.perform(command, done="Sample load running for 30 s. After 10 s, change a setting with [ ] or - +.")

    def action_use_best(self) -> None:
        """Turn the knobs to it, and start with it from now on."""
        if self._report.best is None or self._report.under_way:
            self.notify("No best settings yet. Press f to run autotune.")
            return
        self.perform(self.link.tuning.use_best(), done="Best settings applied and saved")

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_undo(self) -> None:
        """Set the knob of the change under the cursor back."""
        effect = self.query_one(EffectTable).chosen(self.console.effects.found)
        if effect is None:
            self.notify("No changes yet.")
            return
        change, models = effect.change, self.console.view.published.models
        knob = next((each for each in KNOB_NAMES if each == change.knob), None)
        if knob is None:  # recorded by another version
            return
        name = knob_title(knob)
        back = knob_text(knob, change.before)
        if self._value(knob, change.model) == change.before:
            self.notify(f"{name} is already {back}.", markup=False)
            return
        self.console.turn(knob, change.before, change.model if len(models) > 1 else "")
        self.notify(f"{name} reset to {back}.", markup=False)

    def _value(self, knob: KnobName, name: str) -> float:
        """A knob's value now, of the model of that name."""
        view = self.console.view
        return knob_value(next((model for model in view.published.models if model.name == name), view.snapshot), knob)


def _sample_text(report: TuningReport) -> str:
    """ "sample load: 32 clients, 24 s left; s stops it", "" where none runs."""
    if not report.load_clients:
        return ""
    left = f"{math.ceil(report.load_left_s)} s left"
    return f"sample load: {text.plural(report.load_clients, 'client')}, {left}; s stops it"


def _points(seen: list[ObservedSetting], *, ttft: bool) -> list[Point]:
    """Those whose latency is known."""
    return [
        Point(latency, each.tokens_per_s, f"{each.workers}×{each.max_prompts}", each.now)
        for each in seen
        if (latency := each.ttft_s if ttft else each.itl_s) is not None
    ]


def _tokens_title(snapshot: Snapshot, span: str) -> Content:
    return Content.assemble(
        ("■ ", "$graph-tokens"),
        ("out tok/s ", "$muted"),
        (text.rate(snapshot.output_tokens_per_s), "bold"),
        (f"  {span}", "$muted"),
    )
