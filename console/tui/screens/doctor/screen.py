"""Doctor: what this machine has for the settings in use, what it lacks, and the commands that mend it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.link.protocol import EngineLink
from console.tui.screens.base import Dialog
from console.tui.widgets.glyphs import for_terminal
from engine.doctor.report import Finding, Report, State
from engine.errors import EngineError

# What the doctor found: one area with its findings, aligned, values and advice wrapped beneath each other.

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
                yield Static(for_terminal(self.app, Content.styled(glyph, style)))
                yield Static(finding.name, classes="name", markup=False)
                yield Static(for_terminal(self.app, _describe(finding, style)))


def _describe(finding: Finding, style: str) -> Content:
    """The value, in the state's style where something is wrong, and the advice with its commands set off."""
    value = Content.styled(finding.value, style if finding.state in ("missing", "broken") else "")
    return Content("\n").join([value, advice(finding.advice)]) if finding.advice else value


def advice(sentence: str) -> Content:
    """A sentence with what stands between backticks in bold, the backticks gone."""
    parts = sentence.split("`")
    return Content.assemble(
        *((part, "bold $foreground" if index % 2 else "$muted") for index, part in enumerate(parts))
    )


class DoctorScreen(Dialog[None]):
    """Looks once when it opens, and again when asked to; the last findings stay in sight meanwhile."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "look", "Check again", id="doctor.look", tooltip="Check the machine again"),
        Binding("escape,q", "dismiss", "Close", id="doctor.close", tooltip="Close the doctor", key_display="esc"),
    ]

    def __init__(self, link: EngineLink) -> None:
        super().__init__()
        self._link = link

    def compose(self) -> ComposeResult:
        """The verdict above the findings."""
        with VerticalScroll(classes="dialog doctor") as page:
            page.border_title = "Doctor"
            yield Static(id="verdict")
            yield Vertical(id="findings")

    def on_mount(self) -> None:
        """The first look."""
        self.action_look()

    def action_look(self) -> None:
        """Look; a look under way is given up."""
        self.run_worker(self._look(), group="doctor", exclusive=True, exit_on_error=False)

    async def _look(self) -> None:
        self._say("◌", "Checking the machine, its GPUs and the installation …", "$muted")
        try:
            report = await self._link.diagnose()
        except EngineError as error:
            self._say("✖", error.message, "$error")
            return
        self._say(*(("✓", report.verdict, "$success") if report.can_run else ("✖", report.verdict, "$error")))
        await self._show(report)

    def _say(self, glyph: str, sentence: str, style: str) -> None:
        line = Content.assemble((f"{glyph} ", f"bold {style}"), (sentence, style))
        self.query_one("#verdict", Static).update(for_terminal(self.app, line))

    async def _show(self, report: Report) -> None:
        findings = self.query_one("#findings", Vertical)
        areas = itertools.groupby(report.findings, key=lambda finding: finding.area)
        async with self.batch():
            await findings.remove_children()
            await findings.mount_all(Findings(area, tuple(group)) for area, group in areas)
