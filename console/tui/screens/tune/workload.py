"""Workload: what requests ask for, where their latency goes, and how many keep the SLO, over the session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import AppScreen
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.view import workers_of
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.latency import Room, latency_breakdown, room_of
from console.tui.widgets.plot import draw, meter
from engine.snapshot import Goodput, Lengths, Snapshot

_MIN_CELLS = 30
_NAME = 11
Lines = Iterator[Content]


class WorkloadSection(Static):
    """A titled panel as high as its lines. lines: those for a snapshot, in the room that there is."""

    DEFAULT_CSS = """
    WorkloadSection { height: auto; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, title: str, lines: Callable[[Snapshot, Room], Iterable[Content]], *, id: str) -> None:
        super().__init__(id=id, classes="panel", markup=False)
        self.border_title = title
        self._lines = lines
        self._snapshot: Snapshot | None = None
        self._shown = Content("")

    def show(self, snapshot: Snapshot) -> None:
        """Draw the lines again, where anything changed."""
        self._snapshot = snapshot
        room = room_of(self.app, max(_MIN_CELLS, self.content_size.width))
        shown = for_terminal(self.app, Content("\n").join(self._lines(snapshot, room)))
        if not shown.is_same(self._shown):
            higher = shown.plain.count("\n") != self._shown.plain.count("\n")
            self._shown = shown
            self.update(shown, layout=higher)

    def on_resize(self) -> None:
        """Charts are drawn to the width."""
        if self._snapshot is not None:
            self.show(self._snapshot)


