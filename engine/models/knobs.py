"""Knobs: the settings of a model that can be turned while it answers."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple, TypedDict

from engine.config import EngineConfig
from engine.metrics.meter import Meter

_log = logging.getLogger("engine")


class Knobs(TypedDict, total=False):
    """New values of knobs, by their names in EngineConfig; one that is left out or None stays as it is.

    step_tokens: in one step of a worker, where its backend is ours.  threads: of each worker, 0 shares them out.
    """

    num_workers: int | None
    max_prompts: int | None
    step_tokens: int | None
    threads: int | None
    idle_unload_s: float | None


class KnobChange(NamedTuple):
    """A knob that was turned."""

    knob: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.knob} {self.before:g} -> {self.after:g}"


def changed_fields(knobs: Knobs) -> dict[str, Any]:
    """Return the fields of EngineConfig that the knobs set: with max_prompts that of every backend."""
    found: dict[str, Any] = {name: value for name, value in knobs.items() if value is not None}
    return found | {"library_prompts": 0} if "max_prompts" in found else found


def knob_changes(before: EngineConfig, after: EngineConfig) -> list[KnobChange]:
    """Return the knobs that differ."""
    both = [KnobChange(knob, getattr(before, knob), getattr(after, knob)) for knob in Knobs.__annotations__]
    return [change for change in both if change.before != change.after]


def mark_changes(meter: Meter, model: str, before: EngineConfig, after: EngineConfig) -> None:
    """Mark each knob of a model that was changed in the history."""
    for turn in knob_changes(before, after):
        meter.mark(time.time(), str(turn), knob=turn.knob, before=turn.before, after=turn.after, model=model)
        _log.info("%s: %s", model, turn)
