"""Flag: what a setting is besides its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import BackendKind

Group = Literal["Model", "Engine", "API", "Console"]
When = Literal["now", "load", "start"]
"""When a value that is saved while the program runs is used: at once, by the next model loaded, at the next start."""


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field is besides its type: its group in the help, and which backends honour it.

    metavar: how the help shows its value.  backends: None where every one does.
    example: what the sample file shows where there is no default.
    when: when a value saved while the program runs is used; by default, the next load for a model's settings and the
    next start for all others.
    """

    group: Group
    metavar: str = ""
    backends: tuple[BackendKind, ...] | None = None
    example: str | int | float | None = None
    when: When | None = None

    @property
    def used(self) -> When:
        """When a value that is saved is used."""
        return self.when or ("load" if self.group == "Model" else "start")
