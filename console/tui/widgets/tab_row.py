"""The second row of every screen: the tabs; on Dashboard and Tune also the two knobs. All of it can be clicked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.tui.modes import MODES, Mode
from console.tui.view import prompts_limit, workers_now
from console.tui.widgets.glyphs import for_terminal
from engine.snapshot import Snapshot

BREVITIES = 4
"""Forms of the knobs, the last the narrowest."""
_WITH_KNOBS = ("dashboard", "tune")

TabForm = Literal["full", "short", "digits"]
"""What a tab says besides its digit: its name, a short form of it, or nothing where one is not on it."""


@dataclass(frozen=True, slots=True)
class KnobValues:
    """Values of the knobs. now: workers there are while they become `workers`; limit: what memory allows of prompts,
    0 where that is all."""

    workers: int = 0
    now: int = 0
    prompts: int = 0
    limit: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> KnobValues:
        """Those of the model in view."""
        return cls(
            workers=snapshot.target_workers,
            now=workers_now(snapshot),
            prompts=snapshot.max_prompts,
            limit=prompts_limit(snapshot),
        )


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
        self._knobs = KnobValues()
        self._read_only = False
        self._badge = False

    def show(self, snapshot: Snapshot, *, read_only: bool = False, badge: bool = False) -> None:
        """The knobs as they are set. read_only: they cannot be turned, so there is nothing to click.
        badge: Logs has a sign, for alerts and warnings that were not seen."""
        knobs = KnobValues.of(snapshot)
        if (knobs, read_only, badge) != (self._knobs, self._read_only, self._badge):
            self._knobs, self._read_only, self._badge = knobs, read_only, badge
            self.refresh()

    def render(self) -> Content:
        """Tabs on the left in the widest form that fits; knobs on the right where they leave room."""
        width = self.size.width
        badge = "logs" if self._badge else ""
        forms = (tab_row(self._mode, form, badge) for form in get_args(TabForm))
        tabs = next((tabs for tabs in forms if tabs.cell_length <= width), tab_row(self._mode, "digits", badge))
        for brevity in range(BREVITIES if self._mode in _WITH_KNOBS else 0):
            knobs = knob_row(self._knobs, brevity, turns=not self._read_only)
            if (room := width - tabs.cell_length - knobs.cell_length) > 0:
                return for_terminal(self.app, Content.assemble(tabs, " " * room, knobs))
        return for_terminal(self.app, tabs)


def tab_row(here: str, form: TabForm, badge: str = "") -> Content:
    """All tabs in one form; the one that one is on always has its name. badge: the tab with a sign after its name."""
    return Content("").join(_tab(mode, mode.name == here, form, badged=mode.name == badge) for mode in MODES)


def knob_row(knobs: KnobValues, brevity: int, *, turns: bool = True) -> Content:
    """Both knobs. brevity: 0 says most; the last of BREVITIES is the narrowest form. turns: with signs to click."""
    coming = f"{knobs.now}→" if knobs.now != knobs.workers else ""
    allowed = (f", limited to {knobs.limit} by memory", f", limited to {knobs.limit} by memory", f", {knobs.limit} fit")
    limit = "" if not knobs.limit else (*allowed, f" ({knobs.limit})")[brevity]
    tight = brevity == BREVITIES - 1
    return Content("  ").join(
        (
            _knob("Workers", "num_workers", f"{coming}{knobs.workers}", tight=tight, turns=turns),
            _knob("Max prompts", "max_prompts", str(knobs.prompts), limit, tight=tight, turns=turns),
        )
    )


def _link(text: str, style: str, action: str) -> Content:
    return Content.styled(text, style).stylize(Style.from_meta({"@click": action}))


def _tab(mode: Mode, here: bool, form: TabForm, *, badged: bool) -> Content:
    """badged: a sign stands where the blank after the name is."""
    tab = _plain_tab(mode, here, form)
    return Content.assemble(tab[:-1], ("▲", "bold $warning")) if badged and not here else tab


def _plain_tab(mode: Mode, here: bool, form: TabForm) -> Content:
    title = mode.title if form == "full" else mode.short or mode.title
    if here:
        return Content.styled(f" {mode.digit} {title} ", "bold reverse $primary")
    if form == "digits":
        return _link(f" {mode.digit} ", "$primary", f"app.open('{mode.name}')")
    return Content.assemble(
        (f" {mode.digit}", "$primary"), _link(f" {title} ", "$foreground", f"app.open('{mode.name}')")
    )


def _knob(title: str, name: str, value: str, limit: str = "", *, tight: bool, turns: bool) -> Content:
    """limit: what memory allows, said behind the value. tight: no more spaces than it needs."""
    pad = "" if tight else " "
    if not turns:
        return Content.assemble((f"{title} ", "$muted"), (value, "bold $foreground"), (limit, "$warning"))
    return Content.assemble(
        (f"{title} ", "$muted"),
        _link(f"{pad}−{pad}", "bold $primary", f"app.step('{name}', -1)"),
        (f" {value}", "bold $foreground"),
        (limit, "$warning"),
        " ",
        _link(f"{pad}+{pad}", "bold $primary", f"app.step('{name}', 1)"),
    )
