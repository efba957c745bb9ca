"""The second row of every screen: where one is and where one can go, and the two knobs. All of it can be clicked."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.modes import MODES
from console.widgets.glyphs import fitted
from engine.snapshot import Snapshot


class TabRow(Widget):
    """mode: the name of the screen this row is on."""

    DEFAULT_CSS = """
    TabRow {
        height: 1; width: 1fr; padding: 0 1; background: $surface;
        link-style: none; link-color: $foreground; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._knobs = (0, 0)

    def show(self, snapshot: Snapshot) -> None:
        """The knobs as they are set."""
        knobs = (snapshot.target_workers, snapshot.max_prompts)
        if knobs != self._knobs:
            self._knobs = knobs
            self.refresh()

    def render(self) -> Content:
        """Tabs on the left, knobs on the right."""
        tabs = Content("").join(_tab(mode.name, mode.digit, mode.title, mode.name == self._mode) for mode in MODES)
        knobs = self._knob_row("Max prompts")
        if tabs.cell_length + knobs.cell_length >= self.size.width:
            knobs = self._knob_row("Prompts")
        gap = max(1, self.size.width - tabs.cell_length - knobs.cell_length)
        return fitted(self.app, Content.assemble(tabs, " " * gap, knobs))

    def _knob_row(self, prompts_title: str) -> Content:
        workers, prompts = self._knobs
        return Content("  ").join((_knob("Workers", "workers", workers), _knob(prompts_title, "max_prompts", prompts)))


def _link(text: str, style: str, action: str) -> Content:
    return Content.styled(text, style).stylize(Style.from_meta({"@click": action}))


def _tab(name: str, digit: str, title: str, here: bool) -> Content:
    if here:
        return Content.styled(f" {digit} {title} ", "bold $background on $primary")
    return Content.assemble((f" {digit}", "$primary"), _link(f" {title} ", "$foreground", f"app.open('{name}')"))


def _knob(title: str, name: str, value: int) -> Content:
    return Content.assemble(
        (f"{title} ", "$muted"),
        _link(" − ", "bold $primary", f"app.step('{name}', -1)"),
        (f" {value} ", "bold $foreground"),
        _link(" + ", "bold $primary", f"app.step('{name}', 1)"),
    )
