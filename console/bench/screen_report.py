"""What `ericllm bench screen` found, beside its goals."""

from __future__ import annotations

import msgspec

from console.bench.text import table


class Goal(msgspec.Struct, frozen=True):
    """A number that was measured beside the number it is to stay under, in the same unit."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether it stayed under."""
        return self.value < self.limit


class ScreenReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. keys: presses that were timed; tokens_per_s: of all clients together."""

    clients: int
    seconds: float
    keys: int
    tokens_per_s: float
    goals: tuple[Goal, ...]


def screen_text(report: ScreenReport) -> str:
    """The report for a person."""
    rows = [
        [goal.name, f"{goal.value:.1f} {goal.unit}", f"{goal.limit:g} {goal.unit}", "yes" if goal.met else "NO"]
        for goal in report.goals
    ]
    return "\n".join(
        (
            f"{report.clients} clients that stream {report.tokens_per_s:.0f} chunks/s, "
            f"{report.seconds:g} s of each, {report.keys} keys pressed",
            "",
            table(["", "measured", "goal: under", "met"], rows),
        )
    )
