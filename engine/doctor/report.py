"""The doctor's report: findings with the advice that mends them, and which backends could run."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import BackendKind

State = Literal["ok", "note", "missing", "broken"]


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at.

    state: "note" is worth knowing and needs no mending.  advice: one sentence with the command that mends it, or "".
    """

    area: str
    name: str
    state: State
    value: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings in the order to show them; the same area never stands in two places.

    lacks: for each backend one clause that says why it could not run here, "" where it could.
    backend: the one chosen.  refusal: why the model that was named cannot be loaded by it, "" where it can.
    """

    findings: tuple[Finding, ...]
    lacks: dict[BackendKind, str]
    backend: BackendKind
    refusal: str = ""

    @property
    def can_run(self) -> bool:
        """True if the chosen backend could run here, with the model that was named."""
        return not self.lacks[self.backend] and not self.refusal

    @property
    def verdict(self) -> str:
        """One sentence for a person."""
        if self.lacks[self.backend]:
            return f"The {self.backend} backend cannot run here: {self.lacks[self.backend]}."
        if self.refusal:
            return f"The {self.backend} backend could run here, but not with this model."
        return f"The {self.backend} backend can run here."
