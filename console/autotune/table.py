"""What tuning found, as text: a table whose first column marks the front, and a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from console.autotune.space import KnobName
from console.bench.table import table
from console.links.tuning import Tried, TuningReport

HEADINGS: dict[KnobName, str] = {
    "workers": "workers",
    "max_prompts": "prompts",
    "step_tokens": "step tokens",
    "threads": "threads",
    "cache_bits": "cache bits",
    "draft_tokens": "guesses",
}


def heading_of(report: TuningReport) -> str:
    """What is searched, for what."""
    asked = [
        f"{name} within {_ms(limit)}"
        for name, limit in (("TTFT", report.slo_ttft_s), ("ITL", report.slo_itl_s))
        if limit is not None
    ]
    slo = f"p{report.percentile:g} of {' and of '.join(asked)}" if asked else "whatever the latency"
    turned = ", ".join(HEADINGS[knob] for knob in report.knobs)
    return f"{report.model}: {report.size:,} settings of {turned}\nMost tok/s, {slo}; {report.mix}"


def progress_of(report: TuningReport) -> str:
    """Where it is, in a line."""
    left_s = max(0.0, report.budget_s - report.elapsed_s)
    nothing = "putting the engine back" if report.state == "restoring" else "beginning"
    now = f"trying {setting_words(report)}" if report.now is not None else nothing
    return f"{report.stage}: {report.windows} windows, {left_s:.0f} s left at most, {now}"


def setting_words(report: TuningReport) -> str:
    """The one that is tried now, by the knobs that are turned."""
    now = report.now
    return "" if now is None else ", ".join(f"{HEADINGS[knob]} {now.value(knob)}" for knob in report.knobs)


def table_of(report: TuningReport, rows: int | None = None) -> str:
    """All that was tried, the fastest first; of more than `rows` those that matter."""
    percentile = f"p{report.percentile:g}"
    header = [
        "",
        "tok/s",
        "95% within",
        f"TTFT {percentile}",
        f"ITL {percentile}",
        "good/s",
        *(HEADINGS[knob] for knob in report.knobs),
        "windows",
        "SLO",
    ]
    shown = shortened(report.tried, rows)
    text = table(header, [_row(each, report.knobs) for each in shown])
    hidden = len(report.tried) - len(shown)
    return f"{text}\n{hidden} more that nothing speaks for" if hidden else text


def shortened(tried: Sequence[Tried], rows: int | None) -> list[Tried]:
    """The best, then the front, then the fastest; in the order they had."""
    if rows is None or len(tried) <= rows:
        return list(tried)
    ranked = sorted(tried, key=lambda each: (not each.best, not each.front, each.verdict == "broken"))[:rows]
    return [each for each in tried if each in ranked]


def _row(each: Tried, knobs: Sequence[KnobName]) -> list[str]:
    return [
        "best" if each.best else "front" if each.front else "",
        f"{each.tokens_per_s:,.0f}",
        f"{each.low:,.0f} to {each.high:,.0f}" if each.high is not None else "unknown",
        _ms(each.ttft_s),
        _ms(each.itl_s),
        f"{each.goodput_per_s:.1f}",
        *(str(each.setting.value(knob)) for knob in knobs),
        str(each.windows),
        each.verdict,
    ]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1000:.0f} ms"
        if seconds >= 0.1
        else f"{seconds * 1000:.1f} ms"
    )
