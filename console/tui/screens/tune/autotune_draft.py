"""The form of autotune: what is asked before it begins, what was typed and chosen, and the order made of that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from console.link.benches import BenchField, BenchForm
from console.link.tuning import MAX_MINUTES, MAX_USERS, TuneOrder
from console.settings.values import duration_s
from console.tui.screens.benches.bench_draft import TRACE, BenchDraft
from console.tuning.autotune.space import KnobName
from console.tuning.autotune.table import HEADINGS
from engine.errors import InvalidRequest

KNOBS: tuple[KnobName, ...] = tuple(HEADINGS)
RELOADING: tuple[KnobName, ...] = ("cache_bits", "draft_tokens")
"""Knobs whose change reloads the model."""
_MIN_MINUTES = 0.05


def _field(name: str, title: str, offered: str, hint: str) -> BenchField:
    return BenchField(name=name, title=title, hint=hint, quick=offered, full=offered)


FORM = BenchForm(
    bench="autotune",
    measures="Finds the settings with the highest tok/s within the TTFT and ITL limits.",
    fields=(
        _field("minutes", "minutes", "10", "time limit"),
        _field("slo_ttft_s", "max TTFT", "", "500ms; default: Settings"),
        _field("slo_itl_s", "max ITL", "", "50ms; default: Settings"),
        _field("percentile", "percentile", "95", "percentile of TTFT and ITL"),
        _field("users", "users", "", "concurrent users; default: one per slot"),
        _field("prompt", "prompt tokens", "", "64-256; default: recent traffic"),
        _field("output", "answer tokens", "", "32-128; default: recent traffic"),
        _field(TRACE, "trace", "", "ShareGPT file to replay"),
    ),
)


BASIC_FORM = msgspec.structs.replace(FORM, fields=FORM.fields[:3])
"""Minutes and the SLO: all that most runs need."""


@dataclass(slots=True)
class TuneDraft:
    """typed: into the fields of FORM.  fixed: knobs that stay as they are.  advanced: the form shows all of it."""

    typed: BenchDraft = field(default_factory=BenchDraft)
    fixed: set[KnobName] = field(default_factory=set)
    advanced: bool = False

    def switch(self, knob: KnobName) -> None:
        """Turn that knob too, or not any more."""
        self.fixed ^= {knob}

    def order(self, model: str) -> TuneOrder:
        """All of it. Raises InvalidRequest, its param the field."""
        if len(self.fixed) == len(KNOBS):
            raise InvalidRequest("No knob selected. Space toggles one.", param="knobs")
        typed = {each.name: self.typed.value(FORM, each).strip() for each in FORM.fields}
        return TuneOrder(
            model=model,
            minutes=_number(typed, "minutes", _MIN_MINUTES, MAX_MINUTES),
            slo_ttft_s=_duration(typed, "slo_ttft_s"),
            slo_itl_s=_duration(typed, "slo_itl_s"),
            percentile=_number(typed, "percentile", 1, 99.9),
            prompt=typed["prompt"],
            output=typed["output"],
            trace=typed[TRACE],
            users=_whole(typed, "users", 1, MAX_USERS) if typed["users"] else None,
            fixed=tuple(knob for knob in KNOBS if knob in self.fixed),
        )


def _number(typed: Mapping[str, str], name: str, least: float, most: float) -> float:
    try:
        value = float(typed[name])
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise InvalidRequest(f"{typed[name] or 'nothing'} is not a number from {least:g} to {most:g}", param=name)
    return value


def _whole(typed: Mapping[str, str], name: str, least: int, most: int) -> int:
    value = _number(typed, name, least, most)
    if value != int(value):
        raise InvalidRequest(f"{typed[name]} is not a whole number", param=name)
    return int(value)


def _duration(typed: Mapping[str, str], name: str) -> float | None:
    """Seconds; None where nothing is typed."""
    if not typed[name]:
        return None
    try:
        value = float(str(duration_s(typed[name])))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidRequest(f"{typed[name]} is not a duration; examples: 500ms, 0.5s", param=name)
    return value
