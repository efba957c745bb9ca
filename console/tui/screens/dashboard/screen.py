"""The dashboard: devices, workers, throughput and requests at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from console import text
from console.adviser import Advice, Look, Open, Turn
from console.tui.keymap import INSIGHT
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.dashboard.devices import DevicesPanel, is_many
from console.tui.screens.dashboard.workers import WorkersPanel
from console.tui.screens.requests.table import RequestsPanel
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.view import View
from console.tui.widgets.clickable import clickable, key_of
from console.tui.widgets.glyphs import fitted
from console.tui.widgets.panel import refresh_rows
from console.tui.widgets.throughput import ThroughputPanel
from engine.snapshot import Snapshot, Totals

# Advice: what the adviser has to say, a line each with the knob to turn; no row at all where it has nothing to say.

_ROWS_A_LINE = 14


class AdvicePanel(Widget):
    """The most urgent first. What can be done is a link, as is the cross that dismisses it; a key does the first."""

    DEFAULT_CSS = """
    AdvicePanel {
        height: auto; width: 1fr; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
        link-style: bold; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $background; link-background-hover: $primary;
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._said: tuple[Advice, ...] = ()

    def show(self, said: tuple[Advice, ...]) -> bool:
        """Draw anew, where anything changed; whether it did."""
        if said == self._said:
            return False
        resized = len(said) != len(self._said)
        self._said = said
        self.refresh(layout=resized)
        return True

    @property
    def said(self) -> tuple[Advice, ...]:
        """All of it, shown or not."""
        return self._said

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A row each, as far as that leaves room for the rest."""
        return min(len(self._said), max(1, viewport.height // _ROWS_A_LINE))

    def render(self) -> Content:
        """All lines."""
        shown, keyed, key = (
            self._said[: self.size.height],
            first_actionable(self._said),
            key_of(self.screen, "advice.take"),
        )
        lines = []
        for index, advice in enumerate(shown):
            more = len(self._said) - len(shown) if index == len(shown) - 1 else 0
            lines.append(advice_line(advice, index, self.size.width, key=key if index == keyed else "", more=more))
        return fitted(self.app, Content("\n").join(lines))


def first_actionable(said: tuple[Advice, ...]) -> int | None:
    """Which of them the key does: the first of which anything can be done."""
    return next((index for index, advice in enumerate(said) if advice.action is not None), None)


def advice_line(advice: Advice, index: int, width: int, *, key: str = "", more: int = 0) -> Content:
    """One piece of advice in `width` cells: the whole sentence, or the brief one where that does not fit."""
    do = Content("")
    if advice.action is not None:
        label = f" {key} {advice.action.label} " if key else f" {advice.action.label} "
        do = clickable(label, f"screen.take_advice({index})", "bold")
    others = Content.styled(f" +{more}", "$muted") if more else Content("")
    end = Content.assemble(others, " ", do, clickable(" × ", f"screen.dismiss_advice({index})", "bold"))
    room = max(0, width - end.cell_length - 2)
    said = advice.sentence if len(advice.sentence) <= room else text.clip(advice.brief, room)
    return Content.assemble(("▲ ", "$warning"), f"{said:<{room}}", end)


# Session: what the engine has done since it started, and which model it does it with.


class SessionPanel(Widget):
    """As many lines as there is room for, the most telling first."""

    DEFAULT_CSS = """
    SessionPanel { height: 1fr; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "Session"
        self._lines: list[Content] = []

    def show(self, snapshot: Snapshot) -> None:
        """Draw anew, where anything changed."""
        before = self._lines
        self._lines = [
            fitted(self.app, Content.assemble((f"{name:<10}", "$muted"), value))
            for name, value in session_facts(snapshot)
        ]
        refresh_rows(self, before, self._lines)

    def render(self) -> Content:
        """Name and number, two columns."""
        return Content("\n").join(self._lines[: max(1, self.size.height)])


def session_facts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    totals, model = snapshot.totals, snapshot.status.model
    yield "up", _uptime(snapshot.uptime_s)
    yield "requests", " · ".join(_requests(snapshot))
    tokens = (totals.output_tokens, "out"), (totals.prompt_tokens, "in"), (totals.cached_tokens, "cached")
    yield "tokens", " · ".join(f"{text.count(number)} {word}" for number, word in tokens)
    yield "errors", " · ".join(_errors(totals)) or "none"
    if model is not None:
        yield "model", f"{text.count(model.parameters)} parameters · {model.architecture}"
        yield "context", f"{model.max_model_len:,} tokens · {model.kv_tokens:,} in KV pages of {model.page_tokens}"
        attention = f" · {model.attention} attention" if model.attention else ""
        yield "backend", f"{model.backend} · {model.dtype} · {text.size(model.weights_bytes)} weights{attention}"
    if totals.draft_tokens:
        held = text.percent(totals.draft_accepted / totals.draft_tokens)
        yield "drafts", f"{totals.draft_tokens:,} tokens guessed ahead · {held} held"


def _requests(snapshot: Snapshot) -> Iterator[str]:
    """Those that ended and how, then those that live."""
    finished = snapshot.totals.finished
    ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(finished.items()) if count)
    yield f"{sum(finished.values()):,} done" + (f" ({ended})" if ended else "")
    for number, word in ((snapshot.running, "running"), (snapshot.queued, "queued")):
        if number:
            yield f"{number:,} {word}"


def _errors(totals: Totals) -> Iterator[str]:
    """Requests that got less than they asked for, then what the engine had to do over."""
    for number, word in (
        (totals.finished.get("error", 0), "failed"),
        (totals.finished.get("timeout", 0), "timed out"),
        (totals.finished.get("cancelled", 0), "cancelled"),
        (totals.rejected, "rejected"),
        (totals.requeued, "moved"),
        (totals.preemptions, "preempted"),
        (totals.worker_restarts, "workers restarted"),
    ):
        if number:
            yield f"{number:,} {word}"


def _uptime(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02d}:{rest:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"


class DashboardScreen(ConsoleScreen):
    """What is on and how well it goes."""

    MODE = "dashboard"
    AUTO_FOCUS = "#request-table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "x,delete", "cancel", "Cancel", id="request.cancel", tooltip="Cancel the selected request", key_display="x"
        ),
        Binding("i", "inspect", "Worker", id="worker.open", tooltip="Look closely at the selected worker"),
        replace(INSIGHT, show=True),
        Binding("t", "take_advice", "Advice", id="advice.take", tooltip="Take the advice: turn the knob it names"),
        Binding(
            "T",
            "dismiss_advice",
            "Dismiss advice",
            id="advice.dismiss",
            tooltip="Dismiss the first advice for this session",
            show=False,
        ),
        Binding("z", "zoom", "Zoom", id="graphs.zoom", tooltip="Show a longer or shorter time in the graphs"),
        Binding("escape", "newest", "Newest", id="request.newest", tooltip="Show the newest again", show=False),
    ]

    def compose_body(self) -> ComposeResult:
        """Left: what there is. Right: how it goes. Below: for whom, and what could be better."""
        yield DevicesPanel(id="many-devices")
        with Container(id="overview"):
            with Vertical(id="machines"):
                yield DevicesPanel(id="devices")
                yield WorkersPanel(id="workers")
                yield SessionPanel(id="session")
            yield ThroughputPanel(id="throughput")
        yield RequestsPanel(id="requests-panel")
        yield AdvicePanel(id="advice")

    def on_resize(self) -> None:
        """Devices take another form, of another height."""
        self.call_after_refresh(self._fit_devices)

    def _fit_devices(self) -> None:
        for panel in self.query(DevicesPanel):
            panel.fit()

    def update_body(self, view: View) -> None:
        """Hand the snapshot on to the panels."""
        snapshot = view.snapshot
        many = is_many(snapshot.devices)
        self.set_class(many, "-many")
        self.query_one("#many-devices" if many else "#devices", DevicesPanel).show(snapshot)
        self.query_one(WorkersPanel).show(view)
        self.query_one(SessionPanel).show(snapshot)
        self.query_one(ThroughputPanel).show(snapshot)
        self.query_one(RequestsPanel).show(view)
        self._show_advice()

    def on_workers_panel_opened(self, event: WorkersPanel.Opened) -> None:
        """Enter on a worker, or two clicks."""
        self.app.push_screen(WorkerScreen(event.worker))

    def action_inspect(self) -> None:
        """Look at the worker under the cursor, or the first one."""
        table = self.query_one(WorkersPanel).table
        if table.rows:
            table.action_choose()
        else:
            self.notify("There is no worker yet. Press 2 to load a model.", severity="warning")

    def action_zoom(self) -> None:
        """Another span in the graphs."""
        panel = self.query_one(ThroughputPanel)
        panel.zoom()
        panel.show(self.console.view.snapshot)

    def action_newest(self) -> None:
        """Choose no request, and show the first ones."""
        self.query_one(RequestsPanel).table.let_go()

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        key = self.query_one(RequestsPanel).table.cursor_key
        self.cancel_request(next((row for row in self.console.view.published.requests if row.id == key), None))

    # -- advice --------------------------------------------------------------------------------------------------------

    def _show_advice(self) -> None:
        if self.query_one(AdvicePanel).show(self.console.adviser.said):
            self.refresh_bindings()

    def action_take_advice(self, index: int | None = None) -> None:
        """Do what the first advice says, or that one: turn the knob, or go where it can be changed."""
        said = self.query_one(AdvicePanel).said
        at = first_actionable(said) if index is None else index
        if at is None or at >= len(said):
            return
        match said[at].action:
            case Turn(knob=knob, by=by):
                self.console.adviser.taken(said[at])
                self.console.action_step(knob, by)
            case Open(mode=mode):
                self.console.action_open(mode)
            case Look(worker=worker):
                self.app.push_screen(WorkerScreen(worker))
        self._show_advice()

    def action_dismiss_advice(self, index: int = 0) -> None:
        """Hear no more of the first advice, or of that one."""
        said = self.query_one(AdvicePanel).said
        if index < len(said):
            self.console.adviser.dismiss(said[index])
            self._show_advice()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Advice can be taken and dismissed where there is any."""
        if action not in ("take_advice", "dismiss_advice") or not self.is_mounted:
            return True
        said = self.query_one(AdvicePanel).said
        return bool(said) if action == "dismiss_advice" else first_actionable(said) is not None
