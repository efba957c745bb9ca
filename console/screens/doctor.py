"""Doctor: what this machine has for the settings in use, what it lacks, and the commands that mend it."""

from __future__ import annotations

import itertools
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from console.link import EngineLink
from console.widgets.findings import Findings
from console.widgets.glyphs import fitted
from engine.doctor.report import Report
from engine.errors import EngineError


class DoctorScreen(ModalScreen[None]):
    """Looks once when it opens, and again when asked to; the last findings stay in sight meanwhile."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "look", "Look again", id="doctor.look", tooltip="Look at the machine again", show=False),
        Binding("escape,q", "dismiss", "Close", id="doctor.close", tooltip="Close the doctor", show=False),
    ]

    def __init__(self, link: EngineLink) -> None:
        super().__init__()
        self._link = link

    def compose(self) -> ComposeResult:
        """The verdict above the findings."""
        with VerticalScroll(classes="dialog doctor") as page:
            page.border_title = "Doctor"
            page.border_subtitle = "r looks again, esc closes"
            yield Static(id="verdict")
            yield Vertical(id="findings")

    def on_mount(self) -> None:
        """The first look."""
        self.action_look()

    def action_look(self) -> None:
        """Look; a look under way is given up."""
        self.run_worker(self._look(), group="doctor", exclusive=True, exit_on_error=False)

    async def _look(self) -> None:
        self._say("◌", "Looking at the machine, its GPUs and what is installed …", "$muted")
        try:
            report = await self._link.diagnose()
        except EngineError as error:
            self._say("✖", error.message, "$error")
            return
        self._say(*(("✓", report.verdict, "$success") if report.can_run else ("✖", report.verdict, "$error")))
        await self._show(report)

    def _say(self, glyph: str, sentence: str, style: str) -> None:
        line = Content.assemble((f"{glyph} ", f"bold {style}"), (sentence, style))
        self.query_one("#verdict", Static).update(fitted(self.app, line))

    async def _show(self, report: Report) -> None:
        findings = self.query_one("#findings", Vertical)
        areas = itertools.groupby(report.findings, key=lambda finding: finding.area)
        async with self.batch():
            await findings.remove_children()
            await findings.mount_all(Findings(area, tuple(group)) for area, group in areas)
