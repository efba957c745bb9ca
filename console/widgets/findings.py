"""What the doctor found: one area with its findings, aligned, values and advice wrapped beneath each other."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Grid, Vertical
from textual.content import Content
from textual.widgets import Static

from console.widgets.glyphs import fitted
from engine.doctor.report import Finding, State

MARKS: dict[State, tuple[str, str]] = {
    "ok": ("✓", "$success"),
    "note": ("–", "$muted"),
    "missing": ("○", "$warning"),
    "broken": ("✖", "$error"),
}
"""By state: the glyph, and the style that it has."""


class Findings(Vertical):
    """The findings of one area under its title."""

    DEFAULT_CSS = """
    Findings {
        height: auto;
        margin-bottom: 1;

        & > .title { color: $primary; text-style: bold; }
        Grid { grid-size: 3; grid-columns: 2 16 1fr; grid-rows: auto; height: auto; }
        .name { color: $muted; }
    }
    """

    def __init__(self, area: str, findings: Sequence[Finding]) -> None:
        super().__init__()
        self._area = area
        self._findings = findings

    def compose(self) -> ComposeResult:
        """A row for each: mark, name, value with the advice beneath."""
        yield Static(self._area, classes="title", markup=False)
        with Grid():
            for finding in self._findings:
                glyph, style = MARKS[finding.state]
                yield Static(fitted(self.app, Content.styled(glyph, style)))
                yield Static(finding.name, classes="name", markup=False)
                yield Static(fitted(self.app, _said(finding, style)))


def _said(finding: Finding, style: str) -> Content:
    """The value, in the state's style where something is wrong, and the advice with its commands set off."""
    value = Content.styled(finding.value, style if finding.state in ("missing", "broken") else "")
    return Content("\n").join([value, advice(finding.advice)]) if finding.advice else value


def advice(sentence: str) -> Content:
    """A sentence with what stands between backticks in bold, the backticks gone."""
    parts = sentence.split("`")
    return Content.assemble(
        *((part, "bold $foreground" if index % 2 else "$muted") for index, part in enumerate(parts))
    )
