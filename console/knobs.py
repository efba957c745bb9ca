"""The two knobs an operator turns while the engine runs."""

from __future__ import annotations

from typing import Literal

from engine.snapshot import Snapshot

KnobName = Literal["workers", "max_prompts"]


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

    def refused(self, knob: KnobName) -> None:
        """Forget what the engine did not want."""
        self._wanted.pop(knob, None)


def _shown(snapshot: Snapshot, knob: KnobName) -> int:
    return snapshot.target_workers if knob == "workers" else snapshot.max_prompts
