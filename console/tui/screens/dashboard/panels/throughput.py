"""Throughput: the numbers that matter, readable from across the room, and how they came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from types import MappingProxyType
from typing import Literal, NamedTuple

from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, Vertical
from textual.content import Content
from textual.events import MouseMove
from textual.widgets import Digits, Static

from console import text
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.view import View, workers_of
from console.tui.widgets.glyphs import for_terminal, is_lettered
from console.tui.widgets.graph import (
    GUTTER,
    HISTORY_S,
    Curve,
    Graph,
    Plot,
    Scale,
    Span,
    mark_sign,
    moment_text,
    moment_under,
    next_zoom,
    span_of,
)
from console.tui.widgets.latency import advice_line
from console.tui.widgets.panel import after_layout, has_line_below, set_subtitle, set_title
from console.tui.widgets.plot import Columns, Sample, seconds_per_column
from console.tui.widgets.worker_text import kv_tokens_text
from engine.backends.base import StepLimit
from engine.snapshot import Snapshot

SloState = Literal["within", "near", "over"]
_SLO_STYLES: Mapping[SloState, str] = MappingProxyType({"within": "$success", "near": "$warning", "over": "$error"})
_NEAR = 0.9
_DIGIT_CELLS = 3


def slo_state(value_s: float | None, limit_s: float | None) -> SloState | None:
    """Return how a latency stands to its SLO; None where one of them is not known."""
    if value_s is None or limit_s is None:
        return None
    return "over" if value_s > limit_s else "near" if value_s > _NEAR * limit_s else "within"


class Stat(Vertical):
    """A caption, a big number and a line below."""

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

    def show(
        self, caption: str, value: str, detail: Content, slo: SloState | None = None, *, brief: Content | None = None
    ) -> None:
        """value: digits and a decimal point, "-" for what is not known.  slo: how the number stands to its SLO.

        brief: the detail where there is no room for all of it.
        """
        if brief is not None and 0 < self.content_size.width < detail.cell_length:
            detail = brief
        for state in _SLO_STYLES:
            self.set_class(state == slo, f"-{state}")
        if self._shown == (caption, value, detail.markup):
            return
        self._shown = (caption, value, detail.markup)
        self.query_one(".caption", Static).update(Content.styled(caption, "$muted"), layout=False)
        self.query_one(Digits).update(value)
        self.query_one(".detail", Static).update(for_terminal(self.app, detail), layout=False)


class _LimitLook(NamedTuple):
    """A limit of steps: in words, its sign, also without block characters and colours, and its colour."""

    words: str
    sign: str
    letter: str
    style: str


_LIMITS: Mapping[StepLimit, _LimitLook] = MappingProxyType(
    {
        "kv_pages": _LimitLook("KV pages", "━", "K", "$graph-kv"),
        "max_prompts": _LimitLook("max prompts", "━", "M", "$graph-queued"),
        "step_tokens": _LimitLook("step tokens", "━", "T", "$accent"),
        "none": _LimitLook("no work", "─", "-", "$graph-axis"),
    }
)


def limit_columns(columns: Columns) -> list[StepLimit | None]:
    """The limit of most of the steps of each column, oldest first; None where that is not known."""

    def share(limit: StepLimit) -> list[float | None]:
        return columns.values(lambda at: None if at.limit is None else at.limit == limit)

    shares = {limit: share(limit) for limit in _LIMITS}
    return [_most({limit: values[column] for limit, values in shares.items()}) for column in range(columns.width)]


def _most(shares: Mapping[StepLimit, float | None]) -> StepLimit | None:
    found = [(value, limit) for limit, value in shares.items() if value]
    return max(found)[1] if found else None


class LimitStrip(Plot):
    """One row beneath a graph of the same width and span: what kept the steps of each moment from doing more."""

    DEFAULT_CSS = """
    LimitStrip { height: 1; width: 1fr; }
    LimitStrip.-unknown { display: none; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._span, self._width, self._step = Span(), 0, 1
        self._limits: list[StepLimit | None] = []
        self._missed: list[int] = []

    def show(self, span: Span) -> None:
        """Draw it again, where anything changed."""
        width = max(0, self.size.width - GUTTER)
        if (span.history, span.seconds, width) == (self._span.history, self._span.seconds, self._width):
            return
        before = self._limits, self._missed, self._width
        self._span, self._width = span, width
        step = self._step = seconds_per_column(span.seconds, width, max(HISTORY_S, span.seconds))
        columns = span.columns(width, step)
        self._limits, self._missed = limit_columns(columns), columns.missed
        if before != (self._limits, self._missed, width):
            self.refresh()

    def on_resize(self) -> None:
        """Another width shows another span."""
        self.show(self._span)

    def on_mouse_move(self, event: MouseMove) -> None:
        """Say which moment is under the mouse."""
        self.post_message(Graph.Pointed(moment_under(self, event.x, self._span.history, self._step)))

    def on_leave(self) -> None:
        """No moment is under the mouse."""
        self.post_message(Graph.Pointed(None))

    def line(self, y: int) -> Content:
        """A sign for each column."""
        lettered = is_lettered(self.app)
        cells = [(" ", "") if limit is None else _limit_sign(limit, lettered) for limit in self._limits]
        for column in self._missed:
            cells[column] = ("·", "$graph-axis")
        runs = [("".join(sign for sign, _ in run), style) for style, run in groupby(cells, lambda cell: cell[1])]
        return for_terminal(self.app, Content.assemble((f"{'limit':>{GUTTER - 1}}▕", "$graph-axis"), *runs))


def _limit_sign(limit: StepLimit, lettered: bool) -> tuple[str, str]:
    look = _LIMITS[limit]
    return look.letter if lettered else look.sign, look.style


def limit_legend(span: Span, *, lettered: bool = False) -> list[Content]:
    """Each limit of the span in words with its sign: the one now, then the most frequent, and no work last; nothing
    where none is known."""
    since = span.history[-1].at - span.seconds if span.history else 0.0
    shown = list(takewhile(lambda sample: sample.at > since, reversed(span.history)))
    limits = [sample.limit for sample in reversed(shown) if sample.limit is not None]
    frequent = (limit for limit, _ in Counter(limits).most_common())
    order = sorted(frequent, key=lambda limit: (limit == "none", limit != limits[-1]))
    return [Content.assemble(_limit_sign(limit, lettered), (f" {_LIMITS[limit].words}  ", "$muted")) for limit in order]


class ThroughputPanel(DashboardPanel):
    """Big numbers where there is room, a bold line where there is not; graphs below in either case."""

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

    def __init__(self) -> None:
        super().__init__()
        self._zoom = 60
        self._cursor: float | None = None
        self._ended = 0.0
        self._line = Content("")
        self._view: View | None = None

    def compose(self) -> ComposeResult:
        """Numbers, the main graph, four smaller ones."""
        with Horizontal(id="numbers"):
            yield Stat(id="stat-tokens")
            yield Stat(id="stat-ttft")
            yield Stat(id="stat-itl")
            yield Stat(id="stat-queue")
        yield Static(id="line")
        yield Graph(
            Scale(text.count, least=10),
            Curve(lambda at: at.output_tokens, "$graph-tokens", "out tok/s"),
            note=self._limit_of,
            id="tokens",
        )
        yield LimitStrip(id="limits")
        with Grid(id="graphs"):
            yield Graph(
                Scale(text.seconds, least=0.01, clips=True),
                Curve(lambda at: at.ttft_p50, "$graph-ttft", "TTFT p50"),
                Curve(lambda at: at.ttft_p95, "$graph-ttft-spread", "p95"),
                names_marks=False,
                id="ttft",
            )
            yield Graph(
                Scale(text.seconds, least=0.01, clips=True),
                Curve(lambda at: at.itl_p50, "$graph-itl", "ITL p50"),
                Curve(lambda at: at.itl_p95, "$graph-itl-spread", "p95"),
                names_marks=False,
                id="itl",
            )
            yield Graph(
                Scale(text.count, least=4),
                Curve(lambda at: at.running, "$graph-running", "running"),
                Curve(lambda at: at.running + at.queued, "$graph-queued", "queued", lambda at: at.queued),
                names_marks=False,
                id="requests",
            )
            yield Graph(
                Scale(text.percent, bound=1.0),
                Curve(lambda at: at.kv_usage, "$graph-kv", "KV"),
                names_marks=False,
                id="kv",
            )

    def _limit_of(self, samples: Sequence[Sample]) -> Content:
        """Return what kept most of the steps of samples from doing more, in words."""
        limits = Counter(sample.limit for sample in samples if sample.limit is not None).most_common(1)
        if not limits:
            return Content("")
        limit, lettered = limits[0][0], is_lettered(self.app)
        return Content.assemble(("limit ", "$muted"), _limit_sign(limit, lettered), f" {_LIMITS[limit].words}  ")

    def on_resize(self) -> None:
        """Titles are cut to the width."""
        after_layout(self, self._show_again)

    def _show_again(self) -> None:
        if self._view is not None:
            self.show(self._view)

    def zoom(self) -> None:
        """The next of the spans, and back to the first."""
        self._zoom = next_zoom(self._zoom)

    def show(self, view: View) -> None:
        """Show the numbers and the graphs."""
        self._view, snapshot = view, view.snapshot
        self._show_numbers(snapshot)
        numbers = for_terminal(self.app, number_lines(snapshot, self.scrollable_content_region.width))
        if not numbers.is_same(self._line):
            self._line = numbers
            self.query_one("#line", Static).update(numbers, layout=False)
        span = span_of(snapshot, self._zoom)
        self._ended = span.history[-1].at if span.history else 0.0
        legend = limit_legend(span, lettered=is_lettered(self.app))
        strip, graph = self.query_one(LimitStrip), self.query_one("#tokens", Graph)
        strip.set_class(not legend, "-unknown")
        strip.show(span)
        caption = Content.styled("" if strip.display else "limit ", "$muted")
        graph.show(_tokens_title(span, legend, caption, graph.size.width), span)
        for name, title in _titles(snapshot).items():
            self.query_one(f"#{name}", Graph).show(title, span)
        self._show_frame(snapshot)

    def _show_frame(self, snapshot: Snapshot) -> None:
        """Above, what takes the time of requests, where Session is hidden or has fewer than three rows; below, the KV
        tokens and the time. Where there is no line below, the time goes above, if a change to make has room after it.
        """
        has_session = any(panel.display and panel.size.height > 2 for panel in self.screen.query("#session"))
        advice, time = "" if has_session else advice_line(snapshot.why), self._time()
        above, below = [Content(self.TITLE)], ""
        if has_line_below(self):
            below = " · ".join(filter(None, (self._kv_tokens(snapshot), time)))
        elif time:
            change = advice.rpartition(" (")[0]
            if self._cursor is not None or len(f"{self.TITLE} · {time} · {change}") <= self.size.width:
                above.append(Content.styled(time, "$muted"))
        if advice:
            above.append(Content.styled(advice, "$warning"))
        set_title(self, Content.styled(" · ", "$muted").join(above))
        set_subtitle(self, below)

    def _kv_tokens(self, snapshot: Snapshot) -> str:
        """KV tokens in use, "" where the row of numbers has them."""
        tokens = kv_tokens_text(workers_of(snapshot))
        return "" if tokens == "–" or self.query_one("#line").display else f"KV {tokens} tokens"

    def point(self, at: float | None) -> None:
        """Show that moment in every graph, and its time in the frame."""
        self._cursor = at
        for graph in self.query(Graph):
            graph.point(at)
        if self._view is not None:
            self._show_frame(self._view.snapshot)

    def _time(self) -> str:
        """The time of the values that graphs show, else how long the main one shows."""
        if self._cursor is not None:
            return moment_text(self._cursor, self._ended)
        return self.query_one("#tokens", Graph).span_text(self._zoom)

    def _show_numbers(self, snapshot: Snapshot) -> None:
        tokens, ttft, itl, queue = (
            self.query_one(f"#stat-{name}", Stat) for name in ("tokens", "ttft", "itl", "queue")
        )
        slo = snapshot.insight.goodput
        big = _big_rate("out", snapshot.output_tokens_per_s, tokens.content_size.width)
        tokens.show(*big, _pair("in", text.rate(snapshot.prompt_tokens_per_s)))
        for stat, caption, latency, limit_s in (
            (ttft, "TTFT", snapshot.ttft, slo.slo_ttft_s),
            (itl, "ITL", snapshot.itl, slo.slo_itl_s),
        ):
            p95 = _p95(latency.p95, limit_s, "$foreground", "")
            brief = _latency("p95", latency.p95, limit_s, "$foreground")
            stat.show(*_big_seconds(caption, latency.p50), p95, slo_state(latency.p50, limit_s), brief=brief)
        queue.show("running", str(snapshot.running), _pair("queued", str(snapshot.queued)))


def number_lines(snapshot: Snapshot, width: int) -> Content:
    """Return the big numbers as two rows of `width` cells; the last are left out where they do not fit."""
    hits, slo = text.percent(snapshot.prefix_hit_rate), snapshot.insight.goodput
    first = (
        _number("out", text.rate(snapshot.output_tokens_per_s), " tok/s", "$graph-tokens"),
        _number("in", text.rate(snapshot.prompt_tokens_per_s), " tok/s", "$foreground"),
        _number("running", str(snapshot.running), "", "$graph-running"),
        _number("queue", str(snapshot.queued), "", "$graph-queued"),
        _number("KV", text.percent(snapshot.kv_usage), "", "$graph-kv"),
        _number("tokens", kv_tokens_text(workers_of(snapshot)), "", "$graph-kv"),
    )
    second = (
        _latency("TTFT p50", snapshot.ttft.p50, slo.slo_ttft_s, "$graph-ttft"),
        _p95(snapshot.ttft.p95, slo.slo_ttft_s, "$graph-ttft"),
        _latency("ITL p50", snapshot.itl.p50, slo.slo_itl_s, "$graph-itl"),
        _p95(snapshot.itl.p95, slo.slo_itl_s, "$graph-itl"),
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


def _tokens_title(span: Span, legend: list[Content], caption: Content, width: int) -> Content:
    """A legend of the graph, as much of the legend as fits, and the last mark. caption: before the legend."""
    title = Content.assemble(("■ ", "$graph-tokens"), ("out tok/s  ", "$muted"), caption if legend else "")
    mark = Content("")
    if span.marks:
        sign, style = mark_sign(span.marks[-1])
        mark = Content.assemble((f"{sign} ", style), (span.marks[-1].text, "$muted"))
    room = width - title.cell_length - mark.cell_length
    shown = len(legend)
    while shown > 1 and sum(each.cell_length for each in legend[:shown]) > room:
        shown -= 1
    return Content("").join([title, *legend[:shown], mark])


def _p95(value_s: float | None, limit_s: float | None, style: str, name: str = "SLO ") -> Content:
    """A p95 next to its SLO, coloured by it, where there is one. name: before the limit."""
    number, state = _latency("p95", value_s, limit_s, style), slo_state(value_s, limit_s)
    if state is None:
        return number
    sign = ">" if state == "over" else "≤"
    return number.append(Content.styled(f" {sign} {name}{text.seconds(limit_s)}", "$muted"))


def _latency(caption: str, value_s: float | None, limit_s: float | None, style: str) -> Content:
    """A latency, coloured by its SLO where there is one, else by `style`."""
    state = slo_state(value_s, limit_s)
    return _number(caption, text.seconds(value_s), "", style if state is None else _SLO_STYLES[state])


def _number(caption: str, value: str, unit: str, style: str) -> Content:
    return Content.assemble((f"{caption} ", "$muted"), (value, f"bold {style}"), (unit, "$muted"))


def _pair(caption: str, value: str) -> Content:
    return Content.assemble((f"{caption} ", "$muted"), (value, "bold"))


def _big_rate(caption: str, per_s: float, width: int) -> tuple[str, str]:
    """Return a caption with the unit, and digits: of thousands where a stat of `width` cells has no room for all."""
    digits = f"{per_s:.0f}"
    if 0 < width < _DIGIT_CELLS * len(digits):
        return f"{caption} ktok/s", f"{per_s / 1000:.1f}" if per_s < 99_950 else f"{per_s / 1000:.0f}"
    return f"{caption} tok/s", digits


def _big_seconds(caption: str, value_s: float | None) -> tuple[str, str]:
    """Caption with the unit, and the digits."""
    if value_s is None:
        return f"{caption} ms", "-"
    number, _, unit = text.seconds(value_s).partition(" ")
    return f"{caption} {unit or 'min'}", number
