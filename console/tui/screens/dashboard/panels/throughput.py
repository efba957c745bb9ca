"""Throughput: the numbers that matter, readable from across the room, and how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, Vertical
from textual.content import Content
from textual.widgets import Digits, Static

from console import text
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.view import View
from console.tui.widgets.clickable import key_hint
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.graph import ZOOMS, Curve, Graph, Scale, Span
from console.tui.widgets.panel import set_subtitle
from engine.snapshot import Snapshot


class Stat(Vertical):
    """A caption, a big number and a line below. style: the CSS variable of its curve."""

    DEFAULT_CSS = """
    Stat { height: 5; width: 1fr; }
    Stat Static { height: 1; }
    Stat Digits { height: 3; text-style: bold; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._shown = ("", "", "")

    def compose(self) -> ComposeResult:
        """Top to bottom."""
        yield Static(classes="caption")
        yield Digits("-")
        yield Static(classes="detail")

    def show(self, caption: str, value: str, detail: Content) -> None:
        """value: digits and a decimal point, "-" for what is not known."""
        if self._shown == (caption, value, detail.plain):
            return
        self._shown = (caption, value, detail.plain)
        self.query_one(".caption", Static).update(Content.styled(caption, "$muted"), layout=False)
        self.query_one(Digits).update(value)
        self.query_one(".detail", Static).update(for_terminal(self.app, detail), layout=False)


class ThroughputPanel(DashboardPanel):
    """Big numbers where there is room, a bold line where there is not; graphs below in either case. The title leads to
    insight."""

    NAME = "throughput"
    TITLE = "Throughput"
    PLACE = "right"
    ORDER = 10

    DEFAULT_CSS = """
    ThroughputPanel { height: 1fr; }
    ThroughputPanel #numbers { height: 5; }
    ThroughputPanel #line { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
    ThroughputPanel #graphs { grid-size: 2 2; grid-gutter: 0 2; height: 2fr; }
    ThroughputPanel #tokens { height: 1fr; }
    ThroughputPanel Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """
    SECONDS: ClassVar[dict[int, str]] = {1: "1 s", 2: "2 s", 5: "5 s", 10: "10 s"}

    def __init__(self) -> None:
        super().__init__()
        self._zoom = 0
        self._line = Content("")

    def compose(self) -> ComposeResult:
        """Numbers, the main graph, four smaller ones."""
        with Horizontal(id="numbers"):
            yield Stat(id="stat-tokens")
            yield Stat(id="stat-ttft")
            yield Stat(id="stat-itl")
            yield Stat(id="stat-queue")
        yield Static(id="line")
        yield Graph(Scale(text.count, least=10), Curve(lambda at: at.output_tokens, "$graph-tokens"), id="tokens")
        with Grid(id="graphs"):
            yield Graph(
                Scale(text.seconds, least=0.01),
                Curve(lambda at: at.ttft_p50, "$graph-ttft"),
                Curve(lambda at: at.ttft_p95, "$graph-ttft-spread"),
                id="ttft",
            )
            yield Graph(
                Scale(text.seconds, least=0.01),
                Curve(lambda at: at.itl_p50, "$graph-itl"),
                Curve(lambda at: at.itl_p95, "$graph-itl-spread"),
                id="itl",
            )
            yield Graph(
                Scale(text.count, least=4),
                Curve(lambda at: at.running, "$graph-running"),
                Curve(lambda at: at.running + at.queued, "$graph-queued"),
                id="requests",
            )
            yield Graph(Scale(text.percent, bound=1.0), Curve(lambda at: at.kv_usage, "$graph-kv"), id="kv")

    def on_mount(self) -> None:
        """Name the way to insight."""
        self.border_title = Content.assemble("Throughput  ", key_hint(self.screen, "insight", "insight", "app.insight"))

    def zoom(self) -> None:
        """The next of the spans, and back to the first."""
        self._zoom = (self._zoom + 1) % len(ZOOMS)

    def show(self, view: View) -> None:
        """Show the numbers and the graphs."""
        snapshot = view.snapshot
        self._show_numbers(snapshot)
        numbers = for_terminal(self.app, number_lines(snapshot, self.scrollable_content_region.width))
        if not numbers.is_same(self._line):
            self._line = numbers
            self.query_one("#line", Static).update(numbers, layout=False)
        step = ZOOMS[self._zoom]
        set_subtitle(self, f"a column is {self.SECONDS[step]}")
        plain = Span(snapshot.history, (), step)
        self.query_one("#tokens", Graph).show(_tokens_title(snapshot), Span(snapshot.history, snapshot.marks, step))
        for name, title in _titles(snapshot).items():
            self.query_one(f"#{name}", Graph).show(title, plain)

    def _show_numbers(self, snapshot: Snapshot) -> None:
        tokens, ttft, itl, queue = (
            self.query_one(f"#stat-{name}", Stat) for name in ("tokens", "ttft", "itl", "queue")
        )
        tokens.show(
            "out tok/s", f"{snapshot.output_tokens_per_s:.0f}", _pair("in", text.rate(snapshot.prompt_tokens_per_s))
        )
        ttft.show(*_big_seconds("TTFT", snapshot.ttft.p50), _pair("p95", text.seconds(snapshot.ttft.p95)))
        itl.show(*_big_seconds("ITL", snapshot.itl.p50), _pair("p95", text.seconds(snapshot.itl.p95)))
        queue.show("running", str(snapshot.running), _pair("queued", str(snapshot.queued)))


def number_lines(snapshot: Snapshot, width: int) -> Content:
    """Return the big numbers as two rows of `width` cells; the last are left out where they do not fit."""
    hits = text.percent(snapshot.prefix_hit_rate)
    first = (
        _number("out", text.rate(snapshot.output_tokens_per_s), " tok/s", "$graph-tokens"),
        _number("in", text.rate(snapshot.prompt_tokens_per_s), " tok/s", "$foreground"),
        _number("running", str(snapshot.running), "", "$graph-running"),
        _number("queue", str(snapshot.queued), "", "$graph-queued"),
        _number("KV", text.percent(snapshot.kv_usage), "", "$graph-kv"),
    )
    second = (
        _number("TTFT p50", text.seconds(snapshot.ttft.p50), "", "$graph-ttft"),
        _number("p95", text.seconds(snapshot.ttft.p95), "", "$graph-ttft"),
        _number("ITL p50", text.seconds(snapshot.itl.p50), "", "$graph-itl"),
        _number("p95", text.seconds(snapshot.itl.p95), "", "$graph-itl"),
        _number("prefix hits", hits, "", "$foreground"),
    )
    return Content("\n").join(_join(line, width) for line in (first, second))


def _join(numbers: Sequence[Content], width: int) -> Content:
    shown = list(numbers)
    while len(shown) > 1 and sum(number.cell_length + 2 for number in shown) - 2 > width > 0:
        shown.pop()
    return Content("  ").join(shown)


def _titles(snapshot: Snapshot) -> dict[str, Content]:
    return {
        "ttft": Content.assemble(
            ("■ ", "$graph-ttft"), ("TTFT p50  ", "$muted"), ("■ ", "$graph-ttft-spread"), ("p95", "$muted")
        ),
        "itl": Content.assemble(
            ("■ ", "$graph-itl"), ("ITL p50  ", "$muted"), ("■ ", "$graph-itl-spread"), ("p95", "$muted")
        ),
        "requests": Content.assemble(
            ("■ ", "$graph-running"), ("running  ", "$muted"), ("■ ", "$graph-queued"), ("queued", "$muted")
        ),
        "kv": Content.assemble(
            ("■ ", "$graph-kv"),
            ("KV ", "$muted"),
            (text.percent(snapshot.kv_usage), "bold"),
            ("  prefix hits ", "$muted"),
            (text.percent(snapshot.prefix_hit_rate), "bold"),
        ),
    }


def _tokens_title(snapshot: Snapshot) -> Content:
    title = Content.assemble(("■ ", "$graph-tokens"), ("out tok/s", "$muted"))
    if not snapshot.marks:
        return title
    return Content.assemble(title, ("  ┊ ", "$graph-mark"), (f"{snapshot.marks[-1].text}", "$muted"))


def _number(caption: str, value: str, unit: str, style: str) -> Content:
    return Content.assemble((f"{caption} ", "$muted"), (value, f"bold {style}"), (unit, "$muted"))


def _pair(caption: str, value: str) -> Content:
    return Content.assemble((f"{caption} ", "$muted"), (value, "bold"))


def _big_seconds(caption: str, value_s: float | None) -> tuple[str, str]:
    """Caption with the unit, and the digits."""
    if value_s is None:
        return f"{caption} ms", "-"
    number, _, unit = text.seconds(value_s).partition(" ")
    return f"{caption} {unit or 'min'}", number
