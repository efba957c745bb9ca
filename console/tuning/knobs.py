"""The knobs an operator turns while the engine runs."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from console.link.protocol import EngineLink
from engine.snapshot import ModelReading, Snapshot

KnobName = Literal["num_workers", "max_prompts", "step_tokens", "threads", "idle_unload_s"]
KNOB_NAMES: tuple[KnobName, ...] = get_args(KnobName)
IDLE_UNLOADS_S = (60, 300, 900, 3600, 4 * 3600, 0)
"""What idle unload is stepped through; 0 is never, and so the longest."""
_TITLES: Mapping[str, str] = MappingProxyType({"num_workers": "workers", "idle_unload_s": "idle unload"})


class Knobs:
    """Where the knobs are meant to be: quick presses add up, though the snapshot that shows them comes later."""

    def __init__(self) -> None:
        self._wanted: dict[KnobName, float] = {}

    def step(self, snapshot: Snapshot, knob: KnobName, by: int) -> float:
        """The value to ask for."""
        target = next_value(knob, self._wanted.get(knob, knob_value(snapshot, knob)), by)
        self._wanted[knob] = target
        return target

    def settled(self, snapshot: Snapshot) -> None:
        """Forget what the snapshot shows."""
        self._wanted = {knob: value for knob, value in self._wanted.items() if value != knob_value(snapshot, knob)}

    def refused(self, knob: str) -> None:
        """Forget what the engine did not want."""
        self._wanted = {name: value for name, value in self._wanted.items() if name != knob}


def knob_value(reading: Snapshot | ModelReading, knob: KnobName) -> float:
    """A knob's value now, of one model or of the one that a snapshot describes."""
    value: float = getattr(reading, "target_workers" if knob == "num_workers" else knob)
    return value


def set_knob(link: EngineLink, knob: KnobName, value: float, model: str = "") -> Coroutine[Any, Any, None]:
    """The command that sets a knob."""
    values: dict[str, Any] = {knob: value if knob == "idle_unload_s" else int(value)}
    return link.reconfigure(**values, model=model)


def next_value(knob: KnobName, now: float, by: int) -> float:
    """The next value up or down: one more or less, a step's tokens doubled or halved."""
    if knob == "idle_unload_s":
        return next_idle_unload(now, by)
    if knob == "step_tokens":
        return now * 2 if by > 0 else now // 2
    return now + by


def next_idle_unload(now_s: float, by: int) -> float:
    """The next step of idle unload: longer or shorter than now, the end where there is none."""

    def rank(value: float) -> float:
        return value or float("inf")

    further = [each for each in IDLE_UNLOADS_S if (rank(each) - rank(now_s)) * by > 0]
    return (min if by > 0 else max)(further, key=rank, default=now_s)


def knob_title(knob: str) -> str:
    """A knob's name as an operator reads it: "idle unload"."""
    return _TITLES.get(knob, knob.replace("_", " "))


def knob_text(knob: str, value: float) -> str:
    """A knob's value as an operator reads it."""
    if knob == "threads" and not value:
        return "auto"
    if knob != "idle_unload_s":
        return f"{value:g}"
    if not value:
        return "never"
    if value < 60:
        return f"{value:g} s"
    return f"{value / 60:g} min" if value < 3600 else f"{value / 3600:g} h"
