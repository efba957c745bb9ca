"""Advice: what the adviser found wrong or wasteful, a line each with what can be done; no row where there is none."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size

from console import text
from console.adviser import Advice, Look, Open, Turn
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import AppScreen, ConsoleScreen
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.view import View
from console.tui.widgets.clickable import clickable, key_of
from console.tui.widgets.glyphs import for_terminal

_ROWS_A_LINE = 14


class AdvicePanel(DashboardPanel):
    """The most urgent advice first. Each action is a link, as is the cross that dismisses it; a key does the first."""

    NAME = "advice"
    PLACE = "bottom"
    ORDER = 90

    DEFAULT_CSS = """
    AdvicePanel {
        padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
        link-style: bold; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $background; link-background-hover: $primary;
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.advice: tuple[Advice, ...] = ()

    def show(self, view: View) -> None:
        """Draw the advice again, where it changed; keys that follow it change with it."""
        assert isinstance(self.screen, AppScreen)
        advice = self.screen.console.adviser.advice
        if advice != self.advice:
            resized = len(advice) != len(self.advice)
            self.advice = advice
            self.refresh(layout=resized)
            self.screen.refresh_bindings()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A row each, as far as that leaves room for the rest."""
        return min(len(self.advice), max(1, viewport.height // _ROWS_A_LINE))

    def render(self) -> Content:
        """All lines."""
        shown = self.advice[: self.size.height]
        keyed, key = first_actionable(self.advice), key_of(self.screen, "advice.take")
        lines = []
        for index, advice in enumerate(shown):
            more = len(self.advice) - len(shown) if index == len(shown) - 1 else 0
            lines.append(advice_line(advice, index, self.size.width, key=key if index == keyed else "", more=more))
        return for_terminal(self.app, Content("\n").join(lines))


def first_actionable(advice: tuple[Advice, ...]) -> int | None:
    """Return the index of the first with an action, which is the one that the key does."""
    return next((index for index, each in enumerate(advice) if each.action is not None), None)


def advice_line(advice: Advice, index: int, width: int, *, key: str = "", more: int = 0) -> Content:
    """One piece of advice in `width` cells: the whole sentence, or the brief one where that does not fit."""
    do = Content("")
    if advice.action is not None:
        label = f" {key} {advice.action.label} " if key else f" {advice.action.label} "
        do = clickable(label, f"screen.take_advice({index})", "bold")
    others = Content.styled(f" +{more}", "$muted") if more else Content("")
    end = Content.assemble(others, " ", do, clickable(" × ", f"screen.dismiss_advice({index})", "bold"))
    room = max(0, width - end.cell_length - 2)
    sentence = advice.sentence if len(advice.sentence) <= room else text.clip(advice.brief, room)
    return Content.assemble(("▲ ", "$warning"), f"{sentence:<{room}}", end)


class AdvisedScreen(ConsoleScreen):
    """A screen with an AdvicePanel, and the keys that take and dismiss advice."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "t",
            "take_advice",
            "Advice",
            id="advice.take",
            mutates=True,
            tooltip="Apply the advice",
        ),
        Binding(
            "T",
            "dismiss_advice",
            "Dismiss advice",
            id="advice.dismiss",
            tooltip="Dismiss the advice for this session",
            show=False,
        ),
    ]

    def action_take_advice(self, index: int | None = None) -> None:
        """Do what the first advice says, or that one: turn the knob, or go where it can be changed."""
        advice = self.query_one(AdvicePanel).advice
        at = first_actionable(advice) if index is None else index
        if at is None or at >= len(advice):
            return
        match advice[at].action:
            case Turn() as turn:
                self._turn(advice[at], turn)
            case Open(mode=mode):
                self.console.action_open(mode)
            case Look(worker=worker):
                self.app.push_screen(WorkerScreen(worker))
        self.query_one(AdvicePanel).show(self.console.view)

    def _turn(self, advice: Advice, turn: Turn) -> None:
        """Turn the knob as far as the engine as it is now still asks for; where it does not, say so."""
        now = self.console.adviser.check(advice, self.console.read_view().snapshot)
        if now is None:
            self.console.adviser.listen(self.console.view.snapshot)
            self.notify(f"Not applied, as this no longer holds: {advice.brief}", severity="warning", markup=False)
            return
        by = now.action.by if isinstance(now.action, Turn) and now.action.knob == turn.knob else 0
        if by * turn.by <= 0:
            self.notify(f"Not applied, as the advice has changed: {now.brief}", severity="warning", markup=False)
            return
        self.console.adviser.follow(now)
        self.console.action_step(turn.knob, min(by, turn.by, key=abs))

    def action_dismiss_advice(self, index: int = 0) -> None:
        """Dismiss the first advice, or that one, for this session."""
        advice = self.query_one(AdvicePanel).advice
        if index < len(advice):
            self.console.adviser.dismiss(advice[index])
            self.query_one(AdvicePanel).show(self.console.view)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Advice can be taken and dismissed where there is any."""
        if action not in ("take_advice", "dismiss_advice") or not self.is_mounted:
            return True
        advice = self.query_one(AdvicePanel).advice
        return bool(advice) if action == "dismiss_advice" else first_actionable(advice) is not None
