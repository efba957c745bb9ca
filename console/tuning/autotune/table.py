"""Results of tuning as text: a table whose first column marks the front, and sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from console import text
from console.bench.text import table
from console.link.tuning import Tried, TuningReport
from console.tuning.autotune.space import KnobName, Setting

HEADINGS: dict[KnobName, str] = {
    "workers": "workers",
    "max_prompts": "max prompts",
    "step_tokens": "step tokens",
    "threads": "threads",
    "cache_bits": "cache bits",
    "draft_tokens": "draft tokens",
}
MAX_REASONS = 5
_VERDICTS = {"kept": "met", "unsure": "unsure", "broken": "missed"}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run. asked: whether anything is asked of latency.  early: why it ended before its time.

    unapplied, not_put_back: why the engine could not be put to the best, or back.  unkept: why it is not written down.
    """

    best: Tried | None
    asked: bool
    early: str = ""
    apply: bool = False
    applied: bool = False
    unapplied: str = ""
    not_put_back: str = ""
    unkept: str = ""


def sentences(outcome: Outcome) -> str:
    """Return the sentences of a report."""
    found = (outcome.early, _found(outcome), *_use(outcome))
    return " ".join(f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in found if each)


def _found(outcome: Outcome) -> str:
    best = outcome.best
    if best is None:
        return "" if outcome.early else "no settings could be measured"
    rate = f"{'best so far: ' if outcome.early else ''}{best.tokens_per_s:,.0f} tok/s"
    if not outcome.asked:
        return rate
    does = "meets" if best.keeps else "misses"
    sure = "" if best.verdict in ("kept", "broken") else "probably "
    least = "" if best.keeps else ", closest of all runs"
    return f"{rate}; {sure}{does} the latency SLO{least}"


def _use(outcome: Outcome) -> list[str]:
    best, unkept = outcome.best, outcome.unkept
    if outcome.applied:
        return [f"applied, but not saved: {unkept}" if unkept else _FROM_NOW_ON]
    clauses = []
    if outcome.unapplied:
        clauses.append(f"the settings could not be applied: {outcome.unapplied}")
    elif outcome.apply and best is not None and not best.keeps:
        clauses.append("not applied")
    back = outcome.not_put_back
    clauses.append(f"the previous settings could not be restored: {back}" if back else _AS_BEFORE)
    return [*clauses, *([f"the result could not be saved: {unkept}"] if unkept else [])]


_FROM_NOW_ON = "applied and saved as the default for this model"
_AS_BEFORE = "settings restored"


def remarks_of(report: TuningReport) -> list[str]:
    """A line for all that happened besides, and for every reason why settings could not be measured."""
    reasons: dict[str, list[str]] = {}
    for each in report.failed:
        reasons.setdefault(each.reason, []).append(_words(each.setting, report.knobs))
    failed = [_failed(reason, settings) for reason, settings in reasons.items()]
    more = len(failed) - MAX_REASONS
    hidden = [f"{more} more reasons for failed runs"] if more > 0 else []
    return [*report.notes, *failed[:MAX_REASONS], *hidden]


def _failed(reason: str, settings: Sequence[str]) -> str:
    others = len(settings) - 1
    more = f" and {others} more {'setting' if others == 1 else 'settings'}" if others else ""
    return f"{settings[0]}{more}: {reason}"


def heading_of(report: TuningReport) -> str:
    """Return the heading: model, goal and search space."""
    asked = [
        f"{name} within {_ms(limit)}"
        for name, limit in (("TTFT", report.slo_ttft_s), ("ITL", report.slo_itl_s))
        if limit is not None
    ]
    slo = f"p{report.percentile:g} of {' and of '.join(asked)}" if asked else "no latency SLO"
    turned = ", ".join(HEADINGS[knob] for knob in report.knobs)
    return f"{report.model}: {report.size:,} settings of {turned}\nGoal: highest tok/s, {slo}; {report.mix}"


def progress_of(report: TuningReport) -> str:
    """Where it is, in a line."""
    left_s = max(0.0, report.budget_s - report.elapsed_s)
    nothing = "restoring settings" if report.state == "restoring" else "starting"
    now = f"trying {setting_words(report)}" if report.now is not None else nothing
    return f"{report.stage}: {text.plural(report.windows, 'run')}, max {left_s:.0f} s left, {now}"


def setting_words(report: TuningReport) -> str:
    """The one that is tried now, by the knobs that are turned."""
    return "" if report.now is None else _words(report.now, report.knobs)


def _words(setting: Setting, knobs: Sequence[KnobName]) -> str:
    return ", ".join(f"{HEADINGS[knob]} {setting.value(knob)}" for knob in knobs)


def table_of(report: TuningReport, rows: int | None = None, columns: int | None = None) -> str:
    """All that was tried, the fastest first; of more than `rows` those that matter. Where latencies lie is left out
    where there is no room in `columns`."""
    shown = shortened(report.tried, rows)
    text = _table(shown, report, wide=True)
    if columns is not None and max(map(len, text.splitlines())) >= columns:
        text = _table(shown, report, wide=False)
    hidden = len(report.tried) - len(shown)
    return f"{text}\n{hidden} more, dominated" if hidden else text


def _table(shown: Sequence[Tried], report: TuningReport, *, wide: bool) -> str:
    percentile = f"p{report.percentile:g}"
    within = ["95% within"] if wide else []
    knobs = [HEADINGS[knob] for knob in report.knobs]
    latencies = [f"TTFT {percentile}", *within, f"ITL {percentile}", *within]
    header = ["", "tok/s", "95% within", *latencies, "goodput/s", *knobs, "runs", "SLO"]
    return table(header, [_row(each, report.knobs, wide=wide) for each in shown])


def shortened(tried: Sequence[Tried], rows: int | None) -> list[Tried]:
    """The best, then the front, then the fastest; in the order they had."""
    if rows is None or len(tried) <= rows:
        return list(tried)
    ranked = sorted(tried, key=lambda each: (not each.best, not each.front, each.verdict == "broken"))[:rows]
    return [each for each in tried if each in ranked]


def _row(each: Tried, knobs: Sequence[KnobName], *, wide: bool) -> list[str]:
    ttft_within = [_between(each.ttft_low_s, each.ttft_high_s)] if wide else []
    itl_within = [_between(each.itl_low_s, each.itl_high_s)] if wide else []
    return [
        "best" if each.best else "front" if each.front else "",
        f"{each.tokens_per_s:,.0f}",
        f"{each.low:,.0f} to {each.high:,.0f}" if each.high is not None else "unknown",
        _ms(each.ttft_s),
        *ttft_within,
        _ms(each.itl_s),
        *itl_within,
        f"{each.goodput_per_s:.1f}",
        *(str(each.setting.value(knob)) for knob in knobs),
        str(each.windows),
        _VERDICTS[each.verdict],
    ]


def _between(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unknown"
    least, most = _ms(low), _ms(high)
    number, _, unit = least.partition(" ")
    return f"{number} to {most}" if most.endswith(f" {unit}") else f"{least} to {most}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return text.seconds(seconds)
