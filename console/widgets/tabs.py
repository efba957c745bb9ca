"""The second row of every screen: where one is and where one can go, and the two knobs. All of it can be clicked."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.in_view import prompts_limit, workers_now
from console.modes import MODES
from console.widgets.glyphs import fitted
from engine.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the knobs show. now: workers there are while they become `workers`; limit: what memory allows of prompts,
    0 where that is all."""

    workers: int = 0
    now: int = 0
    prompts: int = 0
    limit: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> Knobs:
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
        self._knobs = Knobs()
        self._read_only = False

    def show(self, snapshot: Snapshot, *, read_only: bool = False) -> None:
        """The knobs as they are set. read_only: they cannot be turned, so there is nothing to click."""
        knobs = Knobs.of(snapshot)
        if (knobs, read_only) != (self._knobs, self._read_only):
            self._knobs, self._read_only = knobs, read_only
            self.refresh()

    def render(self) -> Content:
        """Tabs on the left, knobs on the right: the widest forms that fit together, knobs giving way first."""
        width = self.size.width
        for brief in (False, True):
            tabs = tab_row(self._mode, brief=brief)
            for brevity in range(BREVITIES):
                knobs = knob_row(self._knobs, brevity, turns=not self._read_only)
                if (room := width - tabs.cell_length - knobs.cell_length) > 0:
                    return fitted(self.app, Content.assemble(tabs, " " * room, knobs))
        return fitted(self.app, tabs)


BREVITIES = 4


def tab_row(here: str, *, brief: bool) -> Content:
    """All tabs; brief: the digit alone of those that one is not on."""
    return Content("").join(_tab(mode.name, mode.digit, mode.title, mode.name == here, brief=brief) for mode in MODES)


def knob_row(knobs: Knobs, brevity: int, *, turns: bool = True) -> Content:
    """Both knobs. brevity: 0 says most; the last of BREVITIES is the narrowest form. turns: with signs to click."""
    coming = f"{knobs.now}→" if knobs.now != knobs.workers else ""
    allowed = (f", memory allows {knobs.limit}", f", memory allows {knobs.limit}", f", fits {knobs.limit}")
    limit = "" if not knobs.limit else (*allowed, f" ({knobs.limit})")[brevity]
    tight = brevity == BREVITIES - 1
    prompts = "Prompts" if brevity else "Max prompts"
    return Content("  ").join(
        (
            _knob("Workers", "workers", f"{coming}{knobs.workers}", tight=tight, turns=turns),
            _knob(prompts, "max_prompts", str(knobs.prompts), limit, tight=tight, turns=turns),
        )
    )


def _link(text: str, style: str, action: str) -> Content:
    return Content.styled(text, style).stylize(Style.from_meta({"@click": action}))


def _tab(name: str, digit: str, title: str, here: bool, *, brief: bool) -> Content:
    if here:
        return Content.styled(f" {digit} {title} ", "bold reverse $primary")
    if brief:
        return _link(f" {digit} ", "$primary", f"app.open('{name}')")
    return Content.assemble((f" {digit}", "$primary"), _link(f" {title} ", "$foreground", f"app.open('{name}')"))


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
