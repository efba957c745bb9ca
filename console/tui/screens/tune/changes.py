"""Changes of knobs, newest first, with what each did: a glyph, a word and a number, or why there is no number."""

from __future__ import annotations

from textual.content import Content

from console import text
from console.text import local_time
from console.tui.widgets.states import State
from console.tui.widgets.table import Cell, Column, Row, Table, cell
from console.tuning.effects import Change, Delta, Effect
from console.tuning.knobs import knob_text, knob_title

_DELTA = 13
_COLUMNS = (
    Column("when", 8),
    Column("change", 19, grow=24),
    Column("load", 5, "right"),
    Column("tok/s", _DELTA),
    Column("", 11, drop=1),
    Column("TTFT p95", _DELTA),
    Column("", 17, drop=2),
    Column("ITL p95", _DELTA),
    Column("", 17, drop=3),
)
_MODEL = Column("model", 16, grow=12, drop=4)
_CLEARLY_DIFFERENT = 0.1
"""Share from which a change that its noise may explain is called unclear, and not the same."""

_VERDICTS = {"better": "$success", "worse": "$error", "same": "$muted"}
_OUTCOMES = {
    "measuring": State("◔", "measuring", "$worker-loading"),
    "waiting": State("◌", "waiting", "$worker-loading"),
    "incomparable": State("◇", "not comparable:", "$muted"),
    "unmeasured": State("○", "not measured:", "$muted"),
}


class EffectTable(Table):
    """A row for each change."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(_COLUMNS, id=id)

    def show_effects(self, effects: tuple[Effect, ...], *, named: bool, read_only: bool = False) -> None:
        """named: show the model of each change. read_only: knobs cannot be changed here."""
        columns = (_COLUMNS[0], _MODEL, *_COLUMNS[1:]) if named else _COLUMNS
        self.show(
            [_effect_row(effect, named=named) for effect in effects],
            empty=NONE if read_only else NONE_YET,
            columns=columns,
        )

    def chosen(self, effects: tuple[Effect, ...]) -> Effect | None:
        """The one under the cursor, the newest where it is nowhere; None where there is none."""
        under = (effect for effect in effects if key_of(effect.change) == self.cursor_key)
        return next(under, effects[0] if effects else None)


NONE = "No changes yet. The effect of a change on throughput and latency is measured here."
NONE_YET = (
    "No changes yet. Change workers with [ ] or max prompts with - + while requests run: the effect on throughput and "
    "latency is measured here, over the same load before and after. s sends sample requests for 30 s."
)


def key_of(change: Change) -> str:
    """Return the key of a change."""
    return f"{change.at:.3f}{change.knob}{change.model}"


def _effect_row(effect: Effect, *, named: bool) -> Row:
    change = effect.change
    model = (cell(change.model),) if named else ()
    head = (cell(local_time(change.at), "$muted"), *model, cell(change_text(change), "bold"))
    if effect.outcome != "measured":
        state = _OUTCOMES[effect.outcome]
        separator = ", " if effect.outcome == "measuring" else " "
        outcome = ((f"{state.glyph} {state.word}", state.style), (f"{separator}{effect.text}", "$muted"))
        return Row(key_of(change), (*head, cell("–", "$muted"), outcome))
    load = cell(f"{effect.load:g}", "$muted")
    numbers = [
        part
        for delta, shown in (
            (effect.tokens_per_s, text.rate),
            (effect.ttft_s, text.seconds),
            (effect.itl_s, text.seconds),
        )
        for part in (delta_cell(delta), cell(_from_to(delta, shown), "$muted"))
    ]
    return Row(key_of(change), (*head, load, *numbers))


def delta_cell(delta: Delta | None) -> Cell:
    """ "↑ better +38%": which way the number went, whether that is good, and by how much."""
    if delta is None:
        return cell("–", "$muted")
    if delta.verdict == "same":
        words = "≈ same" if abs(delta.relative) < _CLEARLY_DIFFERENT else "? unclear"
        return cell(f"{words} {delta.relative:+.0%}", _VERDICTS["same"])
    glyph = "↑" if delta.after > delta.before else "↓"
    return cell(f"{glyph} {delta.verdict} {_percent(delta.relative)}", _VERDICTS[delta.verdict])


def _percent(relative: float) -> str:
    return f"{relative:+.0%}" if relative < 9.995 else f"×{relative + 1:.0f}"


def _from_to(delta: Delta | None, shown: object) -> str:
    if delta is None:
        return "–"
    assert callable(shown)
    return f"{shown(delta.before)} → {shown(delta.after)}"


def change_text(change: Change) -> str:
    """ "workers 1 → 2", "idle never → 5 min"."""
    name = "idle" if change.knob == "idle_unload_s" else knob_title(change.knob)
    return f"{name} {knob_text(change.knob, change.before)} → {knob_text(change.knob, change.after)}"


def effect_details(effect: Effect, *, named: bool) -> Content:
    """Two lines about one change: over what it was measured, and the numbers. named: whose knob it was, too."""
    change = effect.change
    what = f"{change.model}: {change_text(change)}" if named else change_text(change)
    back = f"u sets {knob_title(change.knob)} back to {knob_text(change.knob, change.before)}"
    if effect.outcome != "measured":
        state = _OUTCOMES[effect.outcome]
        separator = ", " if effect.outcome == "measuring" else " "
        return Content.assemble(
            (what, "bold"),
            ("  ", ""),
            (f"{state.glyph} {state.word}", state.style),
            f"{separator}{effect.text}",
            "\n",
            (back, "$muted"),
        )
    before, after = effect.seconds
    lines = [
        Content.assemble(
            (what, "bold"),
            (f"  over {effect.load:g} requests, {before} s before and {after} s after; {back}", "$muted"),
        ),
        Content("   ").join(
            Content.assemble((f"{name} ", "$muted"), _from_to(delta, shown), "  ", *delta_cell(delta))
            for name, delta, shown in (
                ("tok/s", effect.tokens_per_s, text.rate),
                ("TTFT p95", effect.ttft_s, text.seconds),
                ("ITL p95", effect.itl_s, text.seconds),
            )
        ),
    ]
    return Content("\n").join(lines)
