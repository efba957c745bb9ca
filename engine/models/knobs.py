"""Knobs: the settings of a model that can be turned while it answers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from engine.config import EngineConfig


class Knobs(TypedDict, total=False):
    """New values of knobs; one that is left out or None stays as it is.

    step_tokens: in one step of a worker, where its backend is ours.  threads: of each worker, 0 shares them out.
    """

    workers: int | None
    max_prompts: int | None
    idle_unload_s: float | None
    step_tokens: int | None
    threads: int | None


_FIELDS = MappingProxyType(
    {
        "workers": "num_workers",
        "max_prompts": "max_prompts",
        "idle_unload_s": "idle_unload_s",
        "step_tokens": "step_tokens",
        "threads": "threads",
    }
)
_MARKED = (("workers", "num_workers"), ("max_prompts", "max_prompts"), ("idle_unload", "idle_unload_s"))


class KnobChange(NamedTuple):
    """A knob that was turned."""

    knob: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.knob} {self.before:g} -> {self.after:g}"


def changed_fields(knobs: Knobs) -> dict[str, Any]:
    """Fields of EngineConfig that are to be others. Raises KeyError for what is not a knob."""
    return {_FIELDS[name]: value for name, value in knobs.items() if value is not None}


def knob_changes(before: EngineConfig, after: EngineConfig) -> list[KnobChange]:
    """The knobs that are marked in the history and differ."""
    both = [KnobChange(knob, getattr(before, field), getattr(after, field)) for knob, field in _MARKED]
    return [turn for turn in both if turn.before != turn.after]
