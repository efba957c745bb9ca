"""Advice: a sentence with the numbers, and what could be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from console.tui.modes import MODES
from console.tuning.knobs import KnobName, knob_title

Code = Literal[
    "preempted",
    "truncated",
    "queue",
    "itl_over_slo",
    "device_hot",
    "power_limit",
    "slow_worker",
    "drafts_rejected",
    "memory_unused",
    "context_unused",
    "prefix_useless",
    "own_load",
]


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn a knob of the model in view."""

    knob: KnobName
    by: int

    @property
    def label(self) -> str:
        """ "max prompts +2"."""
        return f"{knob_title(self.knob)} {'+' if self.by > 0 else '−'}{abs(self.by)}"


@dataclass(frozen=True, slots=True)
class Open:
    """Go to the screen where it can be changed. mode: its name in console.tui.modes."""

    mode: str

    @property
    def label(self) -> str:
        """ "open Models"."""
        return f"open {next(mode.title for mode in MODES if mode.name == self.mode)}"


@dataclass(frozen=True, slots=True)
class Look:
    """Look closely at a worker, where it can be restarted or drained."""

    worker: str

    @property
    def label(self) -> str:
        """ "look at w1"."""
        return f"open {self.worker}"


Action = Turn | Open | Look


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that is wrong or wasteful. brief: the sentence where there is room for no more.

    subject: which device or worker, "" where it is about the whole.
    """

    code: Code
    sentence: str
    brief: str
    action: Action | None = None
    subject: str = ""

    @property
    def key(self) -> tuple[Code, str]:
        """The same as long as it is about the same thing, whatever its numbers are."""
        return self.code, self.subject
