"""Insight: where time, tokens and energy go, over a session whose counters the operator can reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.insight import text as words
from console.tui.screens.insight.text import Room
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from engine.snapshot import Snapshot

# InsightPanel: a titled panel as high as what it says.

_MIN_CELLS = 30


class InsightPanel(Static):
    """words: the lines for a snapshot, in the room that there is."""

    DEFAULT_CSS = """
    InsightPanel { height: auto; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, title: str, words: Callable[[Snapshot, Room], Iterable[Content]], *, id: str) -> None:
        super().__init__(id=id, classes="panel", markup=False)
        self.border_title = title
        self._words = words
        self._snapshot: Snapshot | None = None
        self._shown = Content("")

    def show(self, snapshot: Snapshot) -> None:
        """Draw the lines again, where anything changed."""
        self._snapshot = snapshot
        room = Room(max(_MIN_CELLS, self.content_size.width), is_ascii(self.app), is_lettered(self.app))
        shown = for_terminal(self.app, Content("\n").join(self._words(snapshot, room)))
        if not shown.is_same(self._shown):
            higher = shown.plain.count("\n") != self._shown.plain.count("\n")
            self._shown = shown
            self.update(shown, layout=higher)

    def on_resize(self) -> None:
        """Charts are drawn to the width."""
        if self._snapshot is not None:
            self.show(self._snapshot)


class InsightScreen(Dialog[None]):
    """Two columns where it is wide, one that scrolls where it is not."""

    AUTO_FOCUS = "#insight-page"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "r",
            "reset",
            "Reset counters",
            id="insight.reset",
            mutates=True,
            tooltip="Reset the counters of the session",
        ),
        ConsoleBinding(
            "l",
            "measure",
            "Measure the processor",
            id="insight.measure",
            mutates=True,
            tooltip="Measure peak CPU throughput: takes all cores for some seconds",
        ),
        Binding("escape,n,q", "dismiss", "Close", id="insight.close", tooltip="Close insight", key_display="esc"),
    ]

    def compose(self) -> ComposeResult:
        """Left: time and how requests ended. Right: lengths and what the devices did."""
        with VerticalScroll(id="insight-page") as page:
            page.border_title = "Insight"
            with Horizontal(id="insight-columns"):
                with Vertical(classes="column"):
                    yield InsightPanel("Session", words.session, id="insight-session")
                    yield InsightPanel("Latency breakdown", words.time_spent, id="insight-time")
                    yield InsightPanel("Goodput", words.goodput, id="insight-goodput")
                    yield InsightPanel("How requests ended", words.endings, id="insight-endings")
                    yield InsightPanel("Energy", words.power, id="insight-energy")
                with Vertical(classes="column"):
                    yield InsightPanel("Prompts, in tokens", words.prompts, id="insight-prompts")
                    yield InsightPanel("Answers, in tokens", words.answers, id="insight-answers")
                    yield InsightPanel("Context", words.context, id="insight-context")
                    yield InsightPanel("Draft acceptance by position", words.drafts, id="insight-drafts")
                    yield InsightPanel("Device utilisation", words.work, id="insight-work")

    def on_mount(self) -> None:
        """Never empty."""
        self.redraw()

    def show_view(self, view: View) -> None:
        """Draw every panel."""
        snapshot = view.snapshot
        self.query_one("#insight-drafts").display = bool(snapshot.insight.drafts)
        with self.app.batch_update():
            for panel in self.query(InsightPanel):
                panel.show(snapshot)

    def action_reset(self) -> None:
        """Reset the counters, after a question."""
        question = ConfirmScreen(
            "Reset counters?",
            "These numbers start again at zero. Totals, graphs and today's energy stay.",
            yes="Reset",
            no="Cancel",
        )
        self.app.push_screen(question, lambda sure: self._reset() if sure else None)

    def _reset(self) -> None:
        self.console.perform(self.console.link.insight.reset(), done="Counters reset")

    def action_measure(self) -> None:
        """Have the processor measured."""
        self.notify("Measuring peak CPU throughput takes some seconds.", markup=False)
        self.console.perform(self.console.link.insight.measure(), done="Peak CPU throughput measured")
