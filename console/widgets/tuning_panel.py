"""What autotune tries and has found: how it goes, and a row for each setting, the fastest first."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from console.autotune.space import KnobName, Setting
from console.autotune.table import HEADINGS, remarks_of
from console.links.tuning import Tried, TuningReport
from console.widgets import text
from console.widgets.glyphs import fitted
from console.widgets.scatter import Point
from console.widgets.table import Cell, Column, Row, Table, cell

NOTHING_YET = "The first setting is being measured."
_VERDICTS = {"kept": ("✓ kept", "$success"), "unsure": ("◇ unsure", "$muted"), "broken": ("✖ broken", "$error")}
_STATES = {
    "running": ("◔ trying settings", "$worker-loading"),
    "restoring": ("◔ putting the engine back", "$worker-loading"),
    "done": ("✓ done", "$success"),
    "cancelled": ("○ cancelled", "$muted"),
    "failed": ("✖ failed", "$error"),
}
_SHORT: dict[KnobName, str] = {"step_tokens": "step", "cache_bits": "bits"}


class TuningPanel(Vertical):
    """Two lines of how it goes, a third of what else happened, and the table."""

    def compose(self) -> ComposeResult:
        """Head, then rows."""
        yield Static(id="tuning-head", markup=False)
        yield Table((), empty=NOTHING_YET, id="tuning-tried")

    def show(self, report: TuningReport) -> None:
        """How it stands."""
        lines = [_state(report), _asked(report), *_remark(report)]
        head = fitted(self.app, Content("\n").join(lines))
        self.query_one("#tuning-head", Static).update(head)
        table = self.query_one(Table)
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
        more = f"  {len(report.tried)} of {report.size:,} tried, {left} left at most  ·  {now}"
    else:
        more = f"  {report.said}"
    return Content.assemble((words, f"bold {style}"), (more, "$foreground"))


def _asked(report: TuningReport) -> Content:
    limits = [
        f"{name} p{report.percentile:g} ≤ {text.seconds(limit)}"
        for name, limit in (("TTFT", report.slo_ttft_s), ("ITL", report.slo_itl_s))
        if limit is not None
    ]
    return Content.styled("  ".join((*(limits or ["no SLO is set"]), f"·  {report.mix}")), "$muted")


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
        Column("good/s", 7, "right", drop=2),
        *(Column(_SHORT.get(knob, HEADINGS[knob]), 7, "right") for knob in report.knobs),
        Column("SLO", 9),
        Column("windows", 7, "right", drop=1),
    )


def _row(each: Tried, report: TuningReport) -> Row:
    strong = "bold" if each.best else ""
    mark = cell("● best", "bold $graph-tokens") if each.best else cell("◆ front" if each.front else "", "$graph-tokens")
    half = f"{(each.high - each.low) / 2:,.0f}" if each.high is not None else "–"
    words, style = _VERDICTS[each.verdict]
    cells: tuple[Cell, ...] = (
        mark,
        cell(f"{each.tokens_per_s:,.0f}", strong),
        cell(half, "$muted"),
        cell(text.seconds(each.ttft_s), strong),
        cell(text.seconds(_half(each.ttft_low_s, each.ttft_high_s)), "$muted"),
        cell(text.seconds(each.itl_s), strong),
        cell(text.seconds(_half(each.itl_low_s, each.itl_high_s)), "$muted"),
        cell(f"{each.goodput_per_s:.1f}", "$muted"),
        *(cell(str(each.setting.value(knob)), strong) for knob in report.knobs),
        cell(words, style),
        cell(str(each.windows), "$muted"),
    )
    return Row(str(each.setting), cells)


def _half(low: float | None, high: float | None) -> float | None:
    return (high - low) / 2 if low is not None and high is not None else None