class WorkloadPanel(VerticalScroll):
    """Two columns where it is wide, one where it is not; scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "R",
            "reset",
            "Reset counters",
            id="session.reset",
            mutates=True,
            tooltip="Reset the counters of the session",
        ),
    ]

    def compose(self) -> ComposeResult:
        """Left: latency. Right: lengths."""
        with Horizontal(id="workload-columns"):
            with Vertical(classes="column"):
                yield WorkloadSection("Latency breakdown", latency_breakdown, id="workload-latency")
                yield WorkloadSection("Goodput", goodput, id="workload-goodput")
                yield WorkloadSection("Finish reasons", endings, id="workload-endings")
                yield WorkloadSection("Draft acceptance by position", drafts, id="workload-drafts")
            with Vertical(classes="column"):
                yield WorkloadSection("Prompts, in tokens", prompts, id="workload-prompts")
                yield WorkloadSection("Answers, in tokens", answers, id="workload-answers")
                yield WorkloadSection("Context", context, id="workload-context")

    def show(self, snapshot: Snapshot) -> None:
        """Draw every section that changed."""
        self.query_one("#workload-drafts").display = bool(snapshot.insight.drafts)
        for section in self.query(WorkloadSection):
            section.show(snapshot)

    def action_reset(self) -> None:
        """Reset the counters, after a question."""
        question = ConfirmScreen(
            "Reset counters?",
            "These numbers restart at zero. Totals, graphs and today's energy are kept.",
            yes="Reset",
            no="Cancel",
        )
        self.app.push_screen(question, lambda sure: self._reset() if sure else None)

    def _reset(self) -> None:
        assert isinstance(self.screen, AppScreen)
        console = self.screen.console
        console.perform(console.link.insight.reset(), done="Counters reset")


# The sections, as lines of content for a width. Pure.


def goodput(snapshot: Snapshot, room: Room) -> Lines:
    """Yield how many answers kept the SLO."""
    seen = snapshot.insight.goodput
    if seen.slo_ttft_s is None and seen.slo_itl_s is None:
        yield Content.styled("No SLO set. Set slo_ttft and slo_itl in Settings (8).", "$muted")
        return
    yield _line("SLO", " · ".join(_slo(seen)))
    yield from _steps(snapshot)
    if not seen.judged:
        yield _line("kept", "– no finished answers yet")
        return
    share = seen.within_slo / seen.judged
    style = "$success" if share >= 0.95 else "$warning" if share >= 0.8 else "$error"
    counts = f" · {seen.within_slo:,} of {seen.judged:,} requests"
    yield Content.assemble((f"{'kept':<{_NAME}}", "$muted"), (text.percent(share), f"bold {style}"), counts)
    yield _line("per second", f"{text.three_digits(seen.per_s)} in the last minute")
    yield meter(share, room.width, style)


def _slo(seen: Goodput) -> Iterator[str]:
    if seen.slo_ttft_s is not None:
        yield f"TTFT within {text.seconds(seen.slo_ttft_s)}"
    if seen.slo_itl_s is not None:
        yield f"mean ITL within {text.seconds(seen.slo_itl_s)}"


def _steps(snapshot: Snapshot) -> Lines:
    """How far off the predicted step times are that keep the ITL target, of the worker that predicts worst."""
    reports = [worker.stats.itl for worker in workers_of(snapshot) if worker.stats.itl is not None]
    if (report := max(reports, key=lambda each: each.error or 0.0, default=None)) is None or report.error is None:
        return
    yield _line("steps", f"predicted within {text.percent(report.error)} (median)")
    if (slowest := max(reports, key=lambda each: each.floor_s)).floor_s > slowest.target_s:
        alone = f"{text.seconds(slowest.floor_s)} with {slowest.answers} answers and no prompt"
        yield Content.assemble((f"{'':<{_NAME}}", ""), (alone, "$warning"))


_ENDINGS = {
    "stop": "$request-done",
    "length": "$warning",
    "cancelled": "$muted",
    "timeout": "$error",
    "error": "$error",
}


def endings(snapshot: Snapshot, room: Room) -> Lines:
    """Yield how many requests ended for each reason."""
    finished = snapshot.insight.finished
    total = sum(finished.values())
    if not total:
        yield Content.styled("No finished requests yet", "$muted")
        return
    shares = ((reason, finished.get(reason, 0)) for reason in _ENDINGS)
    yield from share_bars(
        ((reason, count / total, _ENDINGS[reason], f"{count:,}") for reason, count in shares if count), room.width
    )


def drafts(snapshot: Snapshot, room: Room) -> Lines:
    """Yield the acceptance rate of draft tokens, by position."""
    yield from share_bars(
        (
            (
                f"+{position}",
                each.accepted / each.drafted if each.drafted else 0.0,
                "$graph-tokens",
                f"{text.count(each.accepted)} of {text.count(each.drafted)}",
            )
            for position, each in enumerate(snapshot.insight.drafts, start=1)
        ),
        room.width,
    )


def prompts(snapshot: Snapshot, room: Room) -> Lines:
    """Yield the lengths of prompts."""
    return _lengths(snapshot.insight.prompts, "$graph-running", room)


def answers(snapshot: Snapshot, room: Room) -> Lines:
    """Yield the lengths of answers."""
    return _lengths(snapshot.insight.outputs, "$graph-tokens", room)


def context(snapshot: Snapshot, room: Room) -> Lines:
    """Yield the longest prompt and answer together, against the limit of the models."""
    longest, limit = snapshot.insight.longest_context_tokens, snapshot.insight.configured_context_tokens
    if not limit:
        yield _line("longest", f"{longest:,} tokens; no model is loaded" if longest else "– no model is loaded")
        return
    yield _line("longest", f"{longest:,} of {limit:,} tokens · {text.percent(longest / limit)}" if longest else "–")
    yield meter(longest / limit, room.width, "$gpu-kv")


def _line(name: str, value: str) -> Content:
    return Content.assemble((f"{name:<{_NAME}}", "$muted"), value)


def _lengths(lengths: Lengths, style: str, room: Room) -> Lines:
    spread = lengths.spread
    if not spread.count:
        yield Content.styled("No finished answers yet", "$muted")
        return
    yield from histogram(lengths, room.width, style, ascii_only=room.ascii_only)
    named = (("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99), ("longest", spread.longest))
    numbers = (Content.assemble((f"{name} ", "$muted"), _tokens(value or 0)) for name, value in named)
    yield Content("  ").join(numbers)


def _tokens(number: float) -> str:
    """A length in full as long as that is short: "3,421", "32.8k"."""
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1000:,.1f}k"


# Small charts: a histogram in columns, shares as bars.

_ROWS = 4
_WIDEST = 6
_NARROWEST = 2
_LABEL = 11
_SHARE = 5


def histogram(lengths: Lengths, width: int, style: str, *, ascii_only: bool = False) -> list[Content]:
    """Columns for the buckets that have something and those between, with the upper bound of each beneath.

    Where there are more than fit, neighbours are drawn as one.
    """
    labels = [*map(_bound, lengths.bounds), "more"]
    filled = [index for index, count in enumerate(lengths.counts) if count]
    if not filled:
        return []
    first, last = max(0, filled[0] - 1), min(len(labels), filled[-1] + 2)
    counts, labels = list(lengths.counts[first:last]), labels[first:last]
    while len(counts) * _NARROWEST > width and len(counts) > 1:
        counts, labels = _in_pairs(counts), [*labels[1::2], *labels[len(labels) - len(labels) % 2 :]]
    cells = max(_NARROWEST, min(_WIDEST, width // len(counts)))
    heights = [float(count) if cell < cells - 1 else None for count in counts for cell in range(cells)]
    rows = draw(heights, [], max(counts), _ROWS, ascii_only=ascii_only)
    plot = [Content.styled("".join(cell.char for cell in row), style) for row in rows]
    return [*plot, Content.styled(_axis(labels, cells), "$muted")]


def _bound(tokens: int) -> str:
    return f"≤{tokens}" if tokens < 1024 else f"≤{tokens // 1024}k"


def _in_pairs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[index : index + 2]) for index in range(0, len(counts), 2)]


def _axis(labels: Sequence[str], cells: int) -> str:
    """As many of the labels as fit under their columns, the last one in any case."""
    every = next((step for step in range(1, len(labels)) if step * cells > max(map(len, labels))), len(labels))
    shown = [label if (len(labels) - 1 - index) % every == 0 else "" for index, label in enumerate(labels)]
    line = ""
    for index, label in enumerate(shown):
        line = f"{line:<{index * cells}}{label}" if label else line
    return line


def share_bars(shares: Iterable[tuple[str, float, str, str]], width: int) -> list[Content]:
    """A line for each (name, share, style, numbers): the name, a bar of the share, the share, the numbers."""
    rows = list(shares)
    numbers = max((len(row[3]) for row in rows), default=0)
    bar = max(4, width - _LABEL - _SHARE - numbers - 2)
    return [
        Content.assemble(
            (f"{name:<{_LABEL}}", "$muted"),
            meter(share, bar, style),
            (f"{text.share(share):>{_SHARE}}", "bold"),
            (f"  {label:>{numbers}}", "$muted"),
        )
        for name, share, style, label in rows
    ]
