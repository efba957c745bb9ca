"""The knobs an operator turns while the engine runs."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal

from console.link.protocol import EngineLink
from engine.snapshot import Snapshot

KnobName = Literal["workers", "max_prompts"]
IDLE_UNLOADS_S = (60, 300, 900, 3600, 4 * 3600, 0)
"""What idle unload is stepped through; 0 is never, and so the longest."""


class Knobs:
    """Where the knobs are meant to be: quick presses add up, though the snapshot that shows them comes later."""

    def __init__(self) -> None:
        self._wanted: dict[KnobName, int] = {}

    def step(self, snapshot: Snapshot, knob: KnobName, by: int) -> int:
        """The value to ask for."""
        target = self._wanted.get(knob, _shown(snapshot, knob)) + by
        self._wanted[knob] = target
        return target

    def settled(self, snapshot: Snapshot) -> None:
        """Forget what the snapshot shows."""
        self._wanted = {knob: value for knob, value in self._wanted.items() if value != _shown(snapshot, knob)}

    def refused(self, knob: str) -> None:
        """Forget what the engine did not want."""
        self._wanted = {name: value for name, value in self._wanted.items() if name != knob}


def _shown(snapshot: Snapshot, knob: KnobName) -> int:
    return snapshot.target_workers if knob == "workers" else snapshot.max_prompts


def set_knob(link: EngineLink, knob: str, value: float, model: str = "") -> Coroutine[Any, Any, None]:
    """The command that sets a knob, by the name that its marks have."""
    if knob == "idle_unload":
        return link.reconfigure(idle_unload_s=value, model=model)
    if knob == "workers":
        return link.reconfigure(workers=int(value), model=model)
    return link.reconfigure(max_prompts=int(value), model=model)


def next_idle_unload(now_s: float, by: int) -> float:
    """The next step of idle unload: longer or shorter than now, the end where there is none."""

    def rank(value: float) -> float:
        return value or float("inf")

    further = [each for each in IDLE_UNLOADS_S if (rank(each) - rank(now_s)) * by > 0]
    return (min if by > 0 else max)(further, key=rank, default=now_s)


def knob_text(knob: str, value: float) -> str:
    """A knob's value as an operator reads it."""
    if knob != "idle_unload":
        return f"{value:g}"
    if not value:
        return "never"
    if value < 60:
        return f"{value:g} s"
    return f"{value / 60:g} min" if value < 3600 else f"{value / 3600:g} h"
